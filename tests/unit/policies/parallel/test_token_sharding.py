"""If these fail, ways to split that are right alone are wrong together, on four ranks."""

from __future__ import annotations

from typing import Any

import pytest
from model_parallel_ranks import Case, gaps, same

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
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return gaps(4, CASES, tmp_path_factory.mktemp("ranks") / "meeting")


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_those_of_one_process(told: dict[str, dict[str, Any]], name: str) -> None:
    same(told[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.data > 1 and case.family != "qwen3_moe"])
def test_a_rank_keeps_a_quarter_of_the_weights(told: dict[str, dict[str, Any]], name: str) -> None:
    assert told[name]["kept"] < 0.26
