"""Statistics of several answers per prompt: pass@k, maj@k, best-of-n, means and confidence intervals.

Answers to one prompt are correlated, so each prompt is first reduced to one number; means and intervals are over
prompts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist, fmean, pstdev, variance

import numpy as np

BOOTSTRAP_ROUNDS, BOOTSTRAP_SEED = 1000, 42
"""Same as verl."""

Votes = Sequence[tuple[str | None, float]]
"""(extracted answer, score) pairs. Responses without an extracted answer form one class."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Scored answer; `prompt` identifies the prompt within its source.

    >>> Sample("gsm8k", "17", 1.0, {"acc": 1.0}, "42").prompt
    '17'
    """

    source: str
    prompt: str
    score: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Components of the score; `acc` is the accuracy, 0 to 1."""
    extracted_answer: str | None = None
    """Extracted answer, for majority votes."""

    @property
    def accuracy(self) -> float:
        """`acc`, or the score if there is none."""
        return self.reward_components.get("acc", self.score)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation of a quantity over repeated draws."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over prompts with its confidence interval; bounds are None if the prompts do not vary."""

    mean: float
    low: float | None
    high: float | None
    prompts: int


@dataclass(frozen=True, slots=True)
class Estimates:
    """Statistics of the answers to the prompts of one source."""

    prompts: int
    answers: int
    score: Estimate
    std: float | None
    """Standard deviation of the score within a prompt, averaged over prompts; None with one answer per prompt."""
    accuracy: Estimate | None
    """Accuracy, if answers have `acc`."""
    passed: Mapping[int, Estimate]
    """pass@k by k."""
    majority: Mapping[int, Estimate]
    """maj@k by k; empty without extracted answers."""


def pass_at_k(answers: int, correct: int, k: int) -> float:
    """Return the probability that at least one of `k` answers is correct, given `correct` of `answers` samples.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374, eq. 1): the share of all
    subsets of k answers that contain a correct one.

    Raises:
        ValueError: `k` is not in 1 … `answers`, or `correct` is not in 0 … `answers`.
    """
    if not 1 <= k <= answers or not 0 <= correct <= answers:
        raise ValueError(f"pass@{k} of {correct} correct among {answers} answers")
    return 1.0 - math.comb(answers - correct, k) / math.comb(answers, k)


def majority_at_k(votes: Votes, k: int) -> float:
    """Return the expected score of the majority answer over all subsets of `k` answers.

    maj@k of Lewkowycz et al. 2022 (arXiv:2206.14858) with the vote of Wang et al. 2022 (arXiv:2203.11171). Exact:
    dynamic programming over classes of equal answers; the number drawn from each class is hypergeometric, and the
    state tracks the leading classes. Ties are broken uniformly at random. A class scores its mean score.

    Raises:
        ValueError: `k` is not in 1 … the number of votes.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@{k} of {len(votes)} answers")
    classes: dict[str | None, list[float]] = defaultdict(list)
    for predicted, score in votes:
        classes[predicted].append(score)
    remaining = len(votes)
    # (drawn, votes of the leaders, number of leaders) -> (probability, probability × sum of the leaders' scores)
    states = {(0, 0, 0): (1.0, 0.0)}
    for scores in classes.values():
        states = _add_class(states, len(scores), fmean(scores), remaining, k)
        remaining -= len(scores)
    return math.fsum(total / leaders for (_, _, leaders), (_, total) in states.items())


_States = dict[tuple[int, int, int], tuple[float, float]]


def _add_class(states: _States, members: int, score: float, remaining: int, k: int) -> _States:
    """Return the states after drawing 0 … `members` answers of a class; `remaining` answers include this class."""
    after: _States = {}
    for (drawn, top, leaders), (weight, total) in states.items():
        num_combinations = math.comb(remaining, k - drawn)
        for count in range(min(members, k - drawn) + 1):
            chance = math.comb(members, count) * math.comb(remaining - members, k - drawn - count) / num_combinations
            if not chance:
                continue
            if count > top:
                key, sums = (drawn + count, count, 1), (weight * chance, weight * chance * score)
            elif count == top and count > 0:
                key, sums = (drawn + count, top, leaders + 1), (weight * chance, (total + weight * score) * chance)
            else:
                key, sums = (drawn + count, top, leaders), (weight * chance, total * chance)
            previous = after.get(key, (0.0, 0.0))
            after[key] = (previous[0] + sums[0], previous[1] + sums[1])
    return after


def best_of(scores: Sequence[float], draws: int) -> Spread:
    """Return mean and deviation of the largest of `draws` scores drawn with replacement, verl's best@n.

    Exact instead of verl's bootstrap: the i-th smallest of N scores is the largest with probability
    (i/N)^n - ((i-1)/N)^n.
    """
    return _extreme(sorted(scores), draws)


def worst_of(scores: Sequence[float], draws: int) -> Spread:
    """Return mean and deviation of the smallest of `draws` scores; see `best_of`."""
    return _extreme(sorted(scores, reverse=True), draws)


def _extreme(ordered: Sequence[float], draws: int) -> Spread:
    size = len(ordered)
    chances = [((rank + 1) / size) ** draws - (rank / size) ** draws for rank in range(size)]
    mean = math.fsum(chance * score for chance, score in zip(chances, ordered, strict=True))
    squares = math.fsum(chance * (score - mean) ** 2 for chance, score in zip(chances, ordered, strict=True))
    return Spread(mean, math.sqrt(squares))


def majority_of(votes: Votes, draws: int) -> Spread:
    """Return mean and deviation of the majority answer's score over `draws` answers drawn with replacement.

    verl's maj@n with the same bootstrap (1000 rounds, seed 42). Ties go to the answer drawn first."""
    codes = {predicted: code for code, predicted in enumerate(dict.fromkeys(predicted for predicted, _ in votes))}
    classes = np.array([codes[predicted] for predicted, _ in votes])
    drawn = _draws(len(votes), draws)
    drawn_classes = classes[drawn]
    support = (drawn_classes[:, :, None] == drawn_classes[:, None, :]).sum(-1)
    winners = drawn[np.arange(BOOTSTRAP_ROUNDS), support.argmax(-1)]
    scores = np.array([score for _, score in votes])[winners]
    return Spread(float(scores.mean()), float(scores.std()))


