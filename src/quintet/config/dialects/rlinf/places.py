"""RLinf's `cluster.component_placement`: which component runs on which devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.devices import MOST, Process, parse_placement
from quintet.config.faults import Fault
from quintet.config.native.placement import ComponentConfig

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["Places", "express_places", "place", "places", "wrong_places"]

SECTION = "cluster.component_placement"
DOCUMENTED = f"{SECTION}.actor,inference,rollout"
NATIVE = {
    "actor": "actor",
    "rollout": "rollout",
    "inference": "reference",
    "reward": "reward",
    "critic": "critic",
    "env": "worlds",
}
"""Native components by RLinf's names; its `inference` computes what the reference and the learner think of replies."""
SPLITS = (
    ("actor.model.tensor_model_parallel_size", "actor.model.pipeline_model_parallel_size"),
    ("rollout.tensor_parallel_size", "rollout.pipeline_parallel_size"),
)
"""Keys whose product is the number of devices that share one model: of the learner, of the engine."""
LEGAL = "legal: all, 3, 0,2,3, 0-3, 0-3,5,14, or devices and their processes, 0-1:0-3"


@dataclass(frozen=True, slots=True)
class Places:
    """What the lines say."""

    devices_per_node: int
    """So many that every rank is there and every split model finds room, since no key tells: Ray would."""
    processes: Mapping[str, tuple[Process, ...]]
    """Of each component that has a line."""
    everywhere: frozenset[str]
    """Components whose line takes all devices, however many there are."""
    lines: Mapping[str, str]
    """The key of each component's line."""
    given: bool
    """Whether somebody wrote them; the reference's own line is only an example."""

    def on(self, component: str) -> set[int] | None:
        """The devices of a component; None where they aren't known."""
        if component not in self.processes or (component in self.everywhere and not self.numbered):
            return None
        return {device for process in self.processes[component] for device in process.devices}

    @property
    def together(self) -> bool | None:
        """Whether learner and engine share devices; None where nobody wrote where they lie."""
        if not self.given or not {"actor", "rollout"} <= set(self.processes):
            return None
        actor, rollout = self.on("actor"), self.on("rollout")
        return actor is None or rollout is None or not actor.isdisjoint(rollout)

    @property
    def numbered(self) -> bool:
        """Whether any line names devices by their ranks."""
        return set(self.processes) != self.everywhere


def places(values: Values) -> Places:
    """The placement, of which `wrong_places` found nothing wrong."""
    lines = {key: values[key] for key in _lines(values)}
    nodes, each = values["cluster.num_nodes"], _devices_per_node(values)
    processes: dict[str, tuple[Process, ...]] = {}
    keys: dict[str, str] = {}
    everywhere = set()
    for key, spec in lines.items():
        for name, found in parse_placement(_names(key), spec, each * nodes).items():
            if name not in NATIVE:
                continue  # told as unknown by whoever checks the keys
            processes[name], keys[name] = found, key
            if str(spec).strip().lower() == "all":
                everywhere.add(name)
    return Places(each, processes, frozenset(everywhere), keys, any(map(values.given, lines)))


def wrong_places(values: Values) -> Iterator[Fault]:
    """Lines that can't be read, components that two lines place, and what can't be said natively."""
    placed: dict[str, str] = {}
    devices = values["cluster.num_nodes"] * _devices_per_node(values)
    if devices > MOST:
        yield values.fault("cluster.num_nodes", f"makes more than {MOST} devices", f"at most: {MOST}")
        return
    for key in _lines(values):
        try:
            found = parse_placement(_names(key), values[key], devices)
        except ValueError as error:
            yield values.fault(key, str(error), LEGAL)
            continue
        for name, processes in found.items():
            if name in placed:
                yield values.fault(key, f"{values.told(placed[name])} places {name} already", "keep one of them")
            placed[name] = key
            if len({len(process.devices) for process in processes}) > 1:
                problem = f"the processes of {name} must have as many devices each"
                yield values.fault(key, problem, "give each part of it as many devices for each process")


def place(found: Places, native: Native) -> None:
    """Where each component runs, natively."""
    numbers = [key for name, key in found.lines.items() if name not in found.everywhere]
    if numbers or found.devices_per_node > 1:
        origins = [*dict.fromkeys(numbers), *(key for keys in SPLITS for key in keys), "cluster.num_nodes"]
        native.put("placement.devices_per_node", found.devices_per_node, *origins)
    for name, processes in found.processes.items():
        component, key = f"placement.{NATIVE[name]}", found.lines[name]
        if name in found.everywhere:
            native.put(f"{component}.devices", None, key)
            continue
        for field, value in _placed(processes).items():
            native.put(f"{component}.{field}", value, key)


def _placed(processes: tuple[Process, ...]) -> dict[str, Any]:
    """Devices in order, each once where the processes share them evenly."""
    devices = [device for process in processes for device in process.devices]
    once = list(dict.fromkeys(devices))
    share = {devices.count(device) for device in once}
    even = len(share) == 1
    return {
        "devices": once if even else devices,
        "devices_per_worker": len(processes[0].devices),
        "processes_per_device": share.pop() if even else 1,
    }


def _lines(values: Values) -> list[str]:
    """The keys of the lines that were given; else that of the reference."""
    given = [key for key in values.written.sources if key.startswith(f"{SECTION}.")]
    return given or [DOCUMENTED]


def _names(key: str) -> str:
    return key.removeprefix(f"{SECTION}.")


def _devices_per_node(values: Values) -> int:
    """So many that the highest rank is there and the devices that share a model, on nodes alike."""
    devices = (part.partition(":")[0] for key in _lines(values) for part in str(values[key]).split(","))
    highest = max([0, *(int(rank) for part in devices for rank in re.findall(r"\d+", part))])
    shared = math.lcm(*(math.prod(values[key] or 1 for key in keys) for keys in SPLITS))
    nodes: int = values["cluster.num_nodes"]
    return math.ceil(max(min(highest + 1, MOST), shared) / nodes)


def express_places(foreign: Foreign) -> None:
    """One line for all components that have the same devices."""
    placement = foreign.experiment.placement
    lines: dict[str, list[str]] = {}
    for name, component in NATIVE.items():
        config: ComponentConfig = getattr(placement, component)
        if spec := _spec(config):
            lines.setdefault(spec, []).append(name)
    everywhere = [name for name in ("actor", "rollout") if not _spec(getattr(placement, NATIVE[name]))]
    if lines and everywhere:
        lines["all"] = everywhere
    for spec, names in lines.items():
        foreign.put(f"{SECTION}.{','.join(names)}", spec)


def _spec(config: ComponentConfig) -> str:
    """A component's devices in RLinf's grammar; nothing for all of them."""
    if not config.devices:
        return ""
    devices, each, rank, parts = config.devices, config.devices_per_worker, 0, []
    shares = {device: devices.count(device) * config.processes_per_device for device in devices}
    for low, high, share in _runs(shares):
        workers = (high - low + 1) * share // each
        where = str(low) if low == high else f"{low}-{high}"
        who = str(rank) if workers == 1 else f"{rank}-{rank + workers - 1}"
        parts.append(where if share == each == 1 else f"{where}:{who}")
        rank += workers
    return ",".join(parts)


def _runs(shares: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring devices with as many processes each: the first, the last, and how many."""
    begun: list[int] = []
    for device, share in shares.items():
        if begun and device == begun[1] + 1 and share == begun[2]:
            begun[1] = device
            continue
        if begun:
            yield begun[0], begun[1], begun[2]
        begun = [device, device, share]
    if begun:
        yield begun[0], begun[1], begun[2]
