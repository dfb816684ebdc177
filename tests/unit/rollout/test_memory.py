"""If these fail, an engine takes more memory than it may, or doesn't start at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.errors import ConfigError
from quintet.policies.causal_lm import load_model
from quintet.rollout import memory


def test_a_share_of_memory_bounds_the_requests(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 2 layers × 2 (keys, values) × 2 heads × 8 numbers × 4 bytes × 64 tokens = 16 KiB a slot."""
    model = load_model(policy_directory)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total = 2 * (weights + 10 * 2 * 16384)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": total}.__getitem__)
    assert memory.slots_within(model, 64, 256, 0.5) == 10
    assert memory.slots_within(model, 64, 4, 0.5) == 4
    assert memory.slots_within(model, 64, 256, None) == 256
    with pytest.raises(ConfigError, match=r"memory_share = 0\.1: weights and one request of 64 tokens need"):
        memory.slots_within(model, 64, 256, 0.1)
