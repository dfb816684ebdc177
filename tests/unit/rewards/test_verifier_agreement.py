"""If these fail, answers in usual forms are scored wrongly, or near misses are accepted."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from quintet.rewards.verifiers import math

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def drawn(monkeypatch_module: pytest.MonkeyPatch) -> list:
    monkeypatch_module.syspath_prepend(str(BENCHMARKS))
    import answer_pairs

    return list(answer_pairs.pairs(20 * len(answer_pairs.CATEGORIES), seed=7))


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    sys.modules.pop("answer_pairs", None)


def test_a_sample_of_the_benchmark_has_no_error(drawn: list) -> None:
    """`python benchmarks/verifier_agreement.py` takes forty times as many."""
    wrong = [
        pair
        for pair in drawn
        if (math.verify_boxed(f"$\\boxed{{{pair.answer}}}$", pair.truth, {}).score == 1.0) is not pair.equal
    ]
    assert not wrong


def test_half_of_the_pairs_are_equal_and_categories_are_of_one_size(drawn: list) -> None:
    assert sum(pair.equal for pair in drawn) * 2 == len(drawn)
    assert len({sum(pair.category == name for pair in drawn) for name in {pair.category for pair in drawn}}) == 1


def test_a_verifier_that_accepts_or_refuses_everything_has_all_errors_of_its_kind(
    drawn: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    measured = runpy.run_path(str(BENCHMARKS / "verifier_agreement.py"))["measured"]
    for verdict, rates in ((True, (1.0, 0.0)), (False, (0.0, 1.0))):
        result = measured(lambda answer, truth, verdict=verdict: verdict, drawn, None)
        assert (result["false_positive_rate"], result["false_negative_rate"]) == rates
