"""What several answers to each prompt say about the policy: pass@k, maj@k, best of n, and means with their intervals.

Answers to one prompt resemble each other, answers to different prompts don't: each prompt first becomes one number,
and means and intervals run over prompts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist, fmean, pstdev, variance

import numpy as np

__all__ = [
    "Estimate",
    "Estimates",
    "Sample",
    "Spread",
    "best_of",
    "estimate",
    "estimates",
    "majority_at_k",
    "majority_of",
    "pass_at_k",
    "validation_metrics",
    "worst_of",
]

ROUNDS, SEED = 1000, 42
"""Of the bootstrap, as in verl."""

Votes = Sequence[tuple[str | None, float]]
"""What was read out of each answer, and the answer's score. Answers that nothing was read out of vote as one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One judged answer. `prompt` tells the prompts of a source apart.

    >>> Sample("gsm8k", "17", 1.0, {"acc": 1.0}, "42").prompt
    '17'
    """

    source: str
    prompt: str
    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What else was measured; `acc` says how right the answer is, 0 to 1."""
    predicted: str | None = None
    """The answer as it was read out of the text, for votes."""

    @property
    def accuracy(self) -> float:
        """`acc`, or the score where there is none."""
        return self.parts.get("acc", self.score)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation of a quantity over repeated draws."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its confidence interval; null bounds where prompts that don't differ tell none."""

    mean: float
    low: float | None
    high: float | None
    prompts: int


@dataclass(frozen=True, slots=True)
class Estimates:
    """What the answers to the prompts of one source come to."""

    prompts: int
    answers: int
    score: Estimate
    std: float | None
    """Standard deviation of the score among answers to one prompt, mean over prompts; null with one answer each."""
    accuracy: Estimate | None
    """Of `acc`, where answers have one."""
    passed: Mapping[int, Estimate]
    """pass@k by k."""
    majority: Mapping[int, Estimate]
    """maj@k by k; empty where nothing is read out of answers."""


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Probability that at least one of `k` answers is right, where `right` of `answers` drawn ones were.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374, eq. 1): the share of all
    subsets of k answers that hold a right one.

    Raises:
        ValueError: k isn't in 1 … `answers`, or `right` isn't in 0 … `answers`.
    """
    if not 1 <= k <= answers or not 0 <= right <= answers:
        raise ValueError(f"pass@{k} of {right} right ones among {answers} answers")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def majority_at_k(votes: Votes, k: int) -> float:
    """Expected score of the answer that most of `k` answers agree on, over all subsets of k of them (maj@k of
    Lewkowycz et al. 2022, arXiv:2206.14858; the vote is that of Wang et al. 2022, arXiv:2203.11171).

    Exact: answers are gone through by what they say, and for each number drawn from a class, distributed
    hypergeometrically, the leaders so far are kept. Among equals one is taken at random. Answers that say the same
    count with their mean score.

    Raises:
        ValueError: k isn't in 1 … the number of votes.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@{k} of {len(votes)} answers")
    classes: dict[str | None, list[float]] = defaultdict(list)
    for predicted, score in votes:
        classes[predicted].append(score)
    rest = len(votes)
    # (drawn, votes of the leaders, number of leaders) -> (probability, the same times the sum of leaders' scores)
    states = {(0, 0, 0): (1.0, 0.0)}
    for scores in classes.values():
        states = _vote(states, len(scores), fmean(scores), rest, k)
        rest -= len(scores)
    return math.fsum(total / leaders for (_, _, leaders), (_, total) in states.items())


_States = dict[tuple[int, int, int], tuple[float, float]]


def _vote(states: _States, members: int, score: float, rest: int, k: int) -> _States:
    """The states after another class, of which 0 … `members` are drawn; `rest` answers are left, its own included."""
    after: _States = {}
    for (drawn, top, leaders), (weight, total) in states.items():
        ways = math.comb(rest, k - drawn)
        for count in range(min(members, k - drawn) + 1):
            chance = math.comb(members, count) * math.comb(rest - members, k - drawn - count) / ways
            if not chance:
                continue
            if count > top:
                key, sums = (drawn + count, count, 1), (weight * chance, weight * chance * score)
            elif count == top and count > 0:
                key, sums = (drawn + count, top, leaders + 1), (weight * chance, (total + weight * score) * chance)
            else:
                key, sums = (drawn + count, top, leaders), (weight * chance, total * chance)
            known = after.get(key, (0.0, 0.0))
            after[key] = (known[0] + sums[0], known[1] + sums[1])
    return after


