"""Fixtures of engine tests."""

from __future__ import annotations

import pytest

from quintet.policies import inference_decoder
from quintet.rollout.engines.hf import attention_state, sampling


@pytest.fixture(params=["compiled", "torch"])
def _with_and_without_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels, and as on a machine without a compiler."""
    if request.param == "torch":
        for module in (inference_decoder, attention_state, sampling):
            monkeypatch.setattr(module, "decode_kernels", lambda *_: None)
