"""Whether as many processes run as the configuration spreads its learner over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quintet.config.native import Experiment
from quintet.config.plan.placement import place
from quintet.config.plan.steps import fine_tuning
from quintet.config.started import Started, started

__all__ = ["COUNTS", "Spread", "as_asked", "as_started", "command", "ready_keys", "spreads", "start"]

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


def as_asked(config: Experiment) -> Started:
    """As it would be started on the devices that it asks for, which is how a plan looks at it; as this process was
    where torchrun started it, or where no number of processes is that of all stages."""
    here, counts = started(), {spread.devices for spread in spreads(config)}
    if here.size > 1 or len(counts) != 1:
        return here
    devices = counts.pop()
    nodes = 1 if fine_tuning(config) else config.placement.nodes
    return Started(0, devices, 0, devices if devices % nodes else devices // nodes)


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


def start(config: Experiment) -> str | None:
    """How torchrun starts a run that needs several processes and nothing else; None for one that doesn't."""
    asked = as_asked(config)
    placed = fine_tuning(config) is not None or ready_keys(config, asked).issuperset(COUNTS)
    return command(config, asked.size).strip("`") if asked.size > 1 and placed else None
