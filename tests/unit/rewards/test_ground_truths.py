"""If these fail, ground truths that cannot be compared with are scored as wrong answers, or the row is not named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quintet.config.native.data import JudgeConfig, RewardConfig, VerifierConfig
from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError
from quintet.records import Failure, PromptRow, Response
from quintet.rewards.data_sources import Route
from quintet.rewards.factory import build_verifier_scorer
from quintet.rewards.ground_truths import check_rows, ground_truth_problem, raise_data_error
from quintet.rewards.verifier_process import ProcessKind
from quintet.runtime.components import build_components

CODE = {"inputs": ["1"], "outputs": ["2"]}
GOOD = {
    "choice": "B",
    "multiple_choice_boxed": "B",
    "crossthinkqa": "(B)",
    "exact": "text",
    "searchr1": {"target": ["a", "b"]},
    "vqa": "yes",
    "numeric": "1,234.5",
    "gsm8k": "so\n#### 72",
    "gsm8k_flexible": "72",
    "math": r"\frac{1}{2}",
    "geometry3k": "2",
    "countdown": {"target": 24, "numbers": [3, 8]},
    "ifeval": {"func_name": "validate_lowercase"},
    "ifeval_roll": {"func_name": "verify_keyword_frequency", "word": "x", "N": 2.0},
    "code": CODE,
}
NOTHING = (None, "", "  ", [], {}, float("nan"), [None], {"target": None})


def row(ground_truth: Any, number: int = 0, **extra: Any) -> PromptRow:
    return PromptRow(number, "mine", (), ground_truth, extra, location=f"rows.jsonl, row {number}")


def problem(verifier: str, ground_truth: Any, **extra: Any) -> str | None:
    return ground_truth_problem(row(ground_truth, **extra), Route(verifier, ProcessKind()))


@pytest.mark.parametrize("verifier", GOOD)
def test_a_good_ground_truth_has_no_problem(verifier: str) -> None:
    assert problem(verifier, GOOD[verifier]) is None


@pytest.mark.parametrize("ground_truth", [np.array(["a", "b"]), {"target": np.array(["a"])}, 3, 3.5, True, np.int64(3)])
def test_arrays_and_numbers_are_ground_truths_of_words(ground_truth: Any) -> None:
    assert all(problem(verifier, ground_truth) is None for verifier in ("exact", "searchr1", "vqa"))


@pytest.mark.parametrize("verifier", GOOD)
@pytest.mark.parametrize("ground_truth", NOTHING, ids=repr)
def test_a_ground_truth_that_is_not_there_is_a_problem_for_each_verifier(verifier: str, ground_truth: Any) -> None:
    assert problem(verifier, ground_truth) is not None


@pytest.mark.parametrize(
    ("verifier", "ground_truth", "extra", "names"),
    [
        ("choice", "Paris", {}, "'Paris' is not the letter"),
        ("choice", "B. Rome", {"choices": ["Rome", "Paris"]}, "disagree"),
        *(
            (verifier, [["a"]], {}, "is a list")
            for verifier in ("choice", "exact", "searchr1", "vqa", "numeric", "math")
        ),
        ("numeric", "five", {}, "not a number"),
        ("numeric", ["0", "five"], {}, "not a number"),
        ("numeric", "5", {"absolute_tolerance": "much"}, "tolerance"),
        ("countdown", 24, {}, "lacks target or numbers"),
        ("countdown", {"target": "x", "numbers": [1]}, {}, "x"),
        ("countdown", {"target": 1, "numbers": [[1]]}, {}, "cannot compare with"),
        ("ifeval", {"func_name": "validate_everything"}, {}, "validate_everything"),
        ("ifeval", "not json", {}, "ifeval"),
        ("code", "no tests", {}, "tests"),
        ("code_sandbox", "x", {"case_type": "input"}, "no tests"),
        ("reasoning_gym", "x", {}, "generator"),
        ("reasoning_gym", None, {"generator": "chain_sum"}, "neither an answer"),
    ],
)
def test_a_ground_truth_of_the_wrong_kind_is_a_problem(
    verifier: str, ground_truth: Any, extra: dict[str, Any], names: str
) -> None:
    told = problem(verifier, ground_truth, **extra)
    assert told is not None
    assert names in told


def test_rows_are_named_before_a_run() -> None:
    rows = [row("B"), row("Paris", 1), row("C", 2), row(None, 3)]
    with pytest.raises(ConfigError) as error:
        check_rows(rows, RewardConfig(kind="choice", function_arguments={}))
    assert error.value.key == "data.truth_key"
    assert error.value.source is None, "the source of the key is not named"
    told = str(error.value)
    assert all(
        part in told for part in ("rows.jsonl, row 1", "'Paris'", "'choice'", "rows.jsonl, row 3", "2 of 4 rows")
    )
    assert "quintet data check" in (error.value.hint or "")


def test_a_run_checks_its_rows_before_it_loads_models() -> None:
    config = Experiment(reward=RewardConfig(kind="choice", function_arguments={}))
    prompts = SimpleNamespace(first_rows=lambda: [row("Paris")])
    with pytest.raises(ConfigError, match=r"rows.jsonl, row 0"):
        build_components(config, Path("no-such-model"), prompts)


def test_the_check_ends_with_its_time_and_does_not_read_further() -> None:
    def rows() -> Iterator[PromptRow]:
        yield row("B")
        raise AssertionError("read beyond the time limit")

    assert check_rows(rows(), RewardConfig(kind="choice", function_arguments={}), seconds=-1.0) == 1


def test_rows_that_no_verifier_scores_are_not_checked() -> None:
    judge = JudgeConfig(url="http://127.0.0.1:1/v1", model="m")
    for reward in (
        RewardConfig(function="a.py:f", function_arguments={}),
        RewardConfig(judge=judge, function_arguments={}),
        RewardConfig(function_arguments={}, verifiers={"mine": VerifierConfig(arguments={}, judge=judge)}),
    ):
        assert check_rows([row(None)], reward) == 0


@pytest.mark.parametrize(
    ("verifier", "ground_truth"),
    [("choice", "Paris"), ("numeric", "five"), ("math", "")],
)
def test_a_row_that_shows_up_later_ends_the_run_with_its_name(verifier: str, ground_truth: Any) -> None:
    config = RewardConfig(kind=verifier, function_arguments={}, workers=1, timeout_seconds=60.0)
    with closing(build_verifier_scorer(config, 100)) as scorer:
        scorer.submit(Response(0, row(ground_truth, 4711), "no answer", 1))
        with pytest.raises(ConfigError, match=r"rows.jsonl, row 4711 has the ground truth") as error:
            scorer.drain()
    assert error.value.exit_status == 2
    assert ".py:" not in str(error.value)


def test_a_ground_truth_that_only_a_worker_finds_unusable_ends_the_run() -> None:
    told = Failure("reward", "GroundTruthError", "no value")
    with pytest.raises(ConfigError, match=r"row 3 .* 'math' cannot compare with: no value"):
        raise_data_error(row("x", 3), Route("math", ProcessKind()), told)
    raise_data_error(row("x", 3), Route("math", ProcessKind()), Failure("reward", "Timeout", "10 s"))
