"""If these fail, a run takes GPUs that its configuration leaves to others."""

from __future__ import annotations

import os

import pytest

from quintet.cli.ranks import hide_other_gpus
from quintet.config.compose import load_experiment


def test_a_run_sees_only_the_gpus_of_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    hide_other_gpus(load_experiment(None, ["placement.visible_devices=[3,1]"]).experiment)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
