"""Simulated users that reply to the responses to prompts."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.native.section import NonNegative, NotEmpty, RunsCode, Section


class UserConfig(Section):
    """Configuration of a simulated user."""

    user: Annotated[NotEmpty | None, RunsCode()] = None
    """Built-in user (`gsm8k`), or your own class as `file.py:Class` or `module:Class`; null takes the built-in user of
    the entry's name."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Keyword arguments of your own class."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.arguments and (self.user is None or ":" not in self.user):
            yield "`arguments` need a class of your own in `user`", "user=file.py:Class", "arguments={}"


class InteractionsConfig(Section):
    """Conversations with simulated users: a response without tool calls is continued after the reply of a user, up to
    `rollout.max_turns` turns."""

    users: Annotated[dict[str, UserConfig], Field(default_factory=dict)]
    """The users by name. A row names its user as `name` in `extra_info.interaction_kwargs`; of only one user, rows need
    not."""
    file: Annotated[NotEmpty | None, RunsCode()] = None
    """Interaction file of verl (`interaction: [{name: …, class_name: …, config: …}]`) with further users; null for
    none."""
    reward_weight: NonNegative = 1.0
    """Factor on the rewards of users, which are added to those of the responses that they reply to; 0 only passes them
    on to the reward function, as `turn_scores` in `extra_info`."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit of one reply, seconds; then its process is killed and the episode has failed."""
    max_processes: PositiveInt = 64
    """Maximum number of processes that run users. An episode keeps its process from its first reply to its end; further
    episodes wait."""
    memory_gib: PositiveFloat | None = None
    """Address space limit of a process, GiB; null sets no limit."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if not self.users and self.file is None:
            yield "there are no users: `users` is empty and `file` is not set", "users.gsm8k={}"
