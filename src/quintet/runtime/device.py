"""Compute device of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quintet.config.native.experiment import Experiment


def compute_device() -> torch.device:
    """Return this process's GPU if there is one (`CUDA_VISIBLE_DEVICES=` hides all), or else the CPU. Each rank of a
    machine has its own GPU; see `training/parallel/rendezvous.py`."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def gpu_memory_metrics() -> dict[str, float]:
    """Return the most GPU memory that this process has had so far, in GiB as in verl and as a share of the GPU's, and
    how often PyTorch gave its cache back because an allocation failed; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {
        "perf/max_memory_allocated_gb": allocated / (1 << 30),
        "perf/max_memory_reserved_gb": reserved / (1 << 30),
        "perf/gpu_memory_share": allocated / total,
        "perf/gpu_alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def move_to_engine_device(model: PreTrainedModel, config: Experiment) -> PreTrainedModel:
    """Move the model to the compute device if the engine in this process generates with it."""
    if config.rollout.engine == "hf":
        model.to(compute_device())
    return model
