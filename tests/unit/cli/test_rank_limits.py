"""If these fail, processes of a run wait longer, or shorter, for others than configured, or see other GPUs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from quintet.cli import ranks
from quintet.config.compose import load_experiment
from quintet.config.torchrun import RankInfo

RANK = RankInfo(rank=0, size=1, local_rank=0, local_size=1)
LIMITS = "placement={lost_after_seconds: 3, call_timeout_seconds: 7, join_timeout_seconds: 5}"


class CallError(Exception):
    """Holds the arguments of a call."""


def stop(*arguments: Any, **options: Any) -> None:
    raise CallError(*arguments)


def test_a_run_sees_only_the_gpus_of_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    ranks.hide_other_gpus(load_experiment(None, ["placement.visible_devices=[3,1]"]).experiment)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_a_controller_waits_as_long_for_workers_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.runtime.calls.listener.WorkerListener", stop)
    config: Any = load_experiment(None, [LIMITS]).experiment
    with pytest.raises(CallError) as error:
        ranks._run_as_controller(RANK, config, *[None] * 4)  # type: ignore[arg-type]
    assert error.value.args[3:5] == (3.0, 7.0)


def test_ranks_wait_as_long_for_each_other_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.training.parallel.rendezvous.rendezvous", stop)
    config: Any = load_experiment(None, [LIMITS]).experiment
    with pytest.raises(CallError) as error, ranks._watched_group(RANK, config, [0], None, ""):  # type: ignore[arg-type]
        pass
    assert error.value.args[2:4] == (5, 7.0)
