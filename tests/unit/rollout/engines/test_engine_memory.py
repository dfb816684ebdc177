"""If these fail, an engine exceeds its memory share, or does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet import hardware
from quintet.errors import ConfigError
from quintet.policies.model_loading import load_model
from quintet.rollout.engines.hf import cache_memory


def test_memory_share_limits_the_blocks(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 2 layers × 2 (keys, values) × 2 heads × 8 numbers × 4 bytes × 16 tokens = 4 KiB a block; a request of
    64 tokens has 4 blocks, and a copy of a shared one."""
    model = load_model(policy_directory)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total = 2 * (weights + 12 * 4096)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: total)
    assert cache_memory.max_cache_blocks(model, 64, 256, 0.5) == 12
    assert cache_memory.max_cache_blocks(model, 64, 2, 0.5) == 10
    assert cache_memory.max_cache_blocks(model, 64, 256, None) == min(256 * 5, int(0.3 * total) // 4096)
    with pytest.raises(ConfigError, match=r"memory_share = 0\.1: weights and one request of 64 tokens need"):
        cache_memory.max_cache_blocks(model, 64, 256, 0.1)
