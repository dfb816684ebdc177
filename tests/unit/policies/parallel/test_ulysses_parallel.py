"""If these fail, a policy with Ulysses parallelism learns something else than one on a single device."""

from __future__ import annotations

from typing import Any

import pytest
from model_parallel_ranks import Case, assert_agrees, run_cases

from quintet.errors import ConfigError
from quintet.policies.parallel.ulysses_parallel import check_ulysses

CASES = {
    "qwen2": Case("qwen2", ulysses=2),
    "one key-value head": Case("llama", ulysses=2, kv_heads=1),
    "a head for each": Case("mistral", ulysses=2, kv_heads=4),
    "one pass, recomputed, logits in pieces": Case(
        "qwen3", ulysses=2, budget=None, recompute=True, chunked_logits=True
    ),
    "passes of a sequence each": Case(ulysses=2, budget=1),
    "critic": Case(ulysses=2, critic=True),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(2, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "near"),
    [(12, 4, 5, 4), (7, 1, 2, 1), (12, 6, 4, 3), (28, 4, 8, 4)],
)
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, ranks: int, near: int) -> None:
    with pytest.raises(ConfigError, match=f"nearest valid value: critic.parallel.ulysses={near}") as error:
        check_ulysses(heads, kv_heads, ranks, "critic")
    assert error.value.key == "critic.parallel.ulysses"


def test_key_value_heads_that_are_too_few_are_repeated() -> None:
    check_ulysses(28, 2, 4)


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_those_of_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    assert_agrees(results[name])
