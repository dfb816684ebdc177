"""Conversion of RLinf's `cluster.component_placement`: which component runs on which devices."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.rlinf.key_values import COMPONENTS
from quintet.config.native.experiment import Experiment
from quintet.config.native.placement import ComponentConfig
from quintet.config.plan.placement import RESTARTABLE, format_ranges
from quintet.config.problems import ConfigProblem

SECTION, NUM_NODES, NODE_DEVICES = "cluster.component_placement", "cluster.num_nodes", "cluster.num_gpus_per_node"
DOCUMENTED = "cluster.component_placement.actor,inference,rollout"
TENSOR, PIPELINE = "actor.model.tensor_model_parallel_size", "actor.model.pipeline_model_parallel_size"
ENGINE_TENSOR, ENGINE_PIPELINE = "rollout.tensor_parallel_size", "rollout.pipeline_parallel_size"
SPLITS = ((TENSOR, PIPELINE), (ENGINE_TENSOR, ENGINE_PIPELINE))
"""Keys whose product is the number of devices that share the learner's model, and the engine's."""
MAX_DEVICES = 1 << 16
Process = tuple[int, ...]
"""Devices of one process; several processes may share a device."""


@dataclass(slots=True)
class ComponentPlacement:
    """Devices of all components; of none if there are problems."""

    devices_per_node: int
    """Enough for the highest device number and for models split over devices, unless the file says how many; RLinf asks
    Ray instead."""
    is_set: bool
    """Whether the user wrote the placement; that of the reference is only an example."""
    processes: dict[str, list[Process]] = field(default_factory=dict)
    """Processes by component."""
    on_all_devices: set[str] = field(default_factory=set)
    """Components with the placement `all`."""
    keys: dict[str, str] = field(default_factory=dict)
    """The key that places each component."""
    problems: list[ConfigProblem] = field(default_factory=list)
    """Unreadable placements, components placed twice, and placements that no native one corresponds to."""

    def devices(self, component: str) -> set[int] | None:
        """Return the devices of a component; None if they are unknown."""
        all_unnumbered = component in self.on_all_devices and set(self.processes) == self.on_all_devices
        if component not in self.processes or all_unnumbered:
            return None
        return set(chain(*self.processes[component]))

    @property
    def is_colocated(self) -> bool | None:
        """Whether learner and engine share devices; None if the user placed neither."""
        if not self.is_set or not {"actor", "rollout"} <= set(self.processes):
            return None
        actor, rollout = self.devices("actor"), self.devices("rollout")
        return actor is None or rollout is None or not actor.isdisjoint(rollout)


def parse_placements(values: ForeignValues) -> ComponentPlacement:
    """Return the placement of a configuration, by default that of the reference."""
    written = dict.fromkeys(
        SECTION + "." + key.removeprefix(f"{SECTION}.").split(".")[0]
        for key in values.merged.sources
        if key.startswith(f"{SECTION}.")
    )
    specs = {key: values[key] for key in written or [DOCUMENTED]}
    # a mapping names a group of nodes, too
    specs = {key: _without_node_group(spec) for key, spec in specs.items()}
    placement = ComponentPlacement(_devices_per_node(values, specs), bool(written))
    num_devices = values[NUM_NODES] * placement.devices_per_node
    if num_devices > MAX_DEVICES:
        problem = f"makes more than {MAX_DEVICES} devices"
        placement.problems.append(values.problem(NUM_NODES, problem, f"at most: {NUM_NODES}={MAX_DEVICES}"))
        return placement
    for key, spec in specs.items():
        placement.problems += _place_components(placement, values, key, spec, num_devices)
    if placement.problems:
        placement.processes.clear()
    return placement


def _without_node_group(spec: Any) -> Any:
    return spec["placement"] if isinstance(spec, Mapping) and "placement" in spec else spec


def _place_components(
    placement: ComponentPlacement, values: ForeignValues, key: str, spec: object, num_devices: int
) -> Iterator[ConfigProblem]:
    """Add the components of one key to a placement; yield problems."""
    try:
        by_component = parse_placement(key.removeprefix(f"{SECTION}."), spec, num_devices)
    except ValueError as error:
        hint = "valid: all, 3, 0,2,3, 0-3, 0-3,5,14, or devices with ranks such as 0-1:0-3"
        yield values.problem(key, str(error), hint)
        return
    for name, processes in by_component.items():
        if name in placement.keys:
            problem = f"{values.describe(placement.keys[name])} already places {name}"
            yield values.problem(key, problem, f"leave {key} out, or leave {placement.keys[name]} out")
        placement.keys[name] = key
        if len(set(map(len, processes))) > 1:
            problem = f"all processes of {name} must have the same number of devices"
            yield values.problem(key, problem, "give each range the same number of devices per process")
        placement.problems += _check_devices_of_processes(values, key, name, processes)
        # other names are reported as unknown keys
        if name in COMPONENTS:
            placement.processes[name] = processes
            if str(spec).strip().lower() == "all":
                placement.on_all_devices.add(name)


def _check_devices_of_processes(
    values: ForeignValues, key: str, name: str, processes: Sequence[Process]
) -> Iterator[ConfigProblem]:
    """Yield processes that share a device or have several, where a component has one process per device."""
    components = COMPONENTS.get(name, ())
    devices = list(chain(*processes))
    if components and "rollout" not in components and len(devices) > len(processes):
        problem = f"a process of {name} has one device; parallelism of a model over devices has keys of its own"
    elif components and RESTARTABLE.isdisjoint(components) and len(set(devices)) < len(devices):
        problem = f"the processes of {name} cannot share a device, over which they would communicate"
    else:
        return
    yield values.problem(key, problem, f"one process per device: {key}={format_ranges(sorted(set(devices)))}")


def _devices_per_node(values: ForeignValues, specs: Mapping[str, object]) -> int:
    if (devices := values[NODE_DEVICES]) is not None:
        return int(devices)
    without_ranks = re.sub(r":[^,]*", "", ",".join(map(str, specs.values())))
    highest = max(map(int, re.findall(r"\d+", without_ranks)), default=0)
    per_model = math.lcm(*(math.prod(values[key] or 1 for key in keys) for keys in SPLITS))
    nodes: int = values[NUM_NODES]
    return math.ceil(max(min(highest + 1, MAX_DEVICES), per_model) / nodes)


def parse_placement(components: str, spec: object, num_devices: int) -> dict[str, list[Process]]:
    """Return the processes of each component, whose names are joined by commas.

    A placement is `all`, `3`, `0,2,3`, `0-3` or `0-3,5,14`. After `:` come the ranks: `0-1:0-3` puts processes 0 to 3
    on devices 0 and 1, two on each, and `0-3:0` gives four devices to one process. Devices count over all nodes.

    >>> parse_placement("actor,rollout", "0-1", 8)["rollout"]
    [(0,), (1,)]

    Raises:
        ValueError: the text is not such a placement.
    """
    names = [name.strip() for name in components.split(",")]
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(f"{components!r} must name components, each once")
    if isinstance(spec, bool) or not isinstance(spec, int | str):
        raise ValueError(f"{spec!r} is not a placement")
    processes: list[Process] = []
    for part in filter(None, map(str.strip, str(spec).split(","))):
        added = _parse_part(part, len(processes), num_devices)
        if processes and added[0][0] <= processes[-1][-1]:
            raise ValueError(f"{spec!r}: devices must be in ascending order, each once")
        processes += added
    return dict.fromkeys(names, processes)


def _parse_part(part: str, first_rank: int, num_devices: int) -> list[Process]:
    left, colon, right = (text.strip() for text in part.partition(":"))
    devices = range(num_devices) if left.lower() == "all" else _parse_range(left, part)
    if devices.stop > num_devices:
        raise ValueError(f"{part!r}: there are {num_devices} devices, the last is {num_devices - 1}")
    ranks = _parse_range(right, part) if colon else range(first_rank, first_rank + len(devices))
    if ranks.start != first_rank:
        raise ValueError(f"{part!r}: its ranks must continue at {first_rank}")
    if len(ranks) % len(devices) == 0:
        return [(device,) for device in devices for _ in range(len(ranks) // len(devices))]
    if len(devices) % len(ranks) == 0:
        size = len(devices) // len(ranks)
        return [tuple(devices[start : start + size]) for start in range(0, len(devices), size)]
    raise ValueError(f"{part!r}: {len(ranks)} processes cannot share {len(devices)} devices evenly")


def _parse_range(text: str, part: str) -> range:
    match = re.fullmatch(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", text)
    if match is None:
        raise ValueError(f"{part!r} is not a rank or a range of ranks")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ValueError(f"{part!r} is a range in descending order")
    return range(low, high + 1)


def placement_to_native(placement: ComponentPlacement, native: NativeBuilder) -> None:
    """Set the native placement."""
    keys = {name: placement.keys[name] for name in placement.processes}
    numbered = dict.fromkeys(key for name, key in keys.items() if name not in placement.on_all_devices)
    if numbered or placement.devices_per_node > 1:
        origins = (*numbered, *chain(*SPLITS), NUM_NODES, NODE_DEVICES)
        native.set("placement.devices_per_node", placement.devices_per_node, *origins)
    for name, processes in placement.processes.items():
        for component in _needed_components(name, native):
            fields = {"devices": None}
            if name not in placement.on_all_devices:
                fields = _native_component(component, processes)
            for field_name, value in fields.items():
                native.set(f"placement.{component}.{field_name}", value, keys[name])
    if placement.is_colocated is not None:
        native.set("placement.colocated", placement.is_colocated, keys["actor"], keys["rollout"])


def _needed_components(name: str, native: NativeBuilder) -> tuple[str, ...]:
    """Return the native components that a component stands for; of those of `inference` the ones that the run needs,
    or, if it needs neither, the first one, which is refused on devices of its own."""
    if name != "inference":
        return COMPONENTS[name]
    teaches = native.get("algorithm.loss.name") == "distillation"
    needed = {
        "logprobs": native.get("rollout.recompute_logprobs"),
        "reference": native.get("algorithm.kl") is not None or teaches,
    }
    return tuple(component for component in COMPONENTS[name] if needed[component]) or COMPONENTS[name][:1]


def _native_component(component: str, processes: list[Process]) -> dict[str, Any]:
    """Return the fields of a native component; devices are listed once if processes share them evenly."""
    devices = list(chain(*processes))
    unique = list(dict.fromkeys(devices))
    counts = set(Counter(devices).values())
    is_even = len(counts) == 1
    native: dict[str, Any] = {"devices": unique if is_even else devices}
    if component == "rollout":
        native["devices_per_worker"] = len(processes[0])
    if component in RESTARTABLE:
        native["processes_per_device"] = counts.pop() if is_even else 1
    return native


def placement_from_native(foreign: ForeignBuilder) -> None:
    """Set one placement key for all components with the same devices."""
    placement = foreign.experiment.placement
    by_spec: dict[str, list[str]] = {}
    for name, components in COMPONENTS.items():
        if name == "inference":
            components = _exported_inference(foreign.experiment)
        specs = {_format_component(getattr(placement, component)) for component in components}
        if len(specs) == 1 and (spec := specs.pop()):
            by_spec.setdefault(spec, []).append(name)
    on_all_devices = [name for name in ("actor", "rollout") if not getattr(placement, name).devices]
    if by_spec and on_all_devices:
        by_spec["all"] = on_all_devices
    for spec, names in by_spec.items():
        foreign.set(f"{SECTION}.{','.join(names)}", spec)


def _exported_inference(run: Experiment) -> tuple[str, ...]:
    """Return the components of a run that RLinf's `inference` computes."""
    needed = {"logprobs": run.rollout.recompute_logprobs, "reference": run.needs_reference}
    return tuple(name for name in COMPONENTS["inference"] if needed[name]) or COMPONENTS["inference"][:1]


def _format_component(config: ComponentConfig) -> str:
    """Return a component's placement as text; empty for all devices."""
    devices = config.devices or ()
    rank = 0
    parts = []
    per_worker: int = getattr(config, "devices_per_worker", 1)
    per_device: int = getattr(config, "processes_per_device", 1)
    counts = {device: count * per_device for device, count in Counter(devices).items()}
    for first, last, count in _device_ranges(counts):
        workers = (last - first + 1) * count // per_worker
        devices_text = str(first) if first == last else f"{first}-{last}"
        ranks_text = str(rank) if workers == 1 else f"{rank}-{rank + workers - 1}"
        parts.append(devices_text if count == per_worker == 1 else f"{devices_text}:{ranks_text}")
        rank += workers
    return ",".join(parts)


def _device_ranges(counts: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield first and last device, and processes per device, of ranges of adjacent devices with as many processes."""
    # adjacent devices differ from their positions by the same number
    for (_, count), ranged in groupby(enumerate(counts.items()), lambda item: (item[1][0] - item[0], item[1][1])):
        devices = [device for _, (device, _) in ranged]
        yield devices[0], devices[-1], count
