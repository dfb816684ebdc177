"""Conversion of RLinf's `cluster.component_placement`: which component runs on which devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.rlinf.placement_spec import MAX_DEVICES, Process, parse_placement
from quintet.config.dialects.rlinf.value_maps import COMPONENTS
from quintet.config.native.placement import ComponentConfig
from quintet.config.problems import ConfigProblem

SECTION = "cluster.component_placement"
DOCUMENTED = f"{SECTION}.actor,inference,rollout"
NUM_NODES = "cluster.num_nodes"
SPLITS = (
    ("actor.model.tensor_model_parallel_size", "actor.model.pipeline_model_parallel_size"),
    ("rollout.tensor_parallel_size", "rollout.pipeline_parallel_size"),
)
"""Keys whose product is the number of devices that share the learner's model, and the engine's."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of all components."""

    devices_per_node: int
    """Enough for the highest device number and for models split over devices; RLinf asks Ray instead."""
    processes: Mapping[str, tuple[Process, ...]]
    """Processes by component."""
    on_all_devices: frozenset[str]
    """Components with the placement `all`."""
    keys: Mapping[str, str]
    """The key that places each component."""
    is_set: bool
    """Whether the user wrote the placement; that of the reference is only an example."""

    def devices(self, component: str) -> set[int] | None:
        """Return the devices of a component; None if they are unknown."""
        all_unnumbered = component in self.on_all_devices and set(self.processes) == self.on_all_devices
        if component not in self.processes or all_unnumbered:
            return None
        return {device for process in self.processes[component] for device in process.devices}

    @property
    def is_colocated(self) -> bool | None:
        """Whether learner and engine share devices; None if the user placed neither."""
        if not self.is_set or not {"actor", "rollout"} <= set(self.processes):
            return None
        actor, rollout = self.devices("actor"), self.devices("rollout")
        return actor is None or rollout is None or not actor.isdisjoint(rollout)


def parse_placements(values: ForeignValues) -> Placement:
    """Return the placement of a configuration without `placement_problems`."""
    specs = {key: values[key] for key in _placement_keys(values)}
    per_node = _devices_per_node(values)
    processes: dict[str, tuple[Process, ...]] = {}
    keys: dict[str, str] = {}
    on_all_devices = set()
    for key, spec in specs.items():
        for name, placed in parse_placement(_component_names(key), spec, per_node * values[NUM_NODES]).items():
            if name not in COMPONENTS:
                continue  # reported as an unknown key
            processes[name], keys[name] = placed, key
            if str(spec).strip().lower() == "all":
                on_all_devices.add(name)
    return Placement(per_node, processes, frozenset(on_all_devices), keys, any(map(values.is_set, specs)))


