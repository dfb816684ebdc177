"""If these fail, adapters that are trained on several devices become others than on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_ranks import tell
from safetensors.torch import load_file

from quintet.training.parallel.device_mesh import LearnerMesh


def test_two_ranks_train_the_same_adapters_as_one(policy_directory: Path, tmp_path: Path) -> None:
    script = str(Path(__file__).parents[3] / "support" / "lora_ranks.py")
    told = [str(tmp_path / "meeting"), str(tmp_path), "fsdp2", "fsdp"]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(policy_directory), str(rank), "2", *told],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        heard = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, complaint) in zip(ranks, heard, strict=True):
        assert rank.returncode == 0, complaint[-3000:]
    alone = tell(policy_directory, LearnerMesh(), "fsdp2", tmp_path / "alone.safetensors")
    expected = load_file(tmp_path / "alone.safetensors")
    for backend in ("fsdp2", "fsdp"):
        for said, _ in heard:
            for name, values in json.loads(said)[backend].items():
                assert values == pytest.approx(alone[name], rel=1e-5, abs=2e-5), (backend, name)
        weights = load_file(tmp_path / f"{backend}.safetensors")
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    assert alone["again"] == alone["kept"] != alone["logprobs"]
