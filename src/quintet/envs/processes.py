"""Worlds in processes of their own: one that raises, hangs, dies or answers rubbish costs its own game and no other.

Processes are forked from a keeper that has loaded the world, and play one game after another. What takes longer than
its time is killed with all that it started. Nothing here waits unless it is asked to: a loop looks for answers between
an engine's steps.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from quintet.config.native.worlds import CustomWorldConfig, PlayedConfig, WorldProcessesConfig
from quintet.envs.seat import Seat
from quintet.envs.world import WORLDS
from quintet.envs.worlds import Answered, Broke
from quintet.errors import ConfigError, MachineError
from quintet.processes.kept import KeeperProcess, how_it_ended
from quintet.records import Failure

__all__ = ["ProcessWorlds"]

WORKER = "quintet.envs.world_process"
MOST_BAD_KEEPERS = 3
"""Keepers in a row that end before any process was ready."""


class ProcessWorlds:
    """See `Worlds`. Its processes end with the run, however that ends."""

    def __init__(self, config: PlayedConfig, limits: WorldProcessesConfig) -> None:
        self.seconds = 0.0
        self._config, self._limits = config, limits
        memory = None if limits.memory_gib is None else int(limits.memory_gib * (1 << 30))
        self._setup = {"world": config.model_dump(mode="json"), "memory_bytes": memory}
        self._selector = selectors.DefaultSelector()
        self._keepers: list[KeeperProcess] = []
        self._seats: dict[int, Seat] = {}
        self._playing: dict[int, Seat] = {}
        self._queue: deque[tuple[int, int]] = deque()
        self._answers: list[Answered] = []
        self._asked: set[int] = set()
        self._broken: dict[int, Failure] = {}
        self._born = 0
        self._bad_keepers = 0
        self._bad_start: Failure | None = None
        # a forked child of the run has the object, but not the processes
        self._let_go = weakref.finalize(self, _close, self._keepers, os.getpid())

    def open(self, game: int, seed: int) -> None:
        """See `Worlds.open`."""
        self._asked.add(game)
        self._queue.append((game, seed))

    def move(self, game: int, actions: Sequence[Any]) -> None:
        """See `Worlds.move`."""
        started = time.perf_counter()
        if game in self._broken:
            self._answers.append(Broke(game, self._broken.pop(game)))
        else:
            self._asked.add(game)
            self._playing[game].move(actions)
        self.seconds += time.perf_counter() - started

    def drop(self, game: int) -> None:
        """See `Worlds.drop`. A world in the middle of something is killed, another closed."""
        started = time.perf_counter()
        self._asked.discard(game)
        self._broken.pop(game, None)
        if self._answers:
            self._answers = [answer for answer in self._answers if answer.game != game]
        seat = self._playing.pop(game, None)
        if seat is None:
            self._queue = deque(one for one in self._queue if one[0] != game)
        elif seat.pausing:
            seat.close()
        else:
            self._forget(seat)
        self.seconds += time.perf_counter() - started

    def answers(self, *, wait: bool = False, seconds: float | None = None) -> list[Answered]:
        """See `Worlds.answers`."""
        started = time.perf_counter()
        if self._seats or self._queue:
            self._look(0.0)
        while wait and self._asked and not self._answers:
            self._look(math.inf if seconds is None else seconds)
            wait = seconds is None
        answers, self._answers = self._answers, []
        self.seconds += time.perf_counter() - started
        return answers

    @property
    def asked(self) -> bool:
        """See `Worlds.asked`."""
        return bool(self._asked or self._answers)

    def check(self) -> None:
        """Make a process before there is a game for it.

        Raises:
            ConfigError: it can't begin: a user's own world can't be loaded.
            MachineError: no process can be started.
        """
        while self._bad_start is None and not any(seat.ready for seat in self._seats.values()):
            if not self._seats:
                self._fork()
            self._look(math.inf)
        if self._bad_start is not None:
            failure, self._bad_start = self._bad_start, None
            message = failure.message if failure.kind == "ConfigError" else f"{failure.kind}: {failure.message}"
            raise ConfigError(message, key="world.path", value=getattr(self._config, "path", None))

    def close(self) -> None:
        """See `Worlds.close`."""
        for seat in list(self._seats.values()):
            self._forget(seat)
        for games in (self._playing, self._queue, self._asked, self._answers, self._broken):
            games.clear()
        for keeper in self._keepers:
            self._selector.unregister(keeper.connection)
        _close(self._keepers, os.getpid())

    # ---- looking

    def _look(self, seconds: float) -> None:
        """Hear what there is, or wait so long for it; then see who is late and who waits for a process."""
        self._hand_out()
        ends = min((seat.ends for seat in self._seats.values()), default=math.inf)
        seconds = min(seconds, max(ends - time.monotonic(), 0.0))
        for key, _ in self._selector.select(None if seconds == math.inf else seconds):
            key.data()
        if time.monotonic() >= ends:
            self._end_overdue()
        self._hand_out()

    def _listen(self, seat: Seat) -> bool:
        """Hear a process; says whether it may have more to say."""
        anything = False
        if seat.number not in self._seats:
            return False
        for answer in seat.said():
            anything = True
            if isinstance(answer, Failure):
                self._give_up(seat, answer)
                return False
            self._asked.discard(answer.game)
            self._answers.append(answer)
        if seat.ready:
            self._bad_keepers = 0
        if seat.ended:
            # how, the keeper says; until then the connection would wake us for nothing
            self._unregister(seat)
        return anything and not seat.ended

    def _attend(self) -> None:
        """What the keeper has to say."""
        try:
            for word in self._keepers[0].news():
                seat = self._seats.get(word["died"])
                if seat is not None:
                    self._died(seat, word["status"])
        except OSError:
            self._replace_keeper()

    def _died(self, seat: Seat, status: int) -> None:
        # what it said last may still lie in the connection
        while self._listen(seat):
            pass
        if seat.number in self._seats:
            self._give_up(seat, Failure(seat.where, "ProcessDied", how_it_ended(status)))

    def _end_overdue(self) -> None:
        for seat in [one for one in self._seats.values() if time.monotonic() >= one.ends]:
            # this process may have looked away for longer than that
            self._listen(seat)
            if seat.number in self._seats and time.monotonic() >= seat.ends:
                self._give_up(seat, seat.overdue())

    # ---- handing out

    def _hand_out(self) -> None:
        """Start the games that wait, as far as there are processes for them."""
        idle = [one for one in self._seats.values() if one.idle and not self._worn(one)] if self._queue else []
        while self._queue:
            seat = idle.pop() if idle else self._fork()
            if seat is None:
                return
            game, seed = self._queue.popleft()
            self._playing[game] = seat
            seat.begin(game, seed)

    def _worn(self, seat: Seat) -> bool:
        most = self._limits.games_per_process
        return most is not None and seat.games >= most

    def _fork(self) -> Seat | None:
        """A new process, if there may be one more; one that has played enough makes room."""
        if len(self._seats) >= self._limits.most:
            worn = next((one for one in self._seats.values() if one.idle and self._worn(one)), None)
            if worn is None:
                return None
            self._forget(worn)
        self._born += 1
        try:
            connection = self._keeper().fork(self._born, self._setup)
        except OSError:
            # the keeper's end is noticed by itself, and another one asked
            return None
        seat = self._seats[self._born] = Seat(self._born, connection, self._limits)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._listen(seat))
        return seat

    # ---- ending

    def _give_up(self, seat: Seat, failure: Failure) -> None:
        """A process has failed, and the game that it plays."""
        self._forget(seat)
        broke = seat.broken(failure)
        if broke is None:
            self._bad_start = self._bad_start or (None if seat.ready else failure)
        elif broke.game in self._asked:
            self._asked.discard(broke.game)
            self._answers.append(broke)
        else:
            # the policy is writing: it is told when the world is to move
            self._broken[broke.game] = failure
        self._playing.pop(-1 if seat.game is None else seat.game, None)

    def _forget(self, seat: Seat) -> None:
        """End a process, whatever it is at."""
        del self._seats[seat.number]
        self._unregister(seat)
        seat.connection.close()
        try:
            self._keepers[0].signal(seat.number, signal.SIGKILL)
        except OSError:
            # it ended with its keeper
            return

    def _unregister(self, seat: Seat) -> None:
        if seat.connection in self._selector.get_map():
            self._selector.unregister(seat.connection)

    # ---- the keeper

    def _keeper(self) -> KeeperProcess:
        """What makes processes; it has loaded what worlds need.

        Raises:
            OSError: it has ended.
        """
        if not self._keepers:
            keeper = KeeperProcess(f"{WORKER}:work")
            self._keepers.append(keeper)
            self._selector.register(keeper.connection, selectors.EVENT_READ, self._attend)
            keeper.load([WORKER, _place(self._config)])
        return self._keepers[0]

    def _replace_keeper(self) -> None:
        """The keeper has died, and all its processes with it. Games that hadn't begun wait for the next.

        Raises:
            MachineError: so have those before it.
        """
        self._bad_keepers += 1
        self._selector.unregister(self._keepers[0].connection)
        for seat in list(self._seats.values()):
            if seat.ready or seat.game is None:
                words = "the process that keeps those of worlds has died"
                self._give_up(seat, Failure(seat.where, "ProcessDied", words))
            else:
                self._forget(seat)
                self._queue.append((seat.game, seat.seed))
                self._playing.pop(seat.game)
        self._keepers.pop().close()
        if self._bad_keepers >= MOST_BAD_KEEPERS:
            raise MachineError("processes for worlds can't be started", "see what they wrote above")


def _place(config: PlayedConfig) -> str:
    """The module or file of a world."""
    if isinstance(config, CustomWorldConfig):
        return config.path
    target = WORLDS.get(config.name).target
    return target.partition(":")[0] if isinstance(target, str) else target.__module__


def _close(keepers: list[KeeperProcess], owner: int) -> None:
    while keepers and os.getpid() == owner:
        keepers.pop().close()
