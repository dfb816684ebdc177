"""What several tests of the engine share."""

from __future__ import annotations

import pytest

from quintet.policies import inference
from quintet.rollout import cache, sampling


@pytest.fixture(params=["compiled", "torch"])
def _arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels, and as on a machine that can't compile them."""
    if request.param == "torch":
        for module in (inference, cache, sampling):
            monkeypatch.setattr(module, "kernels", lambda *_: None)
