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


def move_to_engine_device(model: PreTrainedModel, config: Experiment) -> PreTrainedModel:
    """Move the model to the compute device if the engine in this process generates with it."""
    if config.rollout.engine == "hf":
        model.to(compute_device())
    return model
