"""Peak memory of every device. Colocated components take turns: one computes while the others are idle."""

from collections.abc import Mapping
from dataclasses import dataclass

from quintet.config.native.experiment import Experiment
from quintet.config.plan.component_memory import MemoryUse, PlacedModel, active_memory, idle_memory
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Placement

GIB = 1 << 30
PHASES: Mapping[str, str] = {
    "actor": "while the actor learns",
    "rollout": "while the engine generates",
    "reference": "while the reference computes",
    "critic": "while the critic learns",
    "reward": "while the reward model scores",
}
"""Phase in which each component computes."""
ALL_AT_ONCE = "all at once"


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peak memory of devices that hold the same components."""

    devices: tuple[int, ...]
    components: tuple[str, ...]
    phase: str
    parts: Mapping[str, MemoryUse]
    """Memory of each component at the peak."""

    @property
    def total(self) -> int:
        return sum(use.total for use in self.parts.values())


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
            active[component.name] = active_memory(PlacedModel(config, component, shape, device_bytes))
    idle = {name: idle_memory(config, name, use) for name, use in active.items()}
    groups = placement.groups().items()
    peaks = (_peak(names, devices, active, idle if placement.colocated else active) for names, devices in groups)
    return MemoryPlan(active, idle, tuple(peak for peak in peaks if peak is not None))


def _peak(
    names: tuple[str, ...], devices: tuple[int, ...], active: Mapping[str, MemoryUse], waiting: Mapping[str, MemoryUse]
) -> MemoryPeak | None:
    """Return the peak of devices; `waiting` has the memory of each component while another one computes."""
    moments = [
        MemoryPeak(
            devices,
            names,
            ALL_AT_ONCE if waiting is active else PHASES[computing],
            {name: (active if name == computing else waiting)[name] for name in names if name in active},
        )
        for computing in names
        if computing in active
    ]
    return max(moments, key=lambda moment: moment.total, default=None)
