"""This machine, as far as a plan compares a run with it."""

from dataclasses import dataclass

from quintet import hardware
from quintet.config.native.experiment import Experiment
from quintet.config.plan.devices import device_of_machine
from quintet.config.torchrun import current_rank


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory that this machine has for each process of a run, and their number."""

    device_bytes: int
    """Memory of a GPU, or the share of a process in host memory."""
    processes: int
    """Processes that share host memory."""
    on_cpu: bool
    """Whether the run computes on the CPU."""


def machine_of(config: Experiment) -> Machine | None:
    """Return this machine; None if the run has other devices than this machine, or than torchrun has started processes
    on it."""
    placed, rank = config.placement, current_rank()
    devices = config.sft_devices if config.sft_only else placed.nodes * placed.devices_per_node
    if hardware.sees_gpu():
        present = device_of_machine()
        fits = placed.nodes == 1 and devices <= hardware.num_gpus()
        return Machine(present[1], devices, on_cpu=False) if present is not None and fits else None
    if devices != rank.size or not rank.is_single_node:
        return None
    return Machine(hardware.memory_bytes() // devices, devices, on_cpu=True)
