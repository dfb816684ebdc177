"""Whether as many processes run as the configuration spreads its learner over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quintet.config.native import Experiment
from quintet.config.plan.placement import place
from quintet.config.plan.steps import fine_tuning
from quintet.config.started import Started

__all__ = ["COUNTS", "Spread", "as_started", "command", "ready_keys", "spreads"]

COUNTS = ("placement.nodes", "placement.devices_per_node")
"""Keys that say how many devices there are."""
STAGE = "sft.devices"


@dataclass(frozen=True, slots=True)
class Spread:
    """So many devices, as these keys say."""

    keys: tuple[str, ...]
    devices: int


def spreads(config: Experiment) -> list[Spread]:
    """Of fine-tuning, and of reinforcement learning, as far as the run has them."""
    found = [] if config.sft is None else [Spread((STAGE,), config.sft.devices)]
    actor = None if fine_tuning(config) else place(config).of("actor")
    if actor is not None:
        found.append(Spread((*COUNTS, "placement.actor.devices"), max(1, len(actor.devices))))
    return found


def ready_keys(config: Experiment, here: Started) -> frozenset[str]:
    """Keys that need no cluster, since as many processes run as they ask for devices, each with all components."""
    if here.size == 1:
        return frozenset()
    found = {"placement.join_timeout_seconds"}
    placed = [component for component in place(config).components if component.devices]
    together = config.placement.colocated and len({component.devices for component in placed}) <= 1
    if together and all(spread.devices == here.size for spread in spreads(config)):
        found |= {*COUNTS, "placement.colocated", *(f"placement.{component.name}.devices" for component in placed)}
    return frozenset(found)


def as_started(config: Experiment, here: Started, asked: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """Keys that nobody `asked` for and what they have to be, so that the devices are the processes."""
    for spread in spreads(config):
        if spread.devices == here.size or asked(spread.keys[-1]):
            continue
        if spread.keys == (STAGE,):
            yield STAGE, here.size
        elif here.size > 1:
            counts = zip(COUNTS, (here.size // here.local_size, here.local_size), strict=True)
            yield from ((key, count) for key, count in counts if not asked(key))


def command(config: Experiment, devices: int) -> str:
    """How a run is started on so many devices."""
    nodes = 1 if fine_tuning(config) else config.placement.nodes
    machines = f"--nnodes {nodes} " if nodes > 1 and devices % nodes == 0 else ""
    each = devices // nodes if machines else devices
    return f"`torchrun {machines}--nproc-per-node {each} -m quintet {'sft' if fine_tuning(config) else 'train'} …`"
