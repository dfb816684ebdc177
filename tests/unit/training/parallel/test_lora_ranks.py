"""If these fail, adapters that are trained on several devices become others than on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lora_ranks import measure
from rank_processes import run_ranks
from safetensors.torch import load_file

from quintet.training.parallel.device_mesh import LearnerMesh


def test_two_ranks_train_the_same_adapters_as_one(policy_directory: Path, tmp_path: Path) -> None:
    """Also if weights stay gathered after a forward pass, with which the reference must not compute."""
    backends = ("fsdp2", "fsdp", "fsdp2 shard_grad_op", "fsdp shard_grad_op")
    outputs = run_ranks("lora_ranks.py", 2, tmp_path, policy_directory, tmp_path, *backends)
    single_process = measure(policy_directory, LearnerMesh(), "fsdp2", tmp_path / "single_process.safetensors")
    expected = load_file(tmp_path / "single_process.safetensors")
    for backend in backends:
        for output in outputs:
            for name, values in json.loads(output)[backend].items():
                assert values == pytest.approx(single_process[name], rel=1e-5, abs=2e-5), (backend, name)
        weights = load_file(tmp_path / f"{backend}.safetensors")
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    assert single_process["restored"] == single_process["reference"] != single_process["logprobs"]
