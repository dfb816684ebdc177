"""Games that outlast their step: they go on while the policy learns, and a step takes those that are through.

No step waits for its longest game. What a game's earlier tokens were written by is recorded with them
(`Generation.switches`), and none that has missed too many weight updates is learnt from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from quintet.algorithms.filters import has_signal
from quintet.config.native import Experiment
from quintet.envs.seeds import Starts
from quintet.records import UNPLAYED, Outcome, Trajectory, Turn
from quintet.rollout.agent_loop import Game, Sampling

__all__ = ["GameStream", "Games", "telling"]


class Games(Protocol):
    """What plays: worlds turn by turn, or questions with one answer each."""

    @property
    def busy(self) -> bool: ...

    def begin(self, games: Sequence[Game], sampling: Sampling) -> None: ...

    def advance(self) -> list[Trajectory]: ...

    def abort(self, groups: Collection[int]) -> list[Trajectory]: ...


@dataclass(slots=True)
class _Group:
    """The games from one start state."""

    number: int
    start: int
    begun: int
    """Step in which its oldest game began."""
    ended: list[Trajectory] = field(default_factory=list)


class GameStream:
    """`1 + async_ratio` times the groups of a step are in flight; each step takes as many as it wants."""

    def __init__(self, games: Games, starts: Starts, config: Experiment) -> None:
        self._games = games
        self._starts = starts
        self._wanted = config.training.groups_per_step
        self._samples = config.training.samples_per_group
        self._in_flight = math.ceil((1 + config.rollout.async_ratio) * self._wanted)
        self._partial = config.rollout.partial
        self._most_stale = math.inf if config.rollout.max_staleness is None else config.rollout.max_staleness
        self._spare = config.algorithm.filter.refill_rounds * self._wanted
        self._threshold = config.algorithm.signal_threshold
        self._groups: dict[int, _Group] = {}
        self._pending: list[int] = []
        self._number = 0
        self._restarted = 0

    def take(self, step: int, sampling: Sampling) -> tuple[list[Trajectory], dict[str, float]]:
        """The games of a step, their groups numbered from 0, and what is to be logged."""
        self._restarted = 0
        self._restart(step, sampling)
        self._fill(step, sampling)
        taken: list[_Group] = []
        dropped = 0
        while len(taken) < self._wanted:
            for group in self._through()[: self._wanted - len(taken)]:
                del self._groups[group.number]
                if dropped < self._spare and not telling(group.ended, self._threshold):
                    dropped += 1
                else:
                    taken.append(group)
            if len(taken) < self._wanted:
                self._fill(step, sampling, len(taken))
                self._advance()
        games = [replace(game, group=index) for index, group in enumerate(taken) for game in group.ended]
        return games, self._measures(step, taken, dropped)

    def suspend(self) -> dict[str, Any]:
        """Give up what runs, so that a run that goes on from here and one that is resumed here do the same: the same
        starts, played anew. What a checkpoint keeps of it, for JSON."""
        self._pending = [group.start for group in self._groups.values()] + self._pending
        self._games.abort(list(self._groups))
        self._groups.clear()
        return {"in_flight": self._pending, "groups_begun": self._number}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `suspend` gave."""
        self._pending = [int(start) for start in state.get("in_flight", ())]
        self._number = int(state.get("groups_begun", 0))

    def _fill(self, step: int, sampling: Sampling, taken: int = 0) -> None:
        """Begin groups until enough are in flight."""
        missing = self._in_flight - taken - len(self._groups)
        if missing <= 0:
            return
        again, self._pending = self._pending[:missing], self._pending[missing:]
        for start in [*again, *self._starts.take(missing - len(again))]:
            self._groups[self._number] = group = _Group(self._number, start, step)
            self._number += 1
            self._games.begin(self._all(group), sampling)

    def _all(self, group: _Group) -> list[Game]:
        """Its games; the number tells those of the same start apart that are in flight at once."""
        return [Game(group.start, group.number, sample, group.number) for sample in range(self._samples)]

    def _restart(self, step: int, sampling: Sampling) -> None:
        """Play anew what is too old, and what was in the middle where replies don't outlast an update."""
        for group in list(self._groups.values()):
            stale = step - group.begun > self._most_stale
            if not stale and (self._partial or len(group.ended) == self._samples):
                continue
            self._note(self._games.abort([group.number]))
            if stale:
                group.ended.clear()
            played = {game.sample for game in group.ended}
            group.begun = group.begun if played else step
            games = [game for game in self._all(group) if game.sample not in played]
            self._restarted += len(games)
            self._games.begin(games, sampling)

    def _advance(self) -> None:
        self._note(self._games.advance())

    def _note(self, games: Iterable[Trajectory]) -> None:
        """Keep what came to its end."""
        for game in games:
            if game.outcome is not Outcome.ABORTED:
                self._groups[game.group].ended.append(game)

    def _through(self) -> list[_Group]:
        """Groups whose games have all ended, those begun first in front."""
        return [group for group in self._groups.values() if len(group.ended) == self._samples]

    def _measures(self, step: int, taken: Sequence[_Group], dropped: int) -> dict[str, float]:
        ages = [step - group.begun for group in taken]
        older, tokens = 0, 0
        for turn in (turn for group in taken for game in group.ended for turn in game.turns):
            tokens += len(turn.tokens)
            older += _written_before(turn, step - 1)
        return {
            "rollout/staleness/mean": sum(ages) / len(ages),
            "rollout/staleness/max": max(ages),
            "rollout/groups_in_flight": len(self._groups),
            "rollout/games_played_anew": self._restarted,
            "rollout/groups_dropped": dropped,
            "rollout/tokens_of_older_weights": older / max(1, tokens),
        }


def telling(games: Iterable[Trajectory], threshold: float) -> list[int]:
    """Numbers of the groups whose rewards differ; see `has_signal`."""
    played = [game for game in games if game.outcome not in UNPLAYED and game.turns]
    if not played:
        return []
    rewards = torch.tensor([game.reward for game in played])
    group = torch.tensor([game.group for game in played])
    found: torch.Tensor = torch.unique(group[has_signal(rewards, group, threshold)])
    return [int(number) for number in found]


def _written_before(turn: Turn, version: int) -> int:
    """Tokens of a turn that older weights wrote."""
    if turn.weight_version >= version:
        return 0
    return next((place for place, newer in turn.switches if newer >= version), len(turn.tokens))
