"""If these fail, a run that exceeds this machine starts without a word, or runs for other machines are compared with
it."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_models import on

from quintet import hardware
from quintet.config.compose import load_experiment
from quintet.config.plan import machine as machine_module
from quintet.config.plan.advice import result_warnings
from quintet.config.plan.format_sizes import GIB
from quintet.config.plan.machine import Machine, machine_of
from quintet.config.plan.run_plan import plan_run
from quintet.config.torchrun import VARIABLES


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 8 * GIB)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_devices_are_here_if_their_processes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single, pair = (on(tmp_path, "Qwen2.5-0.5B", 1, devices).experiment for devices in (1, 2))
    assert machine_of(single) == Machine(8 * GIB, 1, on_cpu=True)
    assert machine_of(pair) is None
    values = ("0", "2", "localhost", "1")
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    assert machine_of(pair) == Machine(4 * GIB, 2, on_cpu=True)


def test_a_gpu_of_this_machine_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 1)
    monkeypatch.setattr(machine_module, "device_of_machine", lambda: (None, 24 * GIB))
    single, pair = (on(tmp_path, "Qwen2.5-7B", 1, devices) for devices in (1, 2))
    assert machine_of(single.experiment) == Machine(24 * GIB, 1, on_cpu=False)
    assert machine_of(pair.experiment) is None
    (warning,) = [line for line in plan_run(single).warnings if "on this machine" in line]
    assert warning.startswith("on this machine, whose GPU has 24.0 GiB of memory, the run needs ")


def test_a_run_beyond_this_machine_is_told_with_what_helps_in_plan_and_at_start(tmp_path: Path) -> None:
    """16,384 tokens of 24 layers in float32 on 8 GiB of memory."""
    words = ("rollout.max_prompt_tokens=4000", "training.samples_per_group=4", "policy.dtype=float32")
    plan = plan_run(on(tmp_path, "Qwen2.5-0.5B", 1, 1, *words, "rollout.max_concurrent=4"))
    for warnings in (plan.warnings, result_warnings(plan)):
        (warning,) = [line for line in warnings if line.startswith("on this machine")]
        assert warning.startswith("on this machine, which has 8.0 GiB of memory, the run needs ")
        assert " while the actor learns: activations of actor " in warning
        assert "what helps most: " in warning
        assert "training.micro_batch_tokens=" in warning or "actor.gradient_checkpointing=true" in warning


def test_fine_tuning_beyond_this_machine_names_its_own_keys(tmp_path: Path) -> None:
    words = ("data.train_files=[x.jsonl]", "sft.batch=64", "sft.max_tokens=512", "sft.sequences_per_pass=64")
    plan = plan_run(on(tmp_path, "Qwen2.5-0.5B", 1, 1, *words, "policy.dtype=float32"))
    (warning,) = [line for line in plan.warnings if line.startswith("on this machine")]
    assert "sft.gradient_checkpointing=true" in warning or "sft.sequences_per_pass=" in warning


def test_a_run_that_fits_or_is_for_another_machine_is_not_warned_of(tmp_path: Path) -> None:
    for composed in (load_experiment(None), on(tmp_path, "Qwen2.5-7B", 1, 8)):
        assert not any("on this machine" in line for line in plan_run(composed).warnings)
