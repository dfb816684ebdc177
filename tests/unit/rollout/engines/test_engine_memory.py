"""If these fail, an engine exceeds its memory share, or does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet import hardware
from quintet.errors import ConfigError
from quintet.policies.model_loading import load_model
from quintet.rollout.engines.hf import kv_cache


def test_memory_share_limits_concurrent_requests(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 2 layers × 2 (keys, values) × 2 heads × 8 numbers × 4 bytes × 64 tokens = 16 KiB a slot."""
    model = load_model(policy_directory)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total = 2 * (weights + 10 * 2 * 16384)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: total)
    assert kv_cache.max_seqs_in_memory(model, 64, 256, 0.5) == 10
    assert kv_cache.max_seqs_in_memory(model, 64, 4, 0.5) == 4
    assert kv_cache.max_seqs_in_memory(model, 64, 256, None) == 256
    with pytest.raises(ConfigError, match=r"memory_share = 0\.1: weights and one request of 64 tokens need"):
        kv_cache.max_seqs_in_memory(model, 64, 256, 0.1)