def placement_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield unreadable placements, components placed twice, and placements that no native one corresponds to."""
    placed: dict[str, str] = {}
    num_devices = values[NUM_NODES] * _devices_per_node(values)
    if num_devices > MAX_DEVICES:
        yield values.problem(NUM_NODES, f"makes more than {MAX_DEVICES} devices", f"at most: {MAX_DEVICES}")
        return
    for key in _placement_keys(values):
        try:
            by_component = parse_placement(_component_names(key), values[key], num_devices)
        except ValueError as error:
            hint = "valid: all, 3, 0,2,3, 0-3, 0-3,5,14, or devices with ranks such as 0-1:0-3"
            yield values.problem(key, str(error), hint)
            continue
        for name, processes in by_component.items():
            if name in placed:
                problem = f"{values.describe(placed[name])} already places {name}"
                yield values.problem(key, problem, "keep one of them")
            placed[name] = key
            if len({len(process.devices) for process in processes}) > 1:
                problem = f"all processes of {name} must have the same number of devices"
                yield values.problem(key, problem, "give each range the same number of devices per process")


def placement_to_native(placement: Placement, native: NativeBuilder) -> None:
    """Set the native placement."""
    numbered = [key for name, key in placement.keys.items() if name not in placement.on_all_devices]
    if numbered or placement.devices_per_node > 1:
        origins = [*dict.fromkeys(numbered), *(key for keys in SPLITS for key in keys), NUM_NODES]
        native.set("placement.devices_per_node", placement.devices_per_node, *origins)
    for name, processes in placement.processes.items():
        component, key = f"placement.{COMPONENTS[name]}", placement.keys[name]
        if name in placement.on_all_devices:
            native.set(f"{component}.devices", None, key)
            continue
        for field, value in _native_component(processes).items():
            native.set(f"{component}.{field}", value, key)
    if placement.is_colocated is not None:
        origins = [placement.keys["actor"], placement.keys["rollout"]]
        native.set("placement.colocated", placement.is_colocated, *origins)


def _native_component(processes: tuple[Process, ...]) -> dict[str, Any]:
    """Return the fields of a native component; devices are listed once if processes share them evenly."""
    devices = [device for process in processes for device in process.devices]
    unique = list(dict.fromkeys(devices))
    counts = {devices.count(device) for device in unique}
    is_even = len(counts) == 1
    return {
        "devices": unique if is_even else devices,
        "devices_per_worker": len(processes[0].devices),
        "processes_per_device": counts.pop() if is_even else 1,
    }


def _placement_keys(values: ForeignValues) -> list[str]:
    """Return the placement keys that the user set, otherwise that of the reference."""
    return [key for key in values.merged.sources if key.startswith(f"{SECTION}.")] or [DOCUMENTED]


def _component_names(key: str) -> str:
    return key.removeprefix(f"{SECTION}.")


def _devices_per_node(values: ForeignValues) -> int:
    devices = (part.partition(":")[0] for key in _placement_keys(values) for part in str(values[key]).split(","))
    highest = max([0, *(int(rank) for part in devices for rank in re.findall(r"\d+", part))])
    per_model = math.lcm(*(math.prod(values[key] or 1 for key in keys) for keys in SPLITS))
    nodes: int = values[NUM_NODES]
    return math.ceil(max(min(highest + 1, MAX_DEVICES), per_model) / nodes)


def placement_from_native(foreign: ForeignBuilder) -> None:
    """Set one placement key for all components with the same devices."""
    placement = foreign.experiment.placement
    by_spec: dict[str, list[str]] = {}
    for name, component in COMPONENTS.items():
        if spec := _format_component(getattr(placement, component)):
            by_spec.setdefault(spec, []).append(name)
    on_all_devices = [name for name in ("actor", "rollout") if not getattr(placement, COMPONENTS[name]).devices]
    if by_spec and on_all_devices:
        by_spec["all"] = on_all_devices
    for spec, names in by_spec.items():
        foreign.set(f"{SECTION}.{','.join(names)}", spec)


def _format_component(config: ComponentConfig) -> str:
    """Return a component's placement as text; empty for all devices."""
    if not config.devices:
        return ""
    devices, per_worker, rank, parts = config.devices, config.devices_per_worker, 0, []
    counts = {device: devices.count(device) * config.processes_per_device for device in devices}
    for first, last, count in _device_ranges(counts):
        workers = (last - first + 1) * count // per_worker
        devices_text = str(first) if first == last else f"{first}-{last}"
        ranks_text = str(rank) if workers == 1 else f"{rank}-{rank + workers - 1}"
        parts.append(devices_text if count == per_worker == 1 else f"{devices_text}:{ranks_text}")
        rank += workers
    return ",".join(parts)


def _device_ranges(counts: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield first and last device, and processes per device, of ranges of adjacent devices with as many processes."""
    current: list[int] = []
    for device, count in counts.items():
        if current and device == current[1] + 1 and count == current[2]:
            current[1] = device
            continue
        if current:
            yield current[0], current[1], current[2]
        current = [device, device, count]
    if current:
        yield current[0], current[1], current[2]
