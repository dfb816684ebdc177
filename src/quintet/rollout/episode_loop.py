"""Episode loop: what all loops over the episodes of one engine do with episodes that run and have ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from typing import Generic, Protocol, TypeVar

from quintet.records import Trajectory
from quintet.rollout.engines.engine import RequestEngine
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams


class _HasEpisode(Protocol):
    """State of a running episode."""

    episode: Episode


R = TypeVar("R", bound=_HasEpisode)


class EpisodeLoop(ABC, Generic[R]):
    """Runs episodes with one engine.

    `collect_rollouts` runs episodes to their end. `start` and `step` run the same episodes incrementally, so that they
    can continue across a weight sync.
    """

    def __init__(self, engine: RequestEngine) -> None:
        self._engine = engine
        self._ids = count()
        self._running: dict[int, R] = {}
        """Episodes by request id, in the order in which they were started."""
        self._finished: list[tuple[int, Trajectory]] = []
        """Ids and trajectories that have not been returned, in the order in which the episodes ended."""

    @property
    def busy(self) -> bool:
        """Whether episodes are running, or have ended without having been returned."""
        return bool(self._running or self._finished)

    def collect_rollouts(self, episodes: Sequence[Episode], sampling: SamplingParams) -> Iterator[Trajectory]:
        """Run all episodes and yield their trajectories in the order in which they end. Episodes that are already
        running continue beside them; if there are none, the prefix cache is reset first, so that results do not depend
        on earlier rollouts, to the last bit.

        Raises:
            MachineError: more than `max_failed_share` of the episodes failed.
        """
        pending = self._start(episodes, sampling)
        try:
            while pending:
                self._step()
                finished, self._finished = self._finished, []
                self._finished = [entry for entry in finished if entry[0] not in pending]
                for number, trajectory in finished:
                    if number in pending:
                        pending.remove(number)
                        yield trajectory
                self._check_failures()
        finally:
            # the consumer may have stopped iterating, or an error ends the run
            self._abort(pending)
            self._withdraw(numbers=pending)
            self._take_finished(lambda number, _: number in pending)

    def start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> None:
        """Start episodes beside those that are running; `step` advances them."""
        self._start(episodes, sampling)

    def step(self) -> list[Trajectory]:
        """Advance the engine by one step and return the episodes that ended. Waits for the rest if the engine is idle.

        Raises:
            MachineError: see `collect_rollouts`.
            EngineError: the engine died and is not a `RestartingEngine`.
        """
        self._step()
        self._check_failures()
        return self._take_finished(lambda _number, _trajectory: True)

    def abort(self, groups: Collection[int]) -> list[Trajectory]:
        """Abort the running episodes of groups and return them as `Outcome.ABORTED`, together with episodes of these
        groups that had ended and were not yet returned."""
        ended = self._take_finished(lambda _, trajectory: trajectory.group in groups)
        ended += self._withdraw(groups=groups)
        return ended + self._abort({n for n, running in self._running.items() if running.episode.group in groups})

    def _take_finished(self, is_taken: Callable[[int, Trajectory], bool]) -> list[Trajectory]:
        """Remove and return the ended episodes for which `is_taken(id, trajectory)` is true."""
        taken = [trajectory for number, trajectory in self._finished if is_taken(number, trajectory)]
        self._finished = [entry for entry in self._finished if not is_taken(*entry)]
        return taken

    @abstractmethod
    def _start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> set[int]:
        """Start episodes and return their ids."""

    @abstractmethod
    def _step(self) -> None:
        """Advance engine and episodes, and append the episodes that ended to `_finished`."""

    @abstractmethod
    def _abort(self, numbers: set[int]) -> list[Trajectory]:
        """End the running episodes among `numbers` as `Outcome.ABORTED`, and return their trajectories."""

    def _withdraw(self, *, numbers: Collection[int] = (), groups: Collection[int] = ()) -> list[Trajectory]:
        """Take back episodes that have ended and wait for their rewards, by id or group; return their trajectories."""
        return []

    def _check_failures(self) -> None:
        """
        Raises:
            MachineError: too many episodes have failed.
        """