@lru_cache(maxsize=64)
def _draws(size: int, draws: int) -> np.ndarray:
    """Return indices of the drawn answers, [rounds, draws]."""
    return np.random.RandomState(BOOTSTRAP_SEED).randint(0, size, (BOOTSTRAP_ROUNDS, draws))


def estimate(values: Sequence[float], answers: int, confidence: float = 0.95) -> Estimate:
    """Return the mean of one value per prompt and its confidence interval; `answers` is the total number of answers.

    Values between 0 and 1 use Wilson's score interval (1927, doi:10.1080/01621459.1927.10502953), which stays within
    [0, 1] and does not collapse if all values are 0 or 1. The number of trials is the effective sample size of
    clustered samples (Korn & Graubard 1998, Survey Methodology 24): prompts × m(1 - m) / variance between prompts,
    clamped to [number of prompts, number of answers]. One 0/1 answer per prompt gives Wilson's original interval.
    Other values use the normal approximation with the clustered standard error (Miller 2024, arXiv:2411.00640),
    which is too narrow for fewer than about thirty prompts.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("mean of an empty sequence")
    mean, prompts = fmean(values), len(values)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    if all(0.0 <= value <= 1.0 for value in values):
        return Estimate(mean, *_wilson(mean, _effective_trials(values, mean, answers), z), prompts)
    spread = variance(values, mean) if prompts > 1 else 0.0
    if spread <= 0:
        return Estimate(mean, None, None, prompts)
    half = z * math.sqrt(spread / prompts)
    return Estimate(mean, mean - half, mean + half, prompts)


def _effective_trials(values: Sequence[float], mean: float, answers: int) -> float:
    """Return the effective number of independent trials."""
    prompts = len(values)
    spread, single = pstdev(values, mean) ** 2, mean * (1 - mean)
    if prompts < 2 or single <= 0:
        return prompts
    upper = max(answers, prompts)
    return upper if spread * upper <= prompts * single else max(prompts * single / spread, prompts)


def _wilson(mean: float, trials: float, z: float) -> tuple[float, float]:
    weight = z * z / trials
    centre = (mean + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(mean * (1 - mean) / trials + weight / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def estimates(
    samples: Sequence[Sample], ks: Sequence[int], *, confidence: float = 0.95, pass_threshold: float = 1.0
) -> Estimates:
    """Return the statistics of the answers of one source.

    An answer is correct if its accuracy is at least `pass_threshold`. pass@k and maj@k are over prompts with at least k
    answers.

    Raises:
        ValueError: `samples` is empty.
    """
    prompts = list(_by_prompt(samples).values())
    several = [pstdev(sample.score for sample in group) for group in prompts if len(group) > 1]
    has_votes = any(sample.extracted_answer is not None for sample in samples)
    return Estimates(
        prompts=len(prompts),
        answers=len(samples),
        score=estimate([fmean(sample.score for sample in group) for group in prompts], len(samples), confidence),
        std=fmean(several) if several else None,
        accuracy=_accuracy(prompts, len(samples), confidence),
        passed={k: value for k in ks if (value := _pass_at_k(prompts, k, confidence, pass_threshold))},
        majority={k: value for k in ks if has_votes and (value := _majority_at_k(prompts, k, confidence))},
    )


def _by_prompt(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt].append(sample)
    return groups


def _accuracy(prompts: list[list[Sample]], answers: int, confidence: float) -> Estimate | None:
    """Return the accuracy; an answer without `acc` among others with one could not be scored and counts as 0."""
    if not any("acc" in sample.reward_components for group in prompts for sample in group):
        return None
    return estimate(
        [fmean(s.reward_components.get("acc", 0.0) for s in group) for group in prompts], answers, confidence
    )


def _reaches(score: float, threshold: float) -> bool:
    """Return whether a score is at least the threshold, up to rounding: 0.7 + 0.2 + 0.1 is 0.9999999999999999."""
    return score >= threshold or math.isclose(score, threshold)


def _pass_at_k(prompts: list[list[Sample]], k: int, confidence: float, pass_threshold: float) -> Estimate | None:
    eligible = [group for group in prompts if len(group) >= k]
    values = [pass_at_k(len(group), sum(_reaches(s.accuracy, pass_threshold) for s in group), k) for group in eligible]
    return estimate(values, sum(map(len, eligible)), confidence) if values else None


def _majority_at_k(prompts: list[list[Sample]], k: int, confidence: float) -> Estimate | None:
    eligible = [group for group in prompts if len(group) >= k]
    values = [majority_at_k([(s.extracted_answer, s.accuracy) for s in group], k) for group in eligible]
    return estimate(values, sum(map(len, eligible)), confidence) if values else None


def validation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of scored answers under verl's names: `val-core/<source>/<variable>/mean@16`, `val-aux/…`.

    Variables are `reward` (the score) and all score components. The main variable is `acc`, or `reward` without it.
    Its mean, and best@n, maj@n and pass@n for the largest n, are `val-core`; everything else is `val-aux`. n is 2, 4,
    8 … and the number of answers. best@n, worst@n and maj@n draw with replacement, like verl; pass@n is `pass_at_k`
    of a main variable in [0, 1], correct at 1. Missing and non-finite components count as 0.
    """
    sources: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        sources[sample.source].append(sample)
    metrics: dict[str, float] = {}
    for source, source_samples in sources.items():
        variables = {"reward": [sample.score for sample in source_samples]} | _score_components(source_samples)
        main = "acc" if "acc" in variables else "reward"
        max_n = max(Counter(sample.prompt for sample in source_samples).values())
        for name, values in variables.items():
            for metric, value in _variable_metrics(source_samples, values, main=name == main).items():
                core = (
                    name == main
                    and metric.startswith(("mean", "maj", "best", "pass"))
                    and int(metric.partition("@")[2].partition("/")[0]) == max_n
                )
                metrics[f"val-{'core' if core else 'aux'}/{source}/{name}/{metric}"] = value
    return metrics


