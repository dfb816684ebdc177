"""Scorer of prompts of several data sources, some of which have scorers of their own."""

from __future__ import annotations

from collections.abc import Mapping

from quintet.records import Response, RewardResult
from quintet.rewards.reward_managers import RewardScorer


class DomainScorers:
    """See `RewardScorer`: a scorer for each of some data sources, and one for all others."""

    def __init__(self, others: RewardScorer, by_source: Mapping[str, RewardScorer]) -> None:
        self._others, self._by_source = others, by_source

    @property
    def _scorers(self) -> tuple[RewardScorer, ...]:
        return (self._others, *self._by_source.values())

    def submit(self, response: Response) -> None:
        self._by_source.get(response.prompt_row.data_source, self._others).submit(response)

    def ready(self) -> list[RewardResult]:
        return [result for scorer in self._scorers for result in scorer.ready()]

    def drain(self) -> list[RewardResult]:
        return [result for scorer in self._scorers for result in scorer.drain()]

    def close(self) -> None:
        for scorer in self._scorers:
            scorer.close()
