"""If these fail, a run trains up to the step that it profiles, and ends there in an assertion of PyTorch."""

from __future__ import annotations

import pytest

from quintet import hardware
from quintet.config.checks.profiles import profile_problems
from quintet.config.compose import load_experiment
from quintet.errors import ConfigError

PROFILE = ["tracking.profile.steps=[2]"]


def problems(*activities: str) -> list[str]:
    words = [*PROFILE, f"tracking.profile.torch.activities=[{', '.join(activities)}]"]
    return list(map(str, profile_problems(load_experiment(None, words))))


def test_a_profile_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        problems()
    assert "tracking.profile.torch" in str(error.value)
    assert "nothing is recorded with an empty list" in str(error.value)
    assert "\n  tracking.profile.torch.activities=[cpu]" in str(error.value)


def test_a_profile_of_kernels_alone_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "sees_gpu", lambda: False)
    (problem,) = problems("cuda")
    assert "kernels need a CUDA GPU, and this machine has none" in problem
    assert problem.endswith("tracking.profile.torch.activities=[cpu]")
    assert problems("cpu") == problems("cpu", "cuda") == []
    monkeypatch.setattr(hardware, "sees_gpu", lambda: True)
    assert problems("cuda") == []
