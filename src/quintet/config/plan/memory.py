"""Peak memory of every device. Colocated components take turns: one computes while the others are idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.plan.component_memory import MemoryUse, active_memory, idle_memory
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Placement

if TYPE_CHECKING:
    from quintet.config.native.experiment import Experiment

GIB = 1 << 30
PHASES: Mapping[str, str] = {
    "rollout": "while the engine generates",
    "reference": "while the reference computes",
    "reward": "while the reward model scores",
    "critic": "while the critic learns",
    "actor": "while the actor learns",
}
ALL_AT_ONCE = "all at once"


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peak memory of devices that hold the same components."""

    devices: tuple[int, ...]
    components: tuple[str, ...]
    computing: str | None
    """The component that computes at the peak; None if all do."""
    parts: Mapping[str, MemoryUse]
    """Memory of each component at the peak."""

    @property
    def phase(self) -> str:
        return ALL_AT_ONCE if self.computing is None else PHASES[self.computing]

    @property
    def total(self) -> int:
        return sum(load.total for load in self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of all components and the peak on every device."""

    active: Mapping[str, MemoryUse]
    """Each component while it computes."""
    idle: Mapping[str, MemoryUse]
    """Each component while others compute."""
    peaks: tuple[MemoryPeak, ...]
    """Peaks of devices with a component whose model is known."""

    @property
    def fullest(self) -> MemoryPeak | None:
        """Largest peak of all devices."""
        return max(self.peaks, key=lambda peak: peak.total, default=None)


def plan_memory(
    config: Experiment, placement: Placement, models: Models, device_bytes: int | None = None
) -> MemoryPlan:
    """Estimate every component whose model is known; `device_bytes` is used for `memory_share` of an engine."""
    active: dict[str, MemoryUse] = {}
    for component in placement.components:
        shape = models.of(component.name)
        if shape is not None and component.devices:
            active[component.name] = active_memory(config, component, shape, device_bytes)
    idle = {name: idle_memory(config, name, load) for name, load in active.items()}
    peaks = [
        _peak(names, devices, active, idle, in_turns=placement.colocated)
        for names, devices in placement.groups().items()
        if any(name in active for name in names)
    ]
    return MemoryPlan(active, idle, tuple(peaks))


def _peak(
    names: tuple[str, ...],
    devices: tuple[int, ...],
    active: Mapping[str, MemoryUse],
    idle: Mapping[str, MemoryUse],
    *,
    in_turns: bool,
) -> MemoryPeak:
    estimated = [name for name in names if name in active]
    if not in_turns:
        return MemoryPeak(devices, names, None, {name: active[name] for name in estimated})
    moments = [
        MemoryPeak(devices, names, current, {name: (active if name == current else idle)[name] for name in estimated})
        for current in estimated
    ]
    return max(moments, key=lambda moment: moment.total)
