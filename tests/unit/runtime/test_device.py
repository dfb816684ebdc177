"""If these fail, a run on a GPU stops because some of its tensors are on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
