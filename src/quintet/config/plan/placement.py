"""Which component runs on which devices, and what of that can't work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.faults import Fault, raise_faults
from quintet.config.plan.models import Models, find_models
from quintet.config.plan.splits import Split, engine_split, learner_split, nearest_size, problems
from quintet.config.plan.steps import fine_tuning
from quintet.config.plan.values import divisors, fault, nearest_number, told

if TYPE_CHECKING:
    from quintet.config.compose import Composed
    from quintet.config.native import Experiment
    from quintet.config.plan.shapes import Shape

__all__ = [
    "Component",
    "Placement",
    "nearest_batches",
    "place",
    "placement_faults",
    "ranges",
    "refuse_misplaced",
    "split_faults",
]

LEARNERS = ("actor", "reference", "critic")
STARTED = "several devices are started by torchrun, see docs/ranks.md"
MOST = 1 << 16
"""Devices of the largest cluster that is believed."""


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the run that holds devices."""

    name: str
    """As its section of `placement` is called."""
    devices: tuple[int, ...]
    """Ascending, counted over all nodes; none is the CPU."""
    split: Split

    @property
    def copies(self) -> int:
        """Data-parallel ranks of a learner, engines of the rollout."""
        return max(1, len(self.devices) // self.split.devices_per_copy)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything runs."""

    nodes: int
    devices_per_node: int
    colocated: bool
    """Components on the same devices take turns."""
    components: tuple[Component, ...]

    @property
    def devices(self) -> range:
        return range(min(self.nodes * self.devices_per_node, MOST))

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices that nobody uses."""
        used = {device for component in self.components for device in component.devices}
        return tuple(device for device in self.devices if device not in used)

    def of(self, name: str) -> Component | None:
        """The component of that name, where there is one."""
        return next((component for component in self.components if component.name == name), None)

    def by_node(self, component: Component) -> dict[int, tuple[int, ...]]:
        """A component's devices on each machine that it uses."""
        found: dict[int, list[int]] = {}
        for device in component.devices:
            found.setdefault(device // self.devices_per_node, []).append(device)
        return {node: tuple(devices) for node, devices in found.items()}

    def groups(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Devices by the components that they hold."""
        holders: dict[int, list[str]] = {}
        for component in self.components:
            for device in component.devices:
                holders.setdefault(device, []).append(component.name)
        found: dict[tuple[str, ...], list[int]] = {}
        for device in sorted(holders):
            found.setdefault(tuple(holders[device]), []).append(device)
        return {names: tuple(devices) for names, devices in found.items()}


def place(config: Experiment) -> Placement:
    """Put every component on its devices, whether that can work or not."""
    placement = config.placement
    components = tuple(Component(name, _devices(config, name), _split(config, name)) for name in _present(config))
    # fine-tuning by itself has as many devices as its own key says
    tuned = 0 if (stage := fine_tuning(config)) is None else -(-stage.devices // placement.nodes)
    per_node = max(placement.devices_per_node, _of_the_engine(config), tuned)
    return Placement(placement.nodes, per_node, placement.colocated, components)


def _present(config: Experiment) -> list[str]:
    """The components that hold devices; worlds of text need none."""
    if config.evaluation is not None:
        return []
    if fine_tuning(config) is not None:
        return ["actor"]
    wanted = {
        "actor": True,
        "rollout": True,
        "reference": config.needs_reference,
        "critic": config.needs_critic and not config.critic.shares_policy,
        "reward": config.reward is not None and config.reward.model is not None,
        "worlds": config.world.name == "simulator" or config.placement.worlds.devices is not None,
    }
    return [name for name, there in wanted.items() if there]


def _devices(config: Experiment, name: str) -> tuple[int, ...]:
    placement = config.placement
    if (stage := fine_tuning(config)) is not None:
        return tuple(range(stage.devices))
    given = getattr(placement, name).devices
    if name == "rollout" and _of_the_engine(config):
        return tuple(range(_of_the_engine(config)))
    everywhere = range(min(placement.nodes * placement.devices_per_node, MOST))
    return tuple(everywhere) if given is None else tuple(sorted(set(given)))


def _of_the_engine(config: Experiment) -> int:
    """Devices that a split engine takes of its machine where nobody places anything: as many as it needs, from the
    first on; 0 where there is no such engine."""
    placement, options = config.placement, config.rollout.engine_options
    size = options.tensor_parallel * options.pipeline_parallel
    unplaced = placement.nodes == placement.devices_per_node == 1 and placement.rollout.devices is None
    return min(size, MOST) if unplaced and size > 1 else 0


def _split(config: Experiment, name: str) -> Split:
    if name == "rollout":
        options, worker = config.rollout.engine_options, config.placement.rollout.devices_per_worker
        size = options.tensor_parallel * options.pipeline_parallel
        return engine_split(worker if size == 1 else options.tensor_parallel, options.pipeline_parallel)
    if name in LEARNERS:
        learner = getattr(config, name)
        return learner_split(learner.backend, learner.parallel, learner.sharding.group_size)
    return Split("engine")


def placement_faults(composed: Composed, placement: Placement, models: Models) -> Iterator[Fault]:
    """What can't work: devices that aren't there, splits that don't divide."""
    yield from _cluster(composed)
    for component in placement.components:
        beyond = list(_beyond(composed, placement, component))
        yield from beyond
        if not beyond and component.devices:
            yield from _workers(composed, component)
            yield from _splits(composed, component, models)


def refuse_misplaced(composed: Composed) -> None:
    """Let a run begin only where its learners can be split over its devices as it says, of which `quintet plan` says
    the same.

    Raises:
        ConfigError: they can't; one message names every such key and the nearest legal values.
    """
    config = composed.experiment
    raise_faults(placement_faults(composed, place(config), find_models(config)))


def _cluster(composed: Composed) -> Iterator[Fault]:
    placement = composed.experiment.placement
    visible = placement.visible_devices
    if placement.nodes * placement.devices_per_node > MOST:
        key = "placement.nodes" if placement.nodes > placement.devices_per_node else "placement.devices_per_node"
        yield fault(composed, key, f"that would be {placement.nodes * placement.devices_per_node:,} devices")
    if visible and len(visible) < placement.devices_per_node:
        problem = f"{told(composed, 'placement.visible_devices')} are fewer"
        hint = f"nearest: placement.devices_per_node={len(visible)}"
        yield fault(composed, "placement.devices_per_node", problem, hint)


def _beyond(composed: Composed, placement: Placement, component: Component) -> Iterator[Fault]:
    there = len(placement.devices)
    if not component.devices or component.devices[-1] < there:
        return
    key = "sft.devices" if fine_tuning(composed.experiment) else f"placement.{component.name}.devices"
    nodes = component.devices[-1] // placement.devices_per_node + 1
    size = f"{placement.nodes} × {placement.devices_per_node}"
    problem = f"there are {there} devices ({size}), the last is {there - 1}"
    yield fault(composed, key, problem, f"nearest: placement.nodes={nodes}, or name devices up to {there - 1}")


def _workers(composed: Composed, component: Component) -> Iterator[Fault]:
    key, count = f"placement.{component.name}.devices_per_worker", len(component.devices)
    size = getattr(composed.experiment.placement, component.name).devices_per_worker
    if fine_tuning(composed.experiment) is None and count % size:
        near = nearest_number(size, divisors(count))
        yield fault(composed, key, f"it doesn't divide the {count} devices", f"nearest: {key}={near}")


def _splits(composed: Composed, component: Component, models: Models) -> Iterator[Fault]:
    if component.name in (*LEARNERS, "rollout"):
        yield from split_faults(composed, component.name, len(component.devices), models.of(component.name))


def split_faults(composed: Composed, name: str, count: int, shape: Shape | None = None) -> Iterator[Fault]:
    """What of a component's split can't work on so many devices; of a model that isn't known, what can be said."""
    split = _split(composed.experiment, name)
    for part, problem in problems(split, count, shape):
        key = _key(name, part)
        size = nearest_size(split, part, count, shape)
        hint = f"nearest: {key}={size}" if size else None
        yield fault(composed, key, problem, f"{hint}; {STARTED}" if count == 1 and hint else hint)


def _key(component: str, part: str) -> str:
    """The native key of a part of a split."""
    if component == "rollout":
        return f"rollout.engine_options.{part}_parallel"
    return f"{component}.sharding.group_size" if part == "group" else f"{component}.parallel.{part}"


def nearest_batches(groups: int, games: int, parts: int, ranks: int) -> str:
    """The numbers of mini-batches and of groups nearest to these with which every rank has as many games."""
    legal = [part for part in divisors(games) if games // part % ranks == 0]
    unit = parts * ranks // math.gcd(parts * ranks, games // groups)
    multiples = [number for number in (groups - groups % unit, groups - groups % unit + unit) if number]
    more = " or ".join(map(str, multiples))
    fewer = f"training.mini_batches={nearest_number(parts, legal)}, or " if legal else ""
    return f"nearest: {fewer}training.groups_per_step={more}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as people write them: `0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
