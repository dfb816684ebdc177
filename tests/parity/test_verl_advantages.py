"""If these fail, our advantages aren't verl's: what its own functions gave in float64 (release 0.9.1).

The arrays are made by `scripts/make_golden.py`, whose docstring says what they are called.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from quintet.algorithms.tokens import whiten
from quintet.config.native.advantages import ADVANTAGES, AdvantageConfig
from quintet.records import Batch

GOLDEN = Path(__file__).parent / "golden"
ARRAYS = np.load(GOLDEN / "verl_float64.npz")
SETTINGS = json.loads(str(ARRAYS["settings"]))
SETS = ("single", "turns")
PROMPTS = (3, 0, 5, 1)
"""What the env said first, tokens, in turn: rows don't begin where padded ones do."""
CONFIG: TypeAdapter[Any] = TypeAdapter(AdvantageConfig)


def stored_input(kind: str, name: str) -> torch.Tensor:
    return torch.from_numpy(ARRAYS[f"in|{kind}|{name}"])


class PackedBatch:
    """verl's padded rows as trajectories with a prompt before each; `cut` begins a new sequence, with a prompt of its
    own, at the first hole of every second row."""

    def __init__(self, kind: str, *, cut: bool = False) -> None:
        self.mask = stored_input(kind, "mask").bool()
        self.kind = kind
        places: list[int] = []
        self.lengths: list[int] = []
        self.owner: list[int] = []
        width = self.mask.shape[1]
        for row, mask in enumerate(self.mask):
            columns = [row * width + column for column in range(int(mask.nonzero().max()) + 1)]
            hole = int((~mask).nonzero()[0]) if cut and row % 2 and not mask[: len(columns)].all() else len(columns)
            for part in (columns[:hole], columns[hole:]):
                if part:
                    prompt = PROMPTS[len(self.lengths) % len(PROMPTS)]
                    places += [-1] * prompt + part
                    self.lengths.append(prompt + len(part))
                    self.owner.append(row)
        self.places = torch.tensor(places)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        actual = rows.flatten()[self.places.clamp(min=0)]
        return torch.where(self.places >= 0, actual, torch.zeros_like(actual))

    def own(self, packed: torch.Tensor) -> torch.Tensor:
        """Back to rows, the policy's own tokens alone."""
        rows = packed.new_zeros(self.mask.numel())
        rows[self.places[self.places >= 0]] = packed[self.places >= 0]
        return rows.view_as(self.mask)[self.mask]

    def batch(self, name: str) -> Batch:
        size = len(self.places)
        return Batch(
            tokens=torch.zeros(size, dtype=torch.long),
            positions=torch.cat([torch.arange(length) for length in self.lengths]),
            lengths=torch.tensor(self.lengths),
            loss_mask=self.pack(self.mask),
            turn=torch.zeros(size, dtype=torch.long),
            turn_end=torch.zeros(size, dtype=torch.bool),
            trajectory=torch.tensor(self.owner),
            group=stored_input(self.kind, "pairs" if name == "grpo_passk" else "group"),
            logprobs=self.pack(stored_input(self.kind, "old_log_probs")),
            rewards=self.pack(stored_input(self.kind, "rewards")),
            sum_squared_probs=self.pack(stored_input(self.kind, "squared_mass")),
            baseline=stored_input(self.kind, "baseline"),
            reward_components={part: stored_input(self.kind, part) for part in ("part_right", "part_form")},
            values=self.pack(stored_input(self.kind, "values")),
        )


def variants() -> list[tuple[str, str]]:
    results = [key.split("|") for key in SETTINGS if key.startswith("adv|")]
    return [(name, variant) for _, name, variant in results if variant != "weights"]


def ours(name: str, options: dict[str, Any]) -> Any:
    """verl's options in the native schema."""
    native: dict[str, Any] = {"name": name.removesuffix("_vectorized")}
    native |= {key: options[key] for key in ("gamma", "lam") if key in options}
    if "norm_adv_by_std_in_grpo" in options:
        native["normalize_by_std"] = options["norm_adv_by_std_in_grpo"]
    if "handle_zero_tail" in options:
        native["zero_tail"] = options["handle_zero_tail"]
    if name == "gdpo":
        native["weights"] = SETTINGS["adv|gdpo|weights"]
    return CONFIG.validate_python(native)


def same(actual: torch.Tensor, kind: str, key: str, packed: PackedBatch) -> None:
    result = torch.from_numpy(ARRAYS[f"out|{kind}|{key}"]).double()[packed.mask]
    torch.testing.assert_close(packed.own(actual), result, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize(("name", "variant"), variants())
def test_advantages_and_returns(kind: str, name: str, variant: str) -> None:
    options = SETTINGS[f"adv|{name}|{variant}"]
    packed = PackedBatch(kind)
    batch = packed.batch(name)
    if options.get("weighted"):
        batch = dataclasses.replace(batch, correction=packed.pack(stored_input(kind, "weights")))
    config = ours(name, options)
    advantages, returns = ADVANTAGES.get(config.name).load()(batch, config)
    assert advantages.dtype == returns.dtype == torch.float64
    assert not advantages[~batch.loss_mask].any()
    if name == "rloo_vectorized":
        return
    same(advantages, kind, f"adv|{name}|{variant}|advantages", packed)
    same(returns, kind, f"adv|{name}|{variant}|returns", packed)


@pytest.mark.parametrize("kind", SETS)
def test_verls_two_forms_of_rloo_differ_in_groups_of_one_alone(kind: str) -> None:
    """Ours is `rloo`: an episode without company keeps its reward; `rloo_vectorized` takes it away."""
    packed = PackedBatch(kind)
    config = CONFIG.validate_python({"name": "rloo"})
    advantages, _ = ADVANTAGES.get("rloo").load()(packed.batch("rloo"), config)
    result = torch.from_numpy(ARRAYS[f"out|{kind}|adv|rloo_vectorized|default|advantages"])
    _, member, count = torch.unique(stored_input(kind, "group"), return_inverse=True, return_counts=True)
    alone = (count[member] == 1)[:, None].expand_as(packed.mask)[packed.mask]
    actual = packed.own(advantages)
    torch.testing.assert_close(actual[~alone], result[packed.mask][~alone], atol=1e-6, rtol=1e-6)
    assert not result[packed.mask][alone].any()
    assert actual[alone].any()


@pytest.mark.parametrize(("name", "variant"), [v for v in variants() if v[0] != "optimal_token_baseline"])
def test_a_window_that_slides_changes_nothing(name: str, variant: str) -> None:
    """An episode in several sequences has the advantages of the same episode in one. (`optimal_token_baseline` counts
    places in what the env said, too, of which there is then more.)"""
    options = SETTINGS[f"adv|{name}|{variant}"]
    config = ours(name, options)
    whole, cut = PackedBatch("turns"), PackedBatch("turns", cut=True)
    assert len(cut.lengths) > len(whole.lengths)
    estimate = ADVANTAGES.get(config.name).load()
    for one, other in zip(estimate(whole.batch(name), config), estimate(cut.batch(name), config), strict=True):
        torch.testing.assert_close(cut.own(other), whole.own(one))


@pytest.mark.parametrize("kind", SETS)
def test_whitening(kind: str) -> None:
    packed = PackedBatch(kind)
    actual = whiten(packed.pack(stored_input(kind, "advantages")), packed.pack(packed.mask))
    same(actual, kind, "whiten", packed)


def test_every_estimator_of_verl_is_compared() -> None:
    compared = {name for name, _ in variants()}
    assert len(compared) == 14
    assert {key.split("|")[3] for key in ARRAYS.files if "|adv|" in key} == compared
