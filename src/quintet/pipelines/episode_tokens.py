"""Statistics of tokens that are stored with the episodes of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quintet.pipelines.experience import collate_rollout, completed_episodes
from quintet.pipelines.rollout_step import Rollout
from quintet.pipelines.run import is_due
from quintet.records import Batch, Trajectory
from quintet.runtime.components import Components
from quintet.tracking.trajectories import EpisodeTokens


def with_tokens(components: Components, rollout: Rollout, trained: Batch, step: int) -> Rollout:
    """Return a rollout with the statistics of its tokens, if the episodes of the step are stored.

    Log-probs and entropies are of the weights before the first update of the step, and cost two forward passes.
    Episodes that are not in the `trained` batch, because their group gives no signal, have no advantages.
    """
    tracking = components.config.tracking
    if not tracking.token_statistics or not is_due(step, tracking.trajectories_every_steps):
        return rollout
    return replace(rollout, tokens=list(_episode_tokens(components, rollout, trained, step)))


def _episode_tokens(components: Components, rollout: Rollout, trained: Batch, step: int) -> Iterator[EpisodeTokens]:
    """Yield the statistics of each complete episode of a rollout."""
    episodes, batch = completed_episodes(rollout), collate_rollout(rollout, components.config)
    scorer = components.learners.policy_scorer(step)
    columns = {"learner_logprobs": scorer.compute_log_probs(batch), "entropies": scorer.compute_entropies(batch)}
    advantages = _response_slices(trained, episodes) if trained.advantages is not None else {}
    for index, turns in _response_slices(batch, episodes).items():
        statistics = {turn: {name: _values(columns[name], at) for name in columns} for turn, at in turns.items()}
        for turn, at in advantages.get(index, {}).items():
            statistics[turn]["advantages"] = _values(trained.advantages, at)
        yield EpisodeTokens(episodes[index].group, episodes[index].sample, statistics)


def _values(column: torch.Tensor | None, at: slice) -> list[float]:
    return [] if column is None else [round(value, 6) for value in column[at].tolist()]


def _response_slices(batch: Batch, episodes: Sequence[Trajectory]) -> dict[int, dict[int, slice]]:
    """Return where the response tokens of each turn are in the batch, by the index of their episode.

    The response is the end of the tokens of its turn.
    """
    slices: dict[int, dict[int, slice]] = {}
    ends = batch.lengths.cumsum(0).tolist()
    for end, length, index in zip(ends, batch.lengths.tolist(), batch.trajectory.tolist(), strict=True):
        stop = end - length
        turns, counts = torch.unique_consecutive(batch.turn[stop:end], return_counts=True)
        for turn, count in zip(turns.tolist(), counts.tolist(), strict=True):
            stop += count
            slices.setdefault(index, {})[turn] = slice(stop - len(episodes[index].turns[turn].tokens), stop)
    return slices
