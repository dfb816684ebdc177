"""Reward of a response from its score: scale, format reward and overlong penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.native.data import OverlongConfig, RewardConfig
from quintet.records import Failure, Response, RewardResult
from quintet.reward_sum import sum_rewards
from quintet.rewards.format_check import has_format


def overlong_penalty(tokens: int, max_tokens: int, config: OverlongConfig) -> float:
    """DAPO's soft penalty (Yu et al. 2025, eq. 13), at most 0: it grows to `penalty` over the last `buffer` tokens
    before `max_tokens`, and continues to grow beyond.

    >>> overlong_penalty(95, 100, OverlongConfig(buffer=20))
    -0.75
    """
    excess = tokens - (max_tokens - config.buffer)
    return min(-excess / config.buffer * config.penalty, 0.0)


@dataclass(frozen=True, slots=True)
class RewardComputation:
    """Computes rewards as configured by `reward`, for responses of at most `max_response_tokens`."""

    config: RewardConfig
    max_response_tokens: int

    def reward(self, response: Response, outcome: Mapping[str, Any] | Failure) -> RewardResult:
        """Return the reward of a response from the result of a verifier or user's function, or from its failure.

        Scores of verifiers, between 0 and 1, map to `wrong_reward` … 1; scores of a custom function are unchanged.
        Both are multiplied by `scale`; format reward and overlong penalty are added.
        """
        if isinstance(outcome, Failure):
            return self._failed(response, outcome)
        score = float(outcome["score"])
        if not math.isfinite(score):
            return self._failed(response, Failure("reward", "ValueError", f"the score is {score}"))
        own: Mapping[str, float] = outcome.get("reward_components") or {}
        components = {"acc": min(max(score, 0.0), 1.0), **own, **self._extra_components(response)}
        wrong = self.config.wrong_reward
        base = wrong + score * (1.0 - wrong) if self.config.function is None else score
        answer, is_measured = outcome.get("extracted_answer"), self.config.function is None or "acc" in own
        total = self._total(base, components)
        return RewardResult(response.id, total, components, answer, measures_success=is_measured)

    def raw_reward(self, response: Response, score: float | Failure) -> RewardResult:
        """Return the reward of a response from a score of any range, reported as `model_score`, or from its failure."""
        components = self._extra_components(response)
        if isinstance(score, Failure):
            total = self._total(self.config.wrong_reward, components)
            return RewardResult(response.id, total, components, failure=score)
        total = self._total(score, components)
        return RewardResult(response.id, total, {"model_score": score, **components}, measures_success=False)

    def _failed(self, response: Response, failure: Failure) -> RewardResult:
        components = {"acc": 0.0, **self._extra_components(response)}
        total, is_measured = self._total(self.config.wrong_reward, components), self.config.function is None
        return RewardResult(response.id, total, components, None, failure, measures_success=is_measured)

    def _extra_components(self, response: Response) -> dict[str, float]:
        """Return `format`, 1 if the response has the required format, and `overlong`, at most 0."""
        components = {}
        if self.config.format is not None:
            components["format"] = float(has_format(self.config.format, response.whole_text))
        if self.config.overlong is not None:
            components["overlong"] = overlong_penalty(response.tokens, self.max_response_tokens, self.config.overlong)
        return components

    def _total(self, base: float, components: Mapping[str, float]) -> float:
        format_reward = self.config.format_reward * components["format"] if self.config.format is not None else 0.0
        penalty = components["overlong"] if self.config.overlong is not None else 0.0
        return sum_rewards((base * self.config.scale, format_reward, penalty))
