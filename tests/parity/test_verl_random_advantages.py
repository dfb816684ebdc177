"""If these fail, advantages are not verl's on some input that nobody thought of: ties, rejected tokens, empty rows.

`scripts/make_random_golden.py` made the numbers with verl 0.9.1, one per random batch, estimator and result.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from tests.support.random_rows import NUM_BATCHES, projected, random_rows
from torch import Tensor

from quintet.algorithms.advantages.custom import estimate
from quintet.config.native.advantages import AdvantageConfig
from quintet.records import Batch

GOLDEN = np.load(Path(__file__).parent / "golden" / "verl_random.npz")
SETTINGS = json.loads(str(np.load(Path(__file__).parent / "golden" / "verl_float64.npz")["settings"]))
VARIANTS = [name for name in GOLDEN.files if name != "rewards" and "vectorized" not in name]
CONFIG: TypeAdapter[Any] = TypeAdapter(AdvantageConfig)
NATIVE = {"norm_adv_by_std_in_grpo": "normalize_by_std", "handle_zero_tail": "zero_tail"}


def config(variant: str) -> Any:
    name, _ = variant.split("|")
    options = {NATIVE.get(key, key): value for key, value in SETTINGS[f"adv|{variant}"].items() if key != "weighted"}
    weights = {"weights": SETTINGS["adv|gdpo|weights"]} if name == "gdpo" else {}
    return CONFIG.validate_python({"name": name, **options, **weights})


class PackedRows:
    """A padded batch, each row behind a prompt token and up to its last response token."""

    def __init__(self, seed: int) -> None:
        self.rows = random_rows(seed)
        responses = self.rows["responses"]
        self.widths = [int(row.nonzero().max()) + 1 for row in responses]
        ends = torch.zeros_like(responses)
        ends[torch.arange(len(ends)), torch.tensor(self.widths) - 1] = 1.0
        mask = self.pack(self.rows["mask"]).bool()
        lengths = torch.tensor(self.widths) + 1
        size = int(lengths.sum())
        self.batch = Batch(
            tokens=torch.zeros(size, dtype=torch.long),
            positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
            lengths=lengths,
            loss_mask=mask,
            turn=torch.zeros(size, dtype=torch.long),
            turn_end=self.pack(ends).bool(),
            trajectory=torch.arange(len(lengths)),
            group=self.rows["group"],
            logprobs=self.pack(self.rows["old_log_probs"]),
            rewards=self.pack(self.rows["rewards"]),
            sum_squared_probs=self.pack(self.rows["squared_mass"]),
            trained_mask=mask | ~self.pack(responses).bool(),
            values=self.pack(self.rows["values"]),
            baseline=self.rows["baseline"],
            reward_components={part: self.rows[part] for part in ("part_right", "part_form")},
        )

    def pack(self, rows: Tensor) -> Tensor:
        return torch.cat(
            [torch.cat([row.new_zeros(1), row[:width]]) for row, width in zip(rows, self.widths, strict=True)]
        )

    def unpack(self, packed: Tensor) -> Tensor:
        rows = torch.zeros_like(self.rows["mask"])
        for row, part in zip(rows, packed.split((torch.tensor(self.widths) + 1).tolist()), strict=True):
            row[: len(part) - 1] = part[1:]
        return rows


BATCHES = [PackedRows(seed) for seed in range(NUM_BATCHES)]


def test_the_rows_are_those_that_verl_was_given() -> None:
    drawn = [projected(packed.rows["rewards"], packed.rows["responses"]) for packed in BATCHES]
    np.testing.assert_allclose(drawn, GOLDEN["rewards"], atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_batches_have_verls_advantages_and_returns(variant: str) -> None:
    settings = config(variant)
    actual = []
    for packed in BATCHES:
        batch = packed.batch
        if SETTINGS[f"adv|{variant}"].get("weighted"):
            batch = replace(batch, correction=packed.pack(packed.rows["weights"]))
        results = estimate(batch, settings)
        actual.append([projected(packed.unpack(values), packed.rows["mask"]) for values in results])
    np.testing.assert_allclose(actual, GOLDEN[variant], atol=1e-6, rtol=1e-6)
