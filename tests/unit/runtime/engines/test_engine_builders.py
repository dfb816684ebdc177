"""If these fail, a run generates with another engine than configured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.config.compose import load_experiment
from quintet.runtime.engines import engine_builders
from quintet.runtime.engines.engine_builders import engine_builder


def test_the_configured_engine_is_built(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = SimpleNamespace(get=lambda name: SimpleNamespace(load=lambda: lambda setup: (name, setup.directory)))
    monkeypatch.setattr(engine_builders, "ENGINES", engines)
    config = load_experiment(None, [f"policy.path={policy_directory}", "policy.preset=null", "rollout.engine=vllm"])
    built: Any = engine_builder(config.experiment, policy_directory)()
    assert built == ("vllm", policy_directory)
