"""If this fails, a run computes with another number of threads than configured."""

from __future__ import annotations

import pytest
import torch

from quintet.config.native.experiment import Experiment
from quintet.runtime.process_settings import configure_process


def test_torch_has_the_configured_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    configure_process(Experiment.model_validate({"training": {"threads": 3}}))
    assert threads == [3]
