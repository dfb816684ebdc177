"""Asynchronous rollouts: episodes continue while the policy is trained, and a step takes the complete groups.

No step waits for its longest episode. The weight versions of an episode's tokens are in `Generation.version_changes`,
and groups that have missed too many weight syncs are restarted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.algorithms.filters import has_signal
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.envs.start_states import StartStates
from quintet.records import INCOMPLETE_OUTCOMES, Outcome, Trajectory, Turn
from quintet.rollout.episode import Episode
from quintet.rollout.episode_loop import EpisodeLoop
from quintet.rollout.sampling_params import SamplingParams


@dataclass(slots=True)
class Group:
    """Episodes from one start state."""

    number: int
    start_state: int
    first_step: int
    """Training step in which its oldest episode started."""
    replay: int
    """See `Episode.replay`."""
    finished: list[Trajectory] = field(default_factory=list)


class AsyncRollout:
    """Keeps `1 + async_ratio` times the groups of a step in flight; each step takes `groups_per_step` complete ones."""

    overlaps: ClassVar[bool] = False
    """Whether episodes are generated while the policy is trained, so that results depend on timing."""

    def __init__(self, loop: EpisodeLoop[Any], start_states: StartStates, config: Experiment) -> None:
        self._loop = loop
        self._start_states = start_states
        self._groups_per_step = config.training.groups_per_step
        self._samples_per_group = config.training.samples_per_group
        self._num_in_flight = math.ceil((1 + config.rollout.async_ratio) * self._groups_per_step)
        self._partial = config.rollout.partial
        self._max_staleness = math.inf if config.rollout.max_staleness is None else config.rollout.max_staleness
        self._max_dropped = config.algorithm.filter.refill_rounds * self._groups_per_step
        self._algorithm = config.algorithm
        self._groups: dict[int, Group] = {}
        self._pending_starts: list[int] = []
        self._num_visits: Counter[int] = Counter()
        """How often the step has used each start state."""
        self._next_number = 0
        self._num_restarted = 0

    def take(self, step: int, sampling: SamplingParams) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the episodes of a step, their groups numbered from 0, and metrics."""
        self._num_restarted = 0
        self._restart_groups(step, sampling)
        self._fill(step, sampling)
        selected: list[Group] = []
        num_dropped = 0
        while len(selected) < self._groups_per_step:
            for group in self._complete_groups()[: self._groups_per_step - len(selected)]:
                del self._groups[group.number]
                if self._is_dropped(group, num_dropped):
                    num_dropped += 1
                else:
                    selected.append(group)
            if len(selected) < self._groups_per_step:
                self._fill(step, sampling, len(selected))
                self._record(self._loop.step())
        return self._episodes_of(selected), self._metrics(step, selected, num_dropped)

    def _is_dropped(self, group: Group, num_dropped: int) -> bool:
        """Return whether another group replaces this one, because its rewards do not differ."""
        return num_dropped < self._max_dropped and not groups_with_signal(group.finished, self._algorithm)

    def _episodes_of(self, groups: Sequence[Group]) -> list[Trajectory]:
        return [replace(episode, group=index) for index, group in enumerate(groups) for episode in group.finished]

    def suspend(self) -> dict[str, Any]:
        """Abort all groups and return the state for a checkpoint as JSON values, including the state of the start
        states. The groups' start states are used again, so that a run that continues and a run that resumes from the
        checkpoint do the same."""
        self._pending_starts = [group.start_state for group in self._groups.values()] + self._pending_starts
        self._loop.abort(list(self._groups))
        self._groups.clear()
        return self._state(self._pending_starts)

    def _state(self, in_flight: Sequence[int]) -> dict[str, Any]:
        return {**self._start_states.state(), "in_flight": list(in_flight), "groups_begun": self._next_number}

    def close(self) -> None:
        """Do nothing: the rollout holds no resources."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `suspend`."""
        self._pending_starts = [int(start) for start in state.get("in_flight", ())]
        self._next_number = int(state.get("groups_begun", 0))

    def _fill(self, step: int, sampling: SamplingParams, num_selected: int = 0) -> None:
        """Start groups until enough are in flight."""
        missing = self._num_missing(num_selected)
        if missing <= 0:
            return
        reused, self._pending_starts = self._pending_starts[:missing], self._pending_starts[missing:]
        for start in [*reused, *self._start_states.take(missing - len(reused))]:
            self._groups[self._next_number] = group = Group(self._next_number, start, step, self._replay(start))
            self._next_number += 1
            self._loop.start(self._episodes(group), sampling)

    def _num_missing(self, num_selected: int) -> int:
        return self._num_in_flight - num_selected - len(self._groups)

    def _replay(self, start: int) -> int:
        """Return the number that distinguishes a new group from others with the same start state: the group's number if
        they may be from several steps, otherwise how often the step has used the start state, as in synchronous
        runs."""
        if self._num_in_flight > self._groups_per_step:
            return self._next_number
        self._num_visits[start] += 1
        return self._num_visits[start] - 1

    def _episodes(self, group: Group) -> list[Episode]:
        samples = range(self._samples_per_group)
        return [Episode(group.start_state, group.number, sample, group.replay) for sample in samples]

    def _restart_groups(self, step: int, sampling: SamplingParams) -> None:
        """Restart stale groups, and without partial rollouts also episodes that are running."""
        for group in list(self._groups.values()):
            stale = self._is_stale(group, step)
            if not stale and (self._partial or self._is_complete(group)):
                continue
            self._record(self._loop.abort([group.number]))
            if stale:
                group.finished.clear()
            completed = {episode.sample for episode in group.finished}
            group.first_step = group.first_step if completed else step
            episodes = [episode for episode in self._episodes(group) if episode.sample not in completed]
            self._num_restarted += len(episodes)
            self._loop.start(episodes, sampling)

    def _is_stale(self, group: Group, step: int) -> bool:
        return step - group.first_step > self._max_staleness

    def _is_complete(self, group: Group) -> bool:
        return len(group.finished) == self._samples_per_group

    def _record(self, episodes: Iterable[Trajectory]) -> list[Group]:
        """Add ended episodes to their groups; return these groups."""
        ended = [episode for episode in episodes if episode.outcome is not Outcome.ABORTED]
        groups = [self._groups[episode.group] for episode in ended]
        for group, episode in zip(groups, ended, strict=True):
            group.finished.append(episode)
        return groups

    def _complete_groups(self) -> list[Group]:
        """Groups whose episodes have all ended, oldest first."""
        return [group for group in self._groups.values() if self._is_complete(group)]

    def _metrics(self, step: int, selected: Sequence[Group], num_dropped: int) -> dict[str, float]:
        staleness = [step - group.first_step for group in selected]
        older, tokens = 0, 0
        for turn in (turn for group in selected for episode in group.finished for turn in episode.turns):
            tokens += len(turn.tokens)
            older += _tokens_before(turn, step - 1)
        return {
            "rollout/staleness/mean": sum(staleness) / len(staleness),
            "rollout/staleness/max": max(staleness),
            "rollout/groups_in_flight": len(self._groups),
            "rollout/episodes_restarted": self._num_restarted,
            "rollout/groups_dropped": num_dropped,
            "rollout/tokens_of_older_weights": older / max(1, tokens),
        }


def groups_with_signal(episodes: Iterable[Trajectory], config: AlgorithmConfig) -> list[int]:
    """Return the numbers of the groups whose rewards, in the precision of a batch, differ; see `has_signal`."""
    completed = [episode for episode in episodes if episode.outcome not in INCOMPLETE_OUTCOMES and episode.turns]
    if not completed:
        return []
    turn_rewards = torch.tensor([turn.reward for episode in completed for turn in episode.turns])
    owner = torch.arange(len(completed)).repeat_interleave(torch.tensor([len(episode.turns) for episode in completed]))
    group = torch.tensor([episode.group for episode in completed])
    rewards = RewardSums.from_rewards(turn_rewards, owner, len(completed)).equalized(group).total.to(turn_rewards.dtype)
    masked = torch.tensor([episode.truncated and config.mask_truncated for episode in completed])
    numbers: torch.Tensor = torch.unique(group[has_signal(rewards, group, config.signal_threshold, masked=masked)])
    return [int(number) for number in numbers]


def _tokens_before(turn: Turn, version: int) -> int:
    """Number of tokens of a turn that weights older than `version` generated."""
    if turn.weight_version >= version:
        return 0
    return next((index for index, newer in turn.version_changes if newer >= version), len(turn.tokens))
