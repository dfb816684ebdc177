"""If these fail, token losses aren't averaged as asked, or the average depends on how the batch was cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.algorithms.aggregation import Aggregation, token_weights
from quintet.config.native.algorithm import AlgorithmConfig

MASK = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
OWNER = torch.tensor([3, 3, 3, 3, 5, 5, 6, 6])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [0, 1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0]),
        ("token-sum", [0, 1, 1, 1, 0, 1, 0, 0]),
        ("seq-mean-token-sum", [0, 1 / 2, 1 / 2, 1 / 2, 0, 1 / 2, 0, 0]),
        ("seq-mean-token-mean", [0, 1 / 6, 1 / 6, 1 / 6, 0, 1 / 2, 0, 0]),
        ("seq-mean-token-sum-norm", [0, 1 / 20, 1 / 20, 1 / 20, 0, 1 / 20, 0, 0]),
    ],
)
def test_aggregation_by_hand(mode: str, expected: list[float]) -> None:
    torch.testing.assert_close(token_weights(mode, MASK, OWNER, 10.0), torch.tensor(expected, dtype=torch.float32))


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="token-max"):
        token_weights("token-max", MASK, OWNER)
    with pytest.raises(ValueError, match="scale"):
        token_weights("seq-mean-token-sum-norm", MASK, OWNER)


def test_the_default_scale_is_the_longest_episode() -> None:
    config = AlgorithmConfig(aggregation="seq-mean-token-sum-norm")
    assert Aggregation.from_config(config, 96).scale == 96.0
    assert Aggregation.from_config(config.model_copy(update={"aggregation_scale": 7.5}), 96).scale == 7.5


@pytest.mark.parametrize(
    ("ways", "mode", "expected"),
    [
        # two passes, of two tokens and of one; then by hand 1/2 of each pass, or 2/3 and 1/3
        ("equal", "token-mean", [1 / 4, 1 / 4, 1 / 2]),
        ("tokens", "token-mean", [1 / 3, 1 / 3, 1 / 3]),
        ("exact", "token-mean", [1 / 3, 1 / 3, 1 / 3]),
        ("equal", "seq-mean-token-sum", [1 / 4, 1 / 4, 1 / 2]),
        ("tokens", "seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("exact", "seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("exact", "seq-mean-token-mean", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_micro_batch_weights_match_the_other_frameworks(ways: str, mode: str, expected: list[float]) -> None:
    config = AlgorithmConfig.model_validate({"aggregation": mode, "micro_batch_weights": ways})
    aggregation = Aggregation.from_config(config, 100)
    mask, owner, part = torch.tensor([True, True, True, False]), torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(aggregation.weights(mask, owner, part), torch.tensor([*expected, 0.0]))


def test_weights_by_micro_batch_need_micro_batches() -> None:
    with pytest.raises(ValueError, match="micro-batches"):
        Aggregation(micro_batch_weights="equal").weights(MASK, OWNER)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30))
def test_means_of_a_constant_are_that_constant(cells: list[tuple[int, bool]]) -> None:
    cells = sorted(cells)
    mask, owner = torch.tensor([m for _, m in cells]), torch.tensor([o for o, _ in cells])
    for mode in ("token-mean", "seq-mean-token-mean"):
        total = float(token_weights(mode, mask, owner, dtype=torch.float64).sum())
        assert total == pytest.approx(1.0 if bool(mask.any()) else 0.0)
