"""If these fail, combinations of parallelism on four ranks learn something else than one device."""

from __future__ import annotations

from typing import Any

import pytest
from model_parallel_ranks import Case, assert_agrees, run_cases

CASES = {
    "sharded × tensor": Case(data=2, tensor=2),
    "sharded × tensor by tokens": Case("qwen3", tied=False, data=2, tensor=2, sequence=True),
    "sharded × tensor by tokens, mixture": Case("qwen3_moe", data=2, tensor=2, sequence=True),
    "sharded × Ulysses": Case(data=2, ulysses=2),
    "sharded × Ulysses, fewer passes than ranks": Case(data=2, ulysses=2, budget=None),
    "sharded × context": Case(data=2, context=2),
    "Ulysses × tensor by tokens": Case("llama", kv_heads=4, ulysses=2, tensor=2, sequence=True),
    "context × Ulysses": Case(context=2, ulysses=2),
    "context × tensor by tokens, critic": Case(context=2, tensor=2, sequence=True, critic=True),
    "context of four, most passes shorter": Case(context=4, budget=5),
    "Ulysses of four over two key-value heads": Case(ulysses=4),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(4, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_those_of_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    assert_agrees(results[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.data > 1 and case.family != "qwen3_moe"])
def test_a_rank_keeps_a_quarter_of_the_weights(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["parameter_share"] < 0.26
