"""If these fail, rows are learned twice, or not at all, or a resumed run sees others than one that wasn't stopped."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quintet.data.row_order import RowOrder, RowSampler, sample_rows
from quintet.errors import ConfigError

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)
weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4)


@given(sizes, seeds, st.booleans(), st.integers(0, 5))
def test_every_row_comes_once_in_each_pass(parts: list[int], seed: int, shuffle: bool, passed: int) -> None:
    order, rows = RowOrder(parts, shuffle=shuffle, seed=seed), sum(parts)
    assert sorted(order[passed * rows + place] for place in range(rows)) == list(range(rows))


def test_each_epoch_has_another_order() -> None:
    order = RowOrder([50], shuffle=True, seed=3)
    passes = [[order[passed * 50 + place] for place in range(50)] for passed in range(3)]
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] != list(range(50))
    assert passes[0] == [RowOrder([50], shuffle=True, seed=3)[place] for place in range(50)]
    assert passes[0] != [RowOrder([50], shuffle=True, seed=4)[place] for place in range(50)]


def test_without_shuffling_rows_come_as_they_lie() -> None:
    sampler = RowSampler(RowOrder([3, 2], shuffle=False, seed=0))
    assert [sampler.take(2) for _ in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


@given(sizes, seeds, st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_a_resumed_sampler_continues_exactly(
    parts: list[int], seed: int, batches: list[int], data: st.DataObject
) -> None:
    batches = [min(batch, sum(parts)) for batch in batches]
    mixed = data.draw(st.sampled_from([(), tuple(range(1, len(parts) + 1))]))
    whole = RowSampler(RowOrder(parts, mixed, shuffle=True, seed=seed))
    expected = [whole.take(batch) for batch in batches]
    stop = data.draw(st.integers(0, len(batches)))
    first = RowSampler(RowOrder(parts, mixed, shuffle=True, seed=seed))
    taken = [first.take(batch) for batch in batches[:stop]]
    second = RowSampler(RowOrder(parts, mixed, shuffle=True, seed=seed))
    second.load(json.loads(json.dumps(first.state())))
    assert taken + [second.take(batch) for batch in batches[stop:]] == expected
    assert second.state() == whole.state()


@given(sizes, seeds, st.integers(1, 12))
def test_no_batch_holds_rows_of_two_passes(parts: list[int], seed: int, batch: int) -> None:
    rows = sum(parts)
    batch = min(batch, rows)
    sampler = RowSampler(RowOrder(parts, shuffle=True, seed=seed))
    for _ in range(3):
        seen = [row for _ in range(rows // batch) for row in sampler.take(batch)]
        assert len(set(seen)) == len(seen) == rows // batch * batch


@given(sizes, seeds)
def test_peeking_does_not_advance_the_sampler(parts: list[int], seed: int) -> None:
    sampler = RowSampler(RowOrder(parts, shuffle=True, seed=seed))
    for _ in range(5):
        ahead = sampler.peek(1)
        assert sampler.take(1) == ahead


@settings(max_examples=40)
@given(weights, seeds, st.booleans(), st.data())
@example([1.0, 34.0, 0.015625], 0, True, None)
def test_each_part_gets_its_share(shares: list[float], seed: int, shuffle: bool, data: st.DataObject | None) -> None:
    parts = [data.draw(st.integers(1, 9)) if data else 5 for _ in shares]
    order = RowOrder(parts, shares, shuffle=shuffle, seed=seed)
    starts = [sum(parts[:part]) for part in range(len(parts))]
    drawn = [order[position] for position in range(1000)]
    for part, share in enumerate(shares):
        rows = [row for row in drawn if starts[part] <= row < starts[part] + parts[part]]
        exact = min(shares) / sum(shares) * 1000 >= 1
        assert abs(len(rows) - 1000 * share / sum(shares)) <= (1 if exact else 0.5 * (len(shares) + 1)) + 1e-6
        counts = Counter(rows)
        # a part's rows come equally often, but for the pass that isn't through
        assert (
            not rows
            or max(counts.values()) - min(counts[row] for row in range(starts[part], starts[part] + parts[part])) <= 1
        )


def test_unshuffled_files_are_interleaved_evenly_by_weight() -> None:
    order = RowOrder([100, 100], [3, 1], shuffle=False, seed=0)
    drawn = [order[position] for position in range(8)]
    assert [row for row in drawn if row < 100] == [0, 1, 2, 3, 4, 5]
    assert [row for row in drawn if row >= 100] == [100, 101]
    assert sum(row >= 100 for row in drawn[:4]) == 1


def test_a_small_weight_still_gets_its_share() -> None:
    order = RowOrder([5, 5], [1, 99_999], shuffle=True, seed=0)
    assert sum(order[position] < 5 for position in range(100_000)) == 1
    with pytest.raises(ConfigError, match="less than a millionth"):
        RowOrder([5, 5], [1, 1e9], shuffle=True, seed=0)


@given(st.integers(1, 60), st.integers(1, 80), seeds)
def test_drawn_rows_are_drawn_once(rows: int, wanted: int, seed: int) -> None:
    drawn = sample_rows(rows, wanted, seed).tolist()
    assert len(set(drawn)) == len(drawn) == min(rows, wanted)
    assert drawn == sorted(drawn) == sample_rows(rows, wanted, seed).tolist()
    assert sample_rows(rows, None, seed).tolist() == list(range(rows))


def test_a_step_larger_than_a_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than the 4") as caught:
        RowSampler(RowOrder([3], shuffle=True, seed=0)).take(4)
    assert caught.value.key == "training.groups_per_step"
    assert len(RowSampler(RowOrder([3], [1.0], shuffle=True, seed=0)).take(4)) == 4


def test_weights_that_dont_fit_the_files_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 1 weights for 2 files"):
        RowOrder([1, 2], [1.0], shuffle=True, seed=0)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (RowSampler(RowOrder([4], shuffle=True, seed=1)), "data.train_files"),
        (RowSampler(RowOrder([3, 2], shuffle=True, seed=2)), "data.seed"),
        (RowSampler(RowOrder([3, 2], shuffle=False, seed=1)), "data.shuffle"),
        (RowSampler(RowOrder([3, 2], [1.0, 2.0], shuffle=True, seed=1)), "data.weights"),
    ],
)
def test_resuming_with_other_files_is_an_error(other: RowSampler, key: str) -> None:
    with pytest.raises(ConfigError, match="the checkpoint was made with") as caught:
        RowSampler(RowOrder([3, 2], shuffle=True, seed=1)).load(other.state())
    assert caught.value.key == key


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(4, 12)), min_size=1, max_size=4), seeds, st.booleans())
def test_each_batch_has_the_quota_of_each_part(parts: list[tuple[int, int]], seed: int, shuffle: bool) -> None:
    quotas, rows = [quota for quota, _ in parts], [size for _, size in parts]
    owner = [index for index, size in enumerate(rows) for _ in range(size)]
    numbers = np.arange(sum(rows))[::-1].copy()
    sampler = RowSampler(RowOrder(rows, shuffle=shuffle, seed=seed, quotas=quotas), numbers)
    taken = []
    for _ in range(5):
        ahead, batch = sampler.peek(sum(quotas)), sampler.take(sum(quotas))
        assert ahead == batch
        assert [Counter(owner[sum(rows) - 1 - row] for row in batch)[index] for index in range(len(rows))] == quotas
        taken += batch
    for index, (quota, size) in enumerate(parts):
        drawn = [row for row in taken if owner[sum(rows) - 1 - row] == index]
        assert len(set(drawn[:size])) == min(size, 5 * quota)


def test_a_sampler_with_other_quotas_is_not_resumed() -> None:
    state = RowSampler(RowOrder([4, 4], shuffle=True, seed=0, quotas=(1, 2))).state()
    with pytest.raises(ConfigError, match=r"data\.domains: the checkpoint was made with domains"):
        RowSampler(RowOrder([4, 4], shuffle=True, seed=0, quotas=(2, 1))).load(state)
