"""Settings of the process that speed and numbers depend on."""

from __future__ import annotations

import logging
import warnings

import torch

from quintet.config.native.experiment import Experiment
from quintet.runtime.memory import keep_freed_memory
from quintet.runtime.openmp_waiting import follow_load
from quintet.seeds import derive_seed


def configure_process(config: Experiment) -> None:
    """Set the number of torch's threads to `training.threads`, have them wait for each other as the load demands, let
    the allocator keep freed memory, and silence spurious torch warnings."""
    keep_freed_memory()
    _silence_fsdp_warnings()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    follow_load()


def seed_torch(config: Experiment) -> None:
    """Seed torch's global generator from the experiment's seed."""
    torch.manual_seed(derive_seed(config.seed, "torch"))


def _silence_fsdp_warnings() -> None:
    # no output of a forward pass is modified in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # with tensor parallelism norms and weights are redistributed in two steps; the order is equal on all ranks
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
