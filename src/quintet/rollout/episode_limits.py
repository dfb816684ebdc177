"""Rules of one env's episodes: response format, limits, and the share of episodes that may fail."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Self

from quintet.config.native.envs import EnvConfig, InteractiveEnvSection
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.config.native.relations import RelationScoring
from quintet.config.native.rollout import RolloutConfig
from quintet.errors import MachineError
from quintet.records import Failure


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode besides those of the env and of its turns; None means no limit."""

    max_actions: int | None = None
    """Actions of the policy in one episode."""
    max_tokens: int | None = None
    """Prompt and response tokens of one episode; prompts that are repeated because the window slid count again."""
    max_failed_share: float = 1.0
    """Share of the concurrent episodes that may fail."""

    @classmethod
    def from_config(cls, env: EnvConfig) -> Self:
        """Read the limits from an env's configuration."""
        if not isinstance(env, InteractiveEnvSection):
            return cls()
        return cls(env.max_actions, env.max_tokens, env.max_failed_share)


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Rollout options, limits and name of one env."""

    name: str
    """Name of the env in stored episodes."""
    config: RolloutConfig
    limits: EpisodeLimits = EpisodeLimits()
    key: str = "env"
    """Config section of the env."""
    env_type: str | None = None
    """Registered name of the env if it differs from `name`."""
    relation_scoring: RelationScoring | None = None
    """How `rollout.state_reward` scores descriptions of its states."""

    @classmethod
    def from_config(cls, env: RunEnv) -> Self:
        """Build the rules of one of a run's envs."""
        kind = None if env.name == env.config.name else env.config.name
        limits = EpisodeLimits.from_config(env.config)
        scoring = env.config.relation_scoring if isinstance(env.config, InteractiveEnvSection) else None
        return cls(env.name, env.rollout, limits, env.key, kind, scoring)

    def tolerating_failures(self) -> Self:
        """Return the same rules without a limit on failed episodes."""
        return replace(self, limits=replace(self.limits, max_failed_share=1.0))


def build_episode_rules(config: Experiment) -> tuple[EpisodeRules, ...]:
    """Build the rules of each of a run's envs, in config order."""
    return tuple(map(EpisodeRules.from_config, config.run_envs))


class FailureMonitor:
    """Counts failures among the last episodes, as many as were running at the same time."""

    def __init__(self, max_failed_share: float, key: str = "env") -> None:
        """`key` is the config section of the env."""
        self._max_failed_share = max_failed_share
        self._key = key
        self._window = 0
        self._last: deque[Failure | None] = deque()
        self._num_failed = 0

    def reset(self) -> None:
        """Start counting for new rollouts."""
        self._window = self._num_failed = 0
        self._last.clear()

    def widen(self, num_running: int) -> None:
        """Raise the window to the number of running episodes."""
        self._window = max(self._window, num_running)

    def record(self, failure: Failure | None) -> None:
        """Count an episode that ended.

        Raises:
            MachineError: too many have failed.
        """
        self._last.append(failure)
        self._num_failed += failure is not None
        if len(self._last) > self._window:
            self._num_failed -= self._last.popleft() is not None
        if self._num_failed > self._max_failed_share * self._window:
            raise self._error()

    def _error(self) -> MachineError:
        first = next(failure for failure in self._last if failure is not None)
        cause = f"first, in {first.where}: {first.error_type}: {first.message}"
        source = "engine" if first.where == "engine" else "environment"
        return MachineError(
            f"{self._num_failed} of {self._window} episodes failed ({cause})",
            f"fix the {source}, or raise {self._key}.max_failed_share (now {self._max_failed_share:g}); "
            "docs/faults.md explains how failures are handled",
        )
