"""If these fail, a policy whose sequences are cut over devices learns something else than one on a single device, or
one of the devices does most of the work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_parallel_ranks import Case, assert_agrees, run_cases

from quintet.policies.attention import PackedStructure
from quintet.policies.parallel.context_parallel import context_parallel_indices

CASES = {
    "qwen2": Case("qwen2", context=2),
    "one pass, recomputed, logits in pieces": Case(
        "llama", context=2, budget=None, recompute=True, chunked_logits=True
    ),
    "passes of a sequence each": Case("qwen3", context=2, budget=1),
    "critic": Case(context=2, critic=True),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(2, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_those_of_one_process(results: dict[str, dict[str, Any]], name: str) -> None:
    assert_agrees(results[name])


def test_a_long_sequence_is_cut_in_zig_zag() -> None:
    """Eight tokens over two ranks: the first and the last quarter, and the two between them."""
    alone = PackedStructure(torch.tensor([8]))
    assert context_parallel_indices(alone, 0, 2).tolist() == [0, 1, 6, 7]
    assert context_parallel_indices(alone, 1, 2).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_token_is_on_one_rank_and_none_has_most_of_them(ranks: int) -> None:
    structure = PackedStructure(
        torch.randint(1, 60, (40,), generator=torch.Generator().manual_seed(1)),
        11,
        torch.tensor([3, 1, 17, 8]),
        torch.arange(40) // 10,
    )
    places = [context_parallel_indices(structure, rank, ranks) for rank in range(ranks)]
    size = 11 + 29 + int(structure.branches.sum())
    assert torch.cat(places).sort().values.tolist() == list(range(size))
    assert max(len(indices) for indices in places) < 1.05 * size / ranks
