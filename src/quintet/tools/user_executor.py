"""Replies of simulated users in worker processes: a user who hangs, dies or raises only ends its own episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from quintet.config.interaction_files import run_users
from quintet.config.native.interactions import InteractionsConfig, UserConfig
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeStarted
from quintet.records import Failure, Observation, Step
from quintet.tools.executor import request_envs
from quintet.tools.interaction import Interaction, UserReply
from quintet.tools.tool import ToolEpisode
from quintet.tools.tool_env import RequestEnv
from quintet.tools.users import load_user

ENV = "quintet.tools.user_executor:UserEnv"


class UserEnv(RequestEnv):
    """Replies to the conversations of one episode, each `{"user": …, "messages": …, "episode": …}`."""

    def __init__(self, users: Mapping[str, Mapping[str, Any]]) -> None:
        """`users` has the configuration of each user by name."""
        configs = {name: UserConfig.model_validate(config) for name, config in users.items()}
        self._builders = {name: load_user(name, config) for name, config in configs.items()}
        self._user: Interaction | None = None

    def step(self, turn: Mapping[str, Any]) -> Step:
        """Return the reply of a user, who is created at the first one."""
        if self._user is None:
            self._user = self._builders[turn["user"]]()
            self._user.create(ToolEpisode(**turn["episode"]))
        reply = self._user.reply(turn["messages"])
        if not isinstance(reply, UserReply):
            raise TypeError(f"reply() returned a {type(reply).__name__}, not a UserReply")
        info = {"has_reward": reply.reward is not None, "ended": reply.ended}
        return Step(Observation(reply.text), reply.reward or 0.0, False, False, info)

    def close(self) -> None:
        """Close the user."""
        if self._user is not None:
            self._user.close()


class UserExecutor:
    """The replies of the users of many episodes at a time, each in a process of its own."""

    def __init__(self, config: InteractionsConfig) -> None:
        users = {name: user.model_dump(mode="json") for name, user in run_users(config).items()}
        self._envs = request_envs(config, ENV, {"users": users})
        self._turns: dict[int, Mapping[str, Any] | None] = {}
        """What awaits a reply, by episode."""

    @property
    def pending(self) -> bool:
        """Whether replies are awaited."""
        return any(turn is not None for turn in self._turns.values())

    def submit(
        self, episode: int, user: str, messages: Sequence[Mapping[str, Any]], row: ToolEpisode, seed: int
    ) -> None:
        """Begin a reply to the last of these messages."""
        turn = {"user": user, "messages": list(messages), "episode": asdict(row)}
        begins = episode not in self._turns
        self._turns[episode] = turn
        if begins:
            self._envs.start(episode, seed)
        else:
            self._envs.step(episode, [turn])

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[tuple[int, UserReply | Failure]]:
        """Return the replies that have arrived, by episode, and failures in place of replies; `wait` waits for an event
        up to `seconds`, without a limit if they are None."""
        finished = [self._handle(event) for event in self._envs.poll(wait=wait, seconds=seconds)]
        return [result for result in finished if result is not None]

    def drop(self, episode: int) -> None:
        """End an episode and its user; an awaited reply does not arrive."""
        if episode in self._turns:
            del self._turns[episode]
            self._envs.drop(episode)

    def close(self) -> None:
        """End all processes."""
        self._turns.clear()
        self._envs.close()

    def _handle(self, event: EnvEvent) -> tuple[int, UserReply | Failure] | None:
        if isinstance(event, EpisodeStarted):
            self._envs.step(event.episode, [self._turns[event.episode]])
            return None
        self._turns[event.episode] = None
        if not isinstance(event, ActionsExecuted):
            return event.episode, replace(event.failure, where="interaction")
        (step,) = event.steps
        reward = step.reward if step.info["has_reward"] else None
        return event.episode, UserReply(step.observation.text, reward, bool(step.info["ended"]))
