"""A process that holds one game's world, as the run sees it. The other end is `quintet.envs.world_process`."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quintet.config.native.worlds import WorldProcessesConfig
from quintet.envs.answers import Rubbish, checked_actions, checked_instruction, observation_from, step_from
from quintet.envs.worlds import Broke, Moved, Opened, failure_from
from quintet.processes.kept import heard
from quintet.processes.wire import Lines, decoded, encoded
from quintet.records import Failure, Step

__all__ = ["Seat"]

START_SECONDS = 120.0
"""Time that importing a user's file, or a simulator, may take."""
LONGEST_LINE = 1 << 28
"""Bytes of one answer."""

STARTING: Final = "start"
RESETTING: Final = "reset"
STEPPING: Final = "step"
CLOSING: Final = "close"
WAITING: Final = "wait"
"""What a process is at; the first three are where a failure happens."""


@dataclass(slots=True, eq=False)
class Seat:
    """One process and what it is at. `game` is the caller's number of the game that it plays, `seed` its start."""

    number: int
    connection: socket.socket
    limits: WorldProcessesConfig
    game: int | None = None
    seed: int = 0
    games: int = 0
    """How many it has begun."""
    ended: bool = False
    """It says no more."""
    ends: float = math.inf
    """When what it is at has taken too long, on the monotonic clock."""
    _at: str = WAITING
    _moves: int = 0
    """Actions that were asked for."""
    _steps: list[Step] = field(default_factory=list)
    _lines: Lines = field(default_factory=Lines)
    _unfinished: int = 0
    """Bytes of a line that hasn't ended yet."""

    def __post_init__(self) -> None:
        self._turn_to(STARTING)

    @property
    def ready(self) -> bool:
        """It has begun."""
        return self._at != STARTING

    @property
    def idle(self) -> bool:
        """It has no game and nothing to do."""
        return self._at == WAITING and self.game is None

    @property
    def pausing(self) -> bool:
        """Its game waits for the policy."""
        return self._at == WAITING and self.game is not None

    @property
    def where(self) -> str:
        """Where a failure of its game happens now."""
        return self._at if self._at in (STARTING, RESETTING) else STEPPING

    @property
    def seconds(self) -> float:
        """Time that what it is at may take."""
        limits = self.limits
        timed = {STARTING: START_SECONDS, STEPPING: limits.step_timeout_seconds, WAITING: math.inf}
        return timed.get(self._at, limits.reset_timeout_seconds)

    def begin(self, game: int, seed: int) -> None:
        """Start a game; a process that hasn't begun itself reads of it then."""
        self.game, self.seed = game, seed
        self.games += 1
        if self.ready:
            self._turn_to(RESETTING)
        self._send({"open": seed})

    def move(self, actions: Sequence[Any]) -> None:
        """Execute actions."""
        self._moves = len(actions)
        self._turn_to(STEPPING)
        self._send({"move": list(actions)})

    def close(self) -> None:
        """End the game."""
        self.game = None
        self._turn_to(CLOSING)
        self._send({"close": True})

    def said(self) -> Iterator[Opened | Moved | Failure]:
        """What it has answered since. A `Failure` is its last word."""
        try:
            for line in self._read():
                answer = self._understood(line)
                if answer is not None:
                    yield answer
        except Rubbish as error:
            yield Failure(self.where, "Rubbish", str(error))

    def _turn_to(self, what: str) -> None:
        self._at = what
        self.ends = time.monotonic() + self.seconds

    def _send(self, message: Mapping[str, Any]) -> None:
        """Where it has ended, its keeper will say so; where it doesn't listen, its time runs out."""
        try:
            self.connection.settimeout(min(self.seconds, START_SECONDS))
            self.connection.sendall(encoded(message))
        except OSError:
            return
        finally:
            self.connection.setblocking(False)

    def _read(self) -> Iterator[bytes]:
        """Lines that have come.

        Raises:
            Rubbish: a line without end.
        """
        while piece := heard(self.connection):
            last = piece.rfind(b"\n")
            self._unfinished = self._unfinished + len(piece) if last < 0 else len(piece) - last - 1
            if self._unfinished > LONGEST_LINE:
                raise Rubbish(f"its process sent more than {LONGEST_LINE >> 20} MiB in one line")
            yield from self._lines.feed(piece)
        self.ended = self.ended or piece is not None

    def _understood(self, line: bytes) -> Opened | Moved | Failure | None:
        """What a line says.

        Raises:
            Rubbish: nothing that was to be said.
        """
        try:
            message = decoded(line)
            if fault := message.get("broken") or message.get("failure"):
                return failure_from(str(fault.get("where", STARTING)), fault)
            return self._answer(message)
        except Rubbish:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise Rubbish(f"its process sent {line!r:.100}") from error

    def _answer(self, message: Mapping[str, Any]) -> Opened | Moved | None:
        if self._at == STARTING and message["ready"]:
            self._turn_to(WAITING if self.game is None else RESETTING)
        elif self._at == RESETTING:
            return self._opened(message["opened"])
        elif self._at == STEPPING:
            return self._stepped(message)
        elif message["closed"]:
            self._turn_to(WAITING)
        return None

    def _opened(self, told: Mapping[str, Any]) -> Opened | None:
        instruction, actions = checked_instruction(told["instruction"]), checked_actions(told["actions"])
        observation = observation_from(told["observation"])
        self._turn_to(WAITING)
        return None if self.game is None else Opened(self.game, instruction, actions, observation)

    def _stepped(self, message: Mapping[str, Any]) -> Moved | None:
        self._steps.append(step_from(message["step"]))
        if len(self._steps) > self._moves:
            raise Rubbish(f"its process made {len(self._steps)} steps for {self._moves} actions")
        self._turn_to(WAITING if message["last"] else STEPPING)
        if self.game is None or not message["last"]:
            return None
        steps, self._steps = tuple(self._steps), []
        return Moved(self.game, steps)

    def overdue(self) -> Failure:
        """Why it is killed when its time is over."""
        words = {STARTING: "isn't ready", RESETTING: "no start", STEPPING: "no step"}.get(self._at, "isn't closed")
        return Failure(self.where, "Timeout", f"{words} after {self.seconds:g} s: its process was killed")

    def broken(self, failure: Failure) -> Broke | None:
        """A failure of its game, if it has one."""
        return None if self.game is None else Broke(self.game, failure)