def best_of(scores: Sequence[float], draws: int) -> Spread:
    """The largest of `draws` scores, drawn with replacement as verl's best@n draws them.

    Its bootstrap is exact here: the i-th smallest of N scores is the largest with probability (i/N)^n - ((i-1)/N)^n.
    """
    return _extreme(sorted(scores), draws)


def worst_of(scores: Sequence[float], draws: int) -> Spread:
    """The smallest of `draws` scores; see `best_of`."""
    return _extreme(sorted(scores, reverse=True), draws)


def _extreme(ordered: Sequence[float], draws: int) -> Spread:
    size = len(ordered)
    chances = [((place + 1) / size) ** draws - (place / size) ** draws for place in range(size)]
    mean = math.fsum(chance * score for chance, score in zip(chances, ordered, strict=True))
    squares = math.fsum(chance * (score - mean) ** 2 for chance, score in zip(chances, ordered, strict=True))
    return Spread(mean, math.sqrt(squares))


def majority_of(votes: Votes, draws: int) -> Spread:
    """Score of the answer that most of `draws` answers agree on, drawn with replacement: verl's maj@n, its 1000
    draws from seed 42 included. Among equals the answer drawn first wins, with the score it was drawn with."""
    codes = {predicted: code for code, predicted in enumerate(dict.fromkeys(predicted for predicted, _ in votes))}
    classes = np.array([codes[predicted] for predicted, _ in votes])
    drawn = _draws(len(votes), draws)
    said = classes[drawn]
    support = (said[:, :, None] == said[:, None, :]).sum(-1)
    winners = drawn[np.arange(ROUNDS), support.argmax(-1)]
    won = np.array([score for _, score in votes])[winners]
    return Spread(float(won.mean()), float(won.std()))


@lru_cache(maxsize=64)
def _draws(size: int, draws: int) -> np.ndarray:
    """Numbers of the answers drawn, [ROUNDS, draws]."""
    return np.random.RandomState(SEED).randint(0, size, (ROUNDS, draws))


