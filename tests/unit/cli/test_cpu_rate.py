"""If these fail, a plan shows the time of a step on a machine that the run is not for, or one that no machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from example_models import on

from quintet import hardware
from quintet.cli.cpu_rate import measure_cpu
from quintet.config.compose import load_experiment
from quintet.config.plan.model_shapes import PRESET_SHAPES
from quintet.config.plan.run_plan import plan_run


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)


def test_the_rate_of_this_machine_is_that_of_a_cpu() -> None:
    """Between a tenth of a GFLOP/s and what no CPU reaches, and memory as fast as memory is."""
    figures = measure_cpu(PRESET_SHAPES["grid-3m"])
    assert 1e8 < figures.float32_flops < 1e14
    assert 1e7 < figures.memory_bandwidth < 1e13


def test_only_runs_on_this_cpu_have_a_time(tmp_path: Path) -> None:
    here, evaluated = load_experiment(None), load_experiment(None, ["validation.only=true"])
    elsewhere = on(tmp_path, "Qwen2.5-7B", 1, 8)
    assert plan_run(here).timed_shape == PRESET_SHAPES["grid-1m"]
    assert [plan_run(composed).timed_shape for composed in (evaluated, elsewhere)] == [None, None]


def test_twice_the_rate_is_half_the_time() -> None:
    words = ("sft.batch=16", "sft.max_tokens=96", "data.train_files=[x.jsonl]")
    plan = plan_run(load_experiment(None, words))
    figures = measure_cpu(PRESET_SHAPES["grid-1m"])
    faster = replace(figures, float32_flops=2 * figures.float32_flops)
    assert plan.step_seconds(faster) == pytest.approx(plan.step_seconds(figures) / 2)
