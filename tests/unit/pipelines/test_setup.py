"""If these fail, a run begins with other calls of its components than configured."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from quintet.config.compose import load_experiment
from quintet.pipelines import setup
from quintet.runtime.signals import StopRequest


@pytest.mark.parametrize(
    ("words", "validated"),
    [
        ([], [0]),
        (["validation.before_training=false"], []),
        (["validation.before_training=false", "validation.only=true"], [0]),
    ],
    ids=["default", "not before training", "only"],
)
def test_a_run_validates_before_its_first_step_if_that_is_configured(
    monkeypatch: pytest.MonkeyPatch, words: list[str], validated: list[int]
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(setup, "_build", lambda *_: MagicMock(prompts=None))
    monkeypatch.setattr(setup, "validate", lambda run, components, step: steps.append(step))
    config = load_experiment(None, ["policy.path=model", "policy.preset=null", "warm_start=null", *words]).experiment
    run: Any = SimpleNamespace(config=config, checkpoint=None, log=MagicMock(), save=MagicMock())
    prompts: Any = [Path("prompts")]
    with ExitStack() as resources:
        setup.set_up(run, prompts, StopRequest(), resources)
    assert steps == validated