def _score_components(samples: Sequence[Sample]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for sample in samples for name in sample.reward_components)
    return {name: [_finite(sample.reward_components.get(name, 0.0)) for sample in samples] for name in names}


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


def _variable_metrics(samples: Sequence[Sample], values: Sequence[float], *, main: bool) -> dict[str, float]:
    """Return the metrics of one variable, averaged over the prompts that have them."""
    groups: dict[str, list[tuple[str | None, float]]] = defaultdict(list)
    for sample, value in zip(samples, values, strict=True):
        groups[sample.prompt].append((sample.extracted_answer, value))
    has_votes = any(sample.extracted_answer is not None for sample in samples)
    passes = main and all(0.0 <= value <= 1.0 for value in values)
    per_prompt: dict[str, list[float]] = defaultdict(list)
    for votes in groups.values():
        for metric, value in _prompt_metrics(votes, has_votes=has_votes, passes=passes).items():
            per_prompt[metric].append(value)
    return {metric: fmean(values) for metric, values in per_prompt.items()}


def _prompt_metrics(votes: Votes, *, has_votes: bool, passes: bool) -> dict[str, float]:
    """Return the metrics of the answers to one prompt."""
    scores, size = [score for _, score in votes], len(votes)
    metrics = {f"mean@{size}": fmean(scores)}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = pstdev(scores)
    # Return 2, 4, 8 … below `size`, and `size`.
    for n in [*(1 << power for power in range(1, (size - 1).bit_length())), size]:
        spreads = {"best": best_of(scores, n), "worst": worst_of(scores, n)}
        if has_votes:
            spreads["maj"] = majority_of(votes, n)
        for name, spread in spreads.items():
            metrics |= {f"{name}@{n}/mean": spread.mean, f"{name}@{n}/std": spread.std}
        if passes:
            metrics[f"pass@{n}"] = pass_at_k(size, sum(_reaches(score, 1.0) for score in scores), n)
    return metrics
