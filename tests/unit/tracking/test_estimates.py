"""If these fail, an evaluation reports chances, votes or intervals that the answers don't bear out."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.tracking.eval_statistics import (
    Sample,
    best_of,
    estimate,
    estimates,
    majority_at_k,
    majority_of,
    pass_at_k,
    validation_metrics,
    worst_of,
)


@pytest.mark.parametrize(
    ("answers", "right", "k", "value"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs hold it
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3)
        (10, 3, 5, 1 - 21 / 252),
        (4, 0, 4, 0.0),
        (4, 3, 2, 1.0),
    ],
)
def test_pass_at_k_by_hand(answers: int, right: int, k: int, value: float) -> None:
    assert pass_at_k(answers, right, k) == pytest.approx(value, abs=1e-15)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(drawn: tuple[int, int, int]) -> None:
    answers, right, k = drawn
    subsets = list(itertools.combinations([True] * right + [False] * (answers - right), k))
    assert pass_at_k(answers, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("answers", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2)])
def test_pass_at_k_rejects_k_above_the_number_of_answers(answers: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(answers, right, k)


def test_the_majority_by_hand() -> None:
    votes = [("4", 1.0), ("4", 1.0), ("5", 0.0)]
    assert majority_at_k(votes, 3) == 1.0
    assert majority_at_k(votes, 1) == pytest.approx(2 / 3)
    # of the pairs, one agrees on 4 and two are split: (1 + ½ + ½) / 3
    assert majority_at_k(votes, 2) == pytest.approx(2 / 3)
    # three disagree with each other and two don't: those win
    assert majority_at_k([("a", 0.0), ("b", 0.0), ("c", 1.0), ("c", 1.0), ("d", 0.0)], 5) == 1.0
    # nothing read out of two answers is a vote, too
    assert majority_at_k([(None, 0.0), (None, 0.0), ("c", 1.0)], 3) == 0.0


def by_subsets(votes: list[tuple[str | None, float]], k: int) -> float:
    """The definition: each subset, ties split evenly, a class counting with its mean score."""
    means = {said: fmean(score for other, score in votes if other == said) for said, _ in votes}
    won = []
    for subset in itertools.combinations(votes, k):
        counts = Counter(said for said, _ in subset)
        leaders = [said for said, count in counts.items() if count == max(counts.values())]
        won.append(fmean(means[said] for said in leaders))
    return fmean(won)


VOTES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1)


@settings(max_examples=150)
@given(VOTES.filter(lambda votes: len(votes) <= 8), st.data())
def test_the_majority_is_that_of_all_subsets(votes: list[tuple[str | None, float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(votes)))
    assert majority_at_k(votes, k) == pytest.approx(by_subsets(votes, k), abs=1e-12)


def test_maj_at_k_is_exact_for_many_answers() -> None:
    """1100 answers: binomials beyond any float."""
    votes = [("right", 1.0)] * 700 + [("wrong", 0.0)] * 400
    assert majority_at_k(votes, 1) == pytest.approx(7 / 11)
    pairs = math.comb(700, 2) + 700 * 400 / 2
    assert majority_at_k(votes, 2) == pytest.approx(pairs / math.comb(1100, 2))


def test_best_and_worst_by_hand() -> None:
    # two of 0, 1 with replacement: 00 01 10 11
    assert best_of([0.0, 1.0], 2).mean == 0.75
    assert worst_of([1.0, 0.0], 2).mean == 0.25
    assert best_of([0.0, 1.0], 2).std == pytest.approx(math.sqrt(0.75 * 0.25))
    assert best_of([3.0, 1.0, 2.0], 1).mean == pytest.approx(2.0)


@settings(max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_best_and_worst_are_those_of_all_draws(scores: list[float], draws: int) -> None:
    every = list(itertools.product(scores, repeat=draws))
    for spread, pick in ((best_of(scores, draws), max), (worst_of(scores, draws), min)):
        results = [pick(each) for each in every]
        assert spread.mean == pytest.approx(fmean(results), abs=1e-9)
        assert spread.std == pytest.approx(math.sqrt(fmean((x - fmean(results)) ** 2 for x in results)), abs=1e-6)


def test_the_sampled_majority_is_deterministic_and_near_its_expectation() -> None:
    votes = [("4", 1.0), ("4", 1.0), ("5", 0.0), ("6", 0.0)]
    draws = itertools.product(range(4), repeat=3)

    def winner(drawn: tuple[int, ...]) -> float:
        results = [votes[i][0] for i in drawn]
        most = max(results.count(one) for one in results)
        return next(votes[i][1] for i in drawn if results.count(votes[i][0]) == most)

    expected = fmean(winner(drawn) for drawn in draws)
    assert majority_of(votes, 3).mean == pytest.approx(expected, abs=0.05)
    assert majority_of(votes, 3) == majority_of(votes, 3)


def test_wilsons_interval_by_hand() -> None:
    """Eight of ten: Wilson's interval at 95 % is 0.490 … 0.943 (Newcombe 1998's formula, by hand)."""
    actual = estimate([1.0] * 8 + [0.0] * 2, 10)
    assert actual.mean == 0.8
    assert (actual.low, actual.high) == (pytest.approx(0.49016, abs=1e-5), pytest.approx(0.94332, abs=1e-5))


def test_the_interval_of_a_perfect_score_has_nonzero_width() -> None:
    """z² / (n + z²) is the width where all agree."""
    actual = estimate([1.0] * 20, 20)
    assert actual.high == 1.0
    assert actual.low == pytest.approx(20 / (20 + 1.959964**2), abs=1e-5)


def test_intervals_account_for_correlated_answers_to_a_prompt() -> None:
    """Four answers each that are all alike tell no more than one; that differ as coins do, as much as forty."""
    alike = estimate([1.0] * 5 + [0.0] * 5, 40)
    assert alike == estimate([1.0] * 5 + [0.0] * 5, 10)
    coins = estimate([0.5] * 10, 40)
    single = estimate([1.0] * 20 + [0.0] * 20, 40)
    assert (coins.low, coins.high) == (single.low, single.high)
    between = estimate([0.75] * 5 + [0.25] * 5, 40)  # 10 · ¼ / (1/16) = 40 trials
    assert between.low == pytest.approx(single.low)
    alone = estimate([0.5], 40)  # one prompt tells nothing of the next
    assert (alone.low, alone.high) == (pytest.approx(0.0546, abs=1e-4), pytest.approx(0.9454, abs=1e-4))


def test_non_binary_scores_use_the_clustered_standard_error() -> None:
    actual = estimate([1.0, 2.0, 3.0, 6.0], 16)  # variance 14/3, standard error √(14/12)
    half = 1.959964 * math.sqrt(14 / 12)
    assert (actual.mean, actual.low, actual.high) == (3.0, pytest.approx(3 - half), pytest.approx(3 + half))
    assert estimate([7.0], 3).low is None
    assert estimate([-0.8, -0.8], 2).low is None, "no spread tells no interval"


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_confidence_intervals_have_their_nominal_coverage(confidence: float) -> None:
    """Prompts of different difficulty, five answers each, 600 evaluations."""
    rng, held = random.Random(3), 0
    for _ in range(600):
        chances = [rng.betavariate(1.0, 1.0) for _ in range(60)]
        values = [sum(rng.random() < chance for _ in range(5)) / 5 for chance in chances]
        actual = estimate(values, 300, confidence)
        assert actual.low is not None
        assert actual.high is not None
        held += actual.low <= 0.5 <= actual.high
    assert held / 600 == pytest.approx(confidence, abs=0.04)


def sample(prompt: str, score: float, predicted: str | None = None, **parts: float) -> Sample:
    return Sample("math", prompt, score, parts, predicted)


def test_estimates_of_a_source() -> None:
    actual = estimates(
        [
            sample("a", 5.0, "4", acc=1.0),
            sample("a", -5.0, "5", acc=0.0),
            sample("b", -5.0, "6", acc=0.0),
            sample("b", -5.0, "6", acc=0.0),
        ],
        [1, 2, 4],
    )
    assert (actual.prompts, actual.answers) == (2, 4)
    assert actual.score.mean == -2.5
    assert actual.std == 2.5
    assert actual.accuracy is not None
    assert actual.accuracy.mean == 0.25
    assert {k: one.mean for k, one in actual.passed.items()} == {1: 0.25, 2: 0.5}
    assert {k: one.mean for k, one in actual.majority.items()} == {1: 0.25, 2: 0.25}


def test_prompts_with_fewer_than_k_answers_are_left_out_of_k() -> None:
    actual = estimates([sample("a", 1.0), sample("a", 0.0), sample("b", 0.0)], [1, 2])
    assert actual.passed[2].mean == 1.0
    assert actual.passed[2].prompts == 1
    assert actual.passed[1].mean == 0.25
    assert actual.majority == {}
    assert actual.accuracy is None


def test_scores_from_pass_threshold_on_count_as_correct() -> None:
    graded = [sample("a", 0.6), sample("a", 0.2)]
    assert estimates(graded, [1]).passed[1].mean == 0.0
    assert estimates(graded, [1], pass_threshold=0.5).passed[1].mean == 0.5


def test_a_score_that_rounding_moved_below_the_threshold_counts() -> None:
    score = 0.7 + 0.2 + 0.1
    assert score < 1.0
    assert estimates([sample("a", score)], [1]).passed[1].mean == 1.0
    assert estimates([sample("a", 0.9999)], [1]).passed[1].mean == 0.0
    metrics = validation_metrics([sample("a", score, acc=score)] * 2)
    assert [value for name, value in metrics.items() if "pass@2" in name] == [1.0]


def test_validation_metrics_have_verls_names() -> None:
    metrics = validation_metrics(
        [sample(prompt, float(right), str(right), acc=float(right)) for prompt in "ab" for right in (1, 0, 0)]
    )
    third = 1 / 3
    assert metrics["val-core/math/acc/mean@3"] == pytest.approx(third)
    assert metrics["val-aux/math/acc/std@3"] == pytest.approx(math.sqrt(third * (1 - third)))
    assert metrics["val-core/math/acc/best@3/mean"] == pytest.approx(1 - (2 / 3) ** 3)
    assert metrics["val-aux/math/acc/best@2/mean"] == pytest.approx(1 - (2 / 3) ** 2)
    assert metrics["val-aux/math/acc/worst@3/mean"] == pytest.approx(third**3)
    assert metrics["val-core/math/acc/pass@3"] == 1.0
    assert metrics["val-aux/math/acc/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val-core/math/acc/maj@3/mean"] == pytest.approx(7 / 27, abs=0.05)
    assert "val-aux/math/reward/mean@3" in metrics
    assert not any("reward/pass" in name for name in metrics)


def test_validation_metrics_without_acc_and_votes() -> None:
    metrics = validation_metrics([sample("a", 2.0, length=3.0), sample("b", 4.0)])
    assert metrics == {"val-core/math/reward/mean@1": 3.0, "val-aux/math/length/mean@1": 1.5}


def test_parts_that_are_no_numbers_dont_end_a_validation() -> None:
    metrics = validation_metrics([sample("a", 1.0, odd=math.nan), sample("a", 0.0, odd=math.inf)])
    assert metrics["val-aux/math/odd/mean@2"] == 0.0
    assert metrics["val-core/math/reward/mean@2"] == 0.5


def test_validation_metrics_are_computed_per_source() -> None:
    metrics = validation_metrics([Sample("a/b", "0", 1.0), Sample("c", "0", 0.0)])
    assert metrics == {"val-core/a/b/reward/mean@1": 1.0, "val-core/c/reward/mean@1": 0.0}
