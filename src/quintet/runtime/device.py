"""Where a process computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quintet.config.native import Experiment

__all__ = ["beside_engine", "compute_device"]


def compute_device() -> torch.device:
    """The GPU that this process has, where there is one; `CUDA_VISIBLE_DEVICES=` hides them all. Among several ranks on
    a machine each has its own (`training/meeting.py`)."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def beside_engine(model: PreTrainedModel, config: Experiment) -> PreTrainedModel:
    """The model where the run's engine wants it: the embedded one generates with it, others load their own."""
    if config.rollout.engine == "hf":
        model.to(compute_device())
    return model