def estimate(values: Sequence[float], answers: int, confidence: float = 0.95) -> Estimate:
    """Mean of one value a prompt, and the interval that holds its expectation with that confidence. `answers` lie
    behind the values.

    Values between 0 and 1 take Wilson's score interval (1927, doi:10.1080/01621459.1927.10502953), which stays inside
    the range and keeps its width where all are right or wrong. Its number of trials is the effective one of clustered
    samples (Korn & Graubard 1998, Survey Methodology 24): prompts × m(1 - m) / variance between prompts, never
    fewer than the prompts, where answers to one prompt are all alike, nor more than the answers, where they don't
    resemble each other. One 0/1 answer each gives Wilson's own interval. Other values take the normal approximation
    with the clustered standard error (Miller 2024, arXiv:2411.00640), too narrow below some thirty prompts.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a mean of no values")
    mean, prompts = fmean(values), len(values)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    if all(0.0 <= value <= 1.0 for value in values):
        return Estimate(mean, *_wilson(mean, _effective(values, mean, answers), z), prompts)
    spread = variance(values, mean) if prompts > 1 else 0.0
    if spread <= 0:
        return Estimate(mean, None, None, prompts)
    half = z * math.sqrt(spread / prompts)
    return Estimate(mean, mean - half, mean + half, prompts)


def _effective(values: Sequence[float], mean: float, answers: int) -> float:
    """Independent trials that would tell as much as these prompts."""
    prompts = len(values)
    spread, single = pstdev(values, mean) ** 2, mean * (1 - mean)
    if prompts < 2 or single <= 0:
        return prompts
    most = max(answers, prompts)
    return most if spread * most <= prompts * single else max(prompts * single / spread, prompts)


def _wilson(mean: float, trials: float, z: float) -> tuple[float, float]:
    weight = z * z / trials
    centre = (mean + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(mean * (1 - mean) / trials + weight / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def estimates(
    samples: Sequence[Sample], ks: Sequence[int], *, confidence: float = 0.95, right_from: float = 1.0
) -> Estimates:
    """What the answers of one source say; an answer is right from an accuracy of `right_from`. pass@k and maj@k run
    over the prompts that have k answers.

    Raises:
        ValueError: no samples.
    """
    prompts = list(_by_prompt(samples).values())
    several = [pstdev(sample.score for sample in group) for group in prompts if len(group) > 1]
    voted = any(sample.predicted is not None for sample in samples)
    return Estimates(
        prompts=len(prompts),
        answers=len(samples),
        score=estimate([fmean(sample.score for sample in group) for group in prompts], len(samples), confidence),
        std=fmean(several) if several else None,
        accuracy=_accuracy(prompts, len(samples), confidence),
        passed={k: found for k in ks if (found := _passed(prompts, k, confidence, right_from))},
        majority={k: found for k in ks if voted and (found := _majority(prompts, k, confidence))},
    )


def _by_prompt(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt].append(sample)
    return groups


def _accuracy(prompts: list[list[Sample]], answers: int, confidence: float) -> Estimate | None:
    """An answer without `acc` among others that have one couldn't be judged, and isn't right."""
    if not any("acc" in sample.parts for group in prompts for sample in group):
        return None
    return estimate([fmean(s.parts.get("acc", 0.0) for s in group) for group in prompts], answers, confidence)


def _passed(prompts: list[list[Sample]], k: int, confidence: float, right_from: float) -> Estimate | None:
    enough = [group for group in prompts if len(group) >= k]
    values = [pass_at_k(len(group), sum(s.accuracy >= right_from for s in group), k) for group in enough]
    return estimate(values, sum(map(len, enough)), confidence) if values else None


def _majority(prompts: list[list[Sample]], k: int, confidence: float) -> Estimate | None:
    enough = [group for group in prompts if len(group) >= k]
    values = [majority_at_k([(s.predicted, s.accuracy) for s in group], k) for group in enough]
    return estimate(values, sum(map(len, enough)), confidence) if values else None


def validation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Judged answers under verl's names: `val-core/<source>/<variable>/mean@16`, `val-aux/…`.

    Variables are `reward`, the score, and whatever else was measured. The main one is `acc`, or `reward` without it:
    its mean, and its best@n, maj@n and pass@n at the largest n, are `val-core`, all else is `val-aux`. n runs over
    2, 4, 8 … and the number of answers. best@n, worst@n and maj@n draw with replacement, as verl's do; pass@n is
    `pass_at_k`, of a main variable between 0 and 1, right at 1. A part that an answer lacks, because
    it couldn't be judged, or that is no finite number, is 0.
    """
    sources: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        sources[sample.source].append(sample)
    metrics: dict[str, float] = {}
    for source, found in sources.items():
        variables = {"reward": [sample.score for sample in found]} | _parts(found)
        main = "acc" if "acc" in variables else "reward"
        most = max(Counter(sample.prompt for sample in found).values())
        for name, values in variables.items():
            for metric, value in _variable(found, values, main=name == main).items():
                core = name == main and metric.startswith(("mean", "maj", "best", "pass")) and _n(metric) == most
                metrics[f"val-{'core' if core else 'aux'}/{source}/{name}/{metric}"] = value
    return metrics


def _parts(samples: Sequence[Sample]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for sample in samples for name in sample.parts)
    return {name: [_finite(sample.parts.get(name, 0.0)) for sample in samples] for name in names}


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


def _n(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _variable(samples: Sequence[Sample], values: Sequence[float], *, main: bool) -> dict[str, float]:
    """Metrics of one variable, each the mean over the prompts that have it."""
    groups: dict[str, list[tuple[str | None, float]]] = defaultdict(list)
    for sample, value in zip(samples, values, strict=True):
        groups[sample.prompt].append((sample.predicted, value))
    voted = any(sample.predicted is not None for sample in samples)
    passes = main and all(0.0 <= value <= 1.0 for value in values)
    found: dict[str, list[float]] = defaultdict(list)
    for votes in groups.values():
        for metric, value in _prompt_metrics(votes, voted=voted, passes=passes).items():
            found[metric].append(value)
    return {metric: fmean(each) for metric, each in found.items()}


def _prompt_metrics(votes: Votes, *, voted: bool, passes: bool) -> dict[str, float]:
    """What the answers to one prompt give."""
    scores, size = [score for _, score in votes], len(votes)
    metrics = {f"mean@{size}": fmean(scores)}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = pstdev(scores)
    for n in _sizes(size):
        spreads = {"best": best_of(scores, n), "worst": worst_of(scores, n)}
        if voted:
            spreads["maj"] = majority_of(votes, n)
        for name, spread in spreads.items():
            metrics |= {f"{name}@{n}/mean": spread.mean, f"{name}@{n}/std": spread.std}
        if passes:
            metrics[f"pass@{n}"] = pass_at_k(size, sum(score >= 1.0 for score in scores), n)
    return metrics


def _sizes(size: int) -> list[int]:
    """2, 4, 8 … below `size`, and `size`."""
    return [*(1 << power for power in range(1, (size - 1).bit_length())), size]
