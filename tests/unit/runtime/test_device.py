"""If these fail, a run on a GPU stops because some of its tensors are on the CPU, or logs another use of its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.runtime.device import gpu_memory_metrics
from quintet.tracking.metrics import describe

SUPPORT = Path(__file__).parents[2] / "support"


def steps(case: str, policy: Path, device: str, result: Path) -> dict[str, Any]:
    environment = os.environ | {"QUINTET_KERNELS": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "gpu_steps.py"), case, str(policy), device, str(result)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    numbers: dict[str, Any] = json.loads(result.read_text())
    return numbers


@pytest.mark.parametrize("case", ["engine", "learners", "robots"])
def test_a_gpu_computes_what_the_cpu_computes(policy_directory: Path, tmp_path: Path, case: str) -> None:
    on_cpu, on_gpu = (steps(case, policy_directory, device, tmp_path / device) for device in ("cpu", "gpu"))
    assert on_gpu.get("tokens") == on_cpu.get("tokens")
    for expected, numbers in zip(on_cpu["numbers"], on_gpu["numbers"], strict=True):
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gpu_memory_is_logged_in_verls_units_and_as_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_memory_metrics() == {}
    of_gpu = {
        "is_available": True,
        "current_device": 0,
        "max_memory_allocated": 60 << 30,
        "max_memory_reserved": 70 << 30,
        "memory_stats": {"num_alloc_retries": 3},
        "get_device_properties": SimpleNamespace(total_memory=80 << 30),
    }
    for name, value in of_gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    metrics = gpu_memory_metrics()
    assert [*metrics.values()] == [60, 70, 0.75, 3]
    assert [describe(name).unit for name in metrics] == ["GiB", "GiB", "share", "allocations"]
