"""What a world's games are played by: its rules, what ends a game besides the world, and how many may fail."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Self

from quintet.config.native import Experiment, PlayedWorld, RolloutConfig, WorldConfig
from quintet.config.native.worlds import PlayedConfig
from quintet.errors import MachineError
from quintet.records import Failure

__all__ = ["GameLimits", "Health", "Rules", "rules_of"]


@dataclass(frozen=True, slots=True)
class GameLimits:
    """What ends a game besides its world and the limits of its turns; None sets no limit."""

    actions: int | None = None
    """Actions of the policy in one game."""
    tokens: int | None = None
    """Tokens of one game, read and written. What is read again because the window slid counts again."""
    failed_share: float = 1.0
    """Share of the games side by side that may fail."""

    @classmethod
    def of(cls, world: WorldConfig) -> Self:
        """Those of a world's configuration."""
        if not isinstance(world, PlayedConfig):
            return cls()
        return cls(world.max_actions, world.max_tokens, world.max_failed_share)


@dataclass(frozen=True, slots=True)
class Rules:
    """How the games of one world are played."""

    name: str
    """What the world is called in stored games."""
    config: RolloutConfig
    limits: GameLimits = GameLimits()
    key: str = "world"
    """Where the world's configuration stands."""
    kind: str | None = None
    """Which world that is, where the name doesn't say it."""

    @classmethod
    def of(cls, one: PlayedWorld) -> Self:
        """Those of one of a run's worlds."""
        kind = None if one.name == one.config.name else one.config.name
        return cls(one.name, one.rollout, GameLimits.of(one.config), one.key, kind)

    def forgiving(self) -> Self:
        """The same where no failure ends anything."""
        return replace(self, limits=replace(self.limits, failed_share=1.0))


def rules_of(config: Experiment) -> tuple[Rules, ...]:
    """Those of each of a run's worlds, in their order."""
    return tuple(map(Rules.of, config.played))


class Health:
    """How many of the last games failed: of as many as were played side by side at most."""

    def __init__(self, limit: float, key: str = "world") -> None:
        """`key` is where the world's configuration stands."""
        self._limit = limit
        self._key = key
        self._size = 0
        self._last: deque[Failure | None] = deque()
        self._failed = 0

    def restart(self) -> None:
        """A new round begins."""
        self._size = self._failed = 0
        self._last.clear()

    def widen(self, size: int) -> None:
        """So many games are played now."""
        self._size = max(self._size, size)

    def count(self, failure: Failure | None) -> None:
        """A game has ended.

        Raises:
            MachineError: too many have failed.
        """
        self._last.append(failure)
        self._failed += failure is not None
        if len(self._last) > self._size:
            self._failed -= self._last.popleft() is not None
        if self._failed > self._limit * self._size:
            raise self._too_many()

    def _too_many(self) -> MachineError:
        first = next(failure for failure in self._last if failure is not None)
        told = f"{self._failed} of {self._size} games failed (first, in {first.where}: {first.kind}: {first.message})"
        limit = f"or raise {self._key}.max_failed_share (now {self._limit:g})"
        mend = "mend the engine" if first.where == "engine" else "mend the world"
        return MachineError(told, f"{mend}, {limit}; docs/faults.md says what happens when what fails")
