"""Replies of simulated users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quintet.config.interaction_files import run_users
from quintet.config.native.interactions import InteractionsConfig
from quintet.records import Failure
from quintet.rollout.chat.chat_format import without_surrogates
from quintet.rollout.chat.reply_messages import ReplyMessages
from quintet.rollout.replies import Reply
from quintet.rollout.single_turn_loop import RunningPrompt
from quintet.tools.interaction import UserReply
from quintet.tools.tool import ToolEpisode
from quintet.tools.user_executor import UserExecutor
from quintet.tools.users import load_user, user_name


class UserReplies:
    """See `ReplySource`: replies to every response."""

    reward_key = "turn_scores"

    def __init__(self, config: InteractionsConfig, messages: ReplyMessages) -> None:
        """
        Raises:
            ConfigError: see `load_user`.
        """
        self.messages = messages
        self.reward_weight = config.reward_weight
        users = run_users(config)
        for name, user in users.items():
            load_user(name, user)
        self._names = tuple(users)
        self._executor = UserExecutor(config)
        self._num_replies = self._num_ended = 0

    @property
    def pending(self) -> bool:
        return self._executor.pending

    def submit(self, number: int, running: RunningPrompt, messages: Sequence[Mapping[str, Any]]) -> bool:
        row = running.prompt_row
        arguments = row.extra.get("interaction_kwargs") or {}
        # in Parquet, the arguments of all rows are the same fields, null where they are missing
        episode = ToolEpisode(row.ground_truth, {key: value for key, value in arguments.items() if value is not None})
        self._executor.submit(number, user_name(row.extra, self._names), messages, episode, running.episode.seed)
        return True

    def poll(self, *, wait: bool, seconds: float | None) -> list[tuple[int, Reply]]:
        return [(number, self._reply(reply)) for number, reply in self._executor.poll(wait=wait, seconds=seconds)]

    def drop(self, number: int) -> None:
        self._executor.drop(number)

    def pop_metrics(self) -> dict[str, float]:
        metrics = {"interaction/replies": float(self._num_replies), "interaction/ended": float(self._num_ended)}
        self._num_replies = self._num_ended = 0
        return metrics

    def close(self) -> None:
        self._executor.close()

    def _reply(self, reply: UserReply | Failure) -> Reply:
        if isinstance(reply, Failure):
            return Reply(failure=reply)
        self._num_replies += 1
        self._num_ended += reply.ended
        return Reply((without_surrogates(reply.text),), () if reply.reward is None else (reply.reward,), reply.ended)
