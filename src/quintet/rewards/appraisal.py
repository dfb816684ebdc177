"""From what rules say of an answer to its reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.native.data import OverlongConfig, RewardConfig
from quintet.records import Answer, Failure, Verdict
from quintet.rewards.form import has_form

__all__ = ["Appraiser", "overlong_penalty"]


def overlong_penalty(tokens: int, longest: int, config: OverlongConfig) -> float:
    """DAPO's soft penalty (Yu et al. 2025, eq. 13), at most 0: over the last `buffer` tokens before `longest` it grows
    from 0 to `penalty`, and on.

    >>> overlong_penalty(95, 100, OverlongConfig(buffer=20))
    -0.75
    """
    beyond = tokens - (longest - config.buffer)
    return min(-beyond / config.buffer * config.penalty, 0.0)


@dataclass(frozen=True, slots=True)
class Appraiser:
    """What the reward section adds to rules. `longest_reply` counts tokens."""

    config: RewardConfig
    longest_reply: int

    def verdict(self, answer: Answer, outcome: Mapping[str, Any] | Failure) -> Verdict:
        """The reward of an answer: what rules or a user's function said of it, or why they didn't.

        Scores of rules lie between 0 and 1 and reach from `worst` to 1; those of a user's function are taken as they
        are. Both are multiplied by `scale`; what form and length are worth comes on top.
        """
        if isinstance(outcome, Failure):
            return self._failed(answer, outcome)
        score = float(outcome["score"])
        if not math.isfinite(score):
            return self._failed(answer, Failure("reward", "ValueError", f"the score is {score}"))
        own = self.config.function is None
        given = dict(outcome.get("parts") or {})
        parts = {"acc": min(max(score, 0.0), 1.0), **given, **self._additions(answer)}
        worst = self.config.worst
        base = worst + score * (1.0 - worst) if own else score
        return Verdict(answer.id, self._total(base, parts), parts, outcome.get("predicted"))

    def _failed(self, answer: Answer, failure: Failure) -> Verdict:
        parts = {"acc": 0.0, **self._additions(answer)}
        return Verdict(answer.id, self._total(self.config.worst, parts), parts, None, failure)

    def _additions(self, answer: Answer) -> dict[str, float]:
        """`format`: 1 where the answer has the form; `overlong`: what its length costs, at most 0."""
        found = {}
        if self.config.format is not None:
            found["format"] = float(has_form(self.config.format, answer.text))
        if self.config.overlong is not None:
            found["overlong"] = overlong_penalty(answer.tokens, self.longest_reply, self.config.overlong)
        return found

    def _total(self, base: float, parts: Mapping[str, float]) -> float:
        form = self.config.format_reward * parts["format"] if self.config.format is not None else 0.0
        overlong = parts["overlong"] if self.config.overlong is not None else 0.0
        return base * self.config.scale + form + overlong
