"""Where a process computes."""

from __future__ import annotations

import torch

__all__ = ["compute_device"]


def compute_device() -> torch.device:
    """The GPU that this process has, where there is one; `CUDA_VISIBLE_DEVICES=` hides them all. Among several ranks on
    a machine each has its own (`training/meeting.py`)."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
