"""Many worlds at a time: asked now, answering when they are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.envs.answers import Rubbish, checked_actions, checked_instruction, checked_observation, checked_step
from quintet.envs.world import World
from quintet.processes.kept import told
from quintet.records import Failure, Observation, Step

__all__ = [
    "Answered",
    "Broke",
    "LocalWorlds",
    "Moved",
    "Opened",
    "Worlds",
    "close_world",
    "failure_from",
    "failure_of",
    "moves",
]


@dataclass(frozen=True, slots=True)
class Opened:
    """A game has begun."""

    game: int
    instruction: str
    actions: tuple[str, ...]
    """The legal action words."""
    observation: Observation


@dataclass(frozen=True, slots=True)
class Moved:
    """A game's world has executed actions: a step each, up to the one that ended the game."""

    game: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Broke:
    """A game's world can't go on: it raised, hung, died or answered rubbish."""

    game: int
    failure: Failure


Answered = Opened | Moved | Broke


class Worlds(Protocol):
    """Where games are played. Each game is a number of the caller's own, and is asked one thing at a time."""

    @property
    def seconds(self) -> float:
        """Time that this process has spent in worlds, or with waiting for them."""
        ...

    def open(self, game: int, seed: int) -> None:
        """Begin a game; `Opened` or `Broke` answers."""
        ...

    def move(self, game: int, actions: Sequence[Any]) -> None:
        """Execute legal actions until the game ends; `Moved` or `Broke` answers."""
        ...

    def drop(self, game: int) -> None:
        """The game has ended, or is given up in the middle of whatever its world is at; it answers no more."""
        ...

    def answers(self, *, wait: bool = False, seconds: float | None = None) -> list[Answered]:
        """What has been answered since; `wait` until there is something, where anything was asked, or for about so
        many seconds.

        Raises:
            UserError: no world can be played any more.
        """
        ...

    @property
    def asked(self) -> bool:
        """Answers are to come."""
        ...

    def close(self) -> None:
        """End all games and let go of processes."""
        ...


class LocalWorlds:
    """Worlds of this process: each answers before the next is asked. One that hangs, hangs the run."""

    def __init__(self, make_world: Callable[[], World]) -> None:
        self._make_world = make_world
        self._worlds: dict[int, World] = {}
        self._answers: list[Answered] = []
        self.seconds = 0.0

    def open(self, game: int, seed: int) -> None:
        """See `Worlds.open`."""
        started = time.perf_counter()
        self._answers.append(self._opened(game, seed))
        self.seconds += time.perf_counter() - started

    def move(self, game: int, actions: Sequence[Any]) -> None:
        """See `Worlds.move`."""
        started = time.perf_counter()
        self._answers.append(self._moved(game, actions))
        self.seconds += time.perf_counter() - started

    def drop(self, game: int) -> None:
        """See `Worlds.drop`. What a world raises as it is closed costs nothing: its game is over."""
        world = self._worlds.pop(game, None)
        if world is not None:
            close_world(world)
        if self._answers:
            self._answers = [answer for answer in self._answers if answer.game != game]

    def answers(self, *, wait: bool = False, seconds: float | None = None) -> list[Answered]:
        """See `Worlds.answers`."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def asked(self) -> bool:
        """See `Worlds.asked`."""
        return bool(self._answers)

    def close(self) -> None:
        """See `Worlds.close`."""
        for game in list(self._worlds):
            self.drop(game)

    def _opened(self, game: int, seed: int) -> Answered:
        where = "start"
        try:
            world = self._worlds[game] = self._make_world()
            instruction, actions = checked_instruction(world.instruction()), checked_actions(world.actions)
            where = "reset"
            return Opened(game, instruction, actions, checked_observation(world.reset(seed)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a world raises is kept as data
            return Broke(game, failure_of(where, error))

    def _moved(self, game: int, actions: Sequence[Any]) -> Answered:
        try:
            return Moved(game, tuple(moves(self._worlds[game], actions)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a world raises is kept as data
            return Broke(game, failure_of("step", error))


def moves(world: World, actions: Sequence[Any]) -> Iterator[Step]:
    """Execute one action after another, until the game ends.

    Raises:
        Rubbish: the world answered what isn't a step.
    """
    for action in actions:
        step = checked_step(world.step(action))
        yield step
        if step.terminated or step.truncated:
            return


def close_world(world: World) -> None:
    """End a game. What a world raises then costs nothing: the game is over."""
    try:
        world.close()
    except (Exception, SystemExit):  # noqa: BLE001 - see above
        return


def failure_of(where: str, error: BaseException) -> Failure:
    """A world's fault as data, with the place in its file; `where` is `start`, `reset` or `step`."""
    if isinstance(error, Rubbish):
        return Failure(where, "Rubbish", str(error))
    return failure_from(where, told(error))


def failure_from(where: str, fault: Mapping[str, Any]) -> Failure:
    """The same from what `quintet.processes.kept.told` made of it."""
    hint = f"; {fault['hint']}" if fault.get("hint") else ""
    return Failure(where, str(fault["kind"]), f"{fault['message']}{hint}")
