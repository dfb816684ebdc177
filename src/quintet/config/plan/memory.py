"""The fullest moment of every device: taking turns, one component computes while the others wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.plan.loads import Load, idle_load, working_load
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Placement

if TYPE_CHECKING:
    from quintet.config.native import Experiment

__all__ = ["GIB", "Memory", "Peak", "memory"]

GIB = 1 << 30
PHASES: Mapping[str, str] = {
    "rollout": "while the engine plays",
    "reference": "while the reference scores",
    "reward": "while the reward model scores",
    "critic": "while the critic learns",
    "actor": "while the actor learns",
}
ALL_AT_ONCE = "all at once"


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment of devices that hold the same components."""

    devices: tuple[int, ...]
    components: tuple[str, ...]
    worker: str | None
    """The component that computes then; None where all do."""
    parts: Mapping[str, Load]
    """What each component holds then."""

    @property
    def phase(self) -> str:
        return ALL_AT_ONCE if self.worker is None else PHASES[self.worker]

    @property
    def total(self) -> int:
        return sum(load.total for load in self.parts.values())


@dataclass(frozen=True, slots=True)
class Memory:
    """What every device must hold."""

    working: Mapping[str, Load]
    """Each component at its fullest."""
    idle: Mapping[str, Load]
    """Each component while others compute."""
    peaks: tuple[Peak, ...]
    """Of devices that hold a component whose model is known."""

    @property
    def fullest(self) -> Peak | None:
        """The device that needs most."""
        return max(self.peaks, key=lambda peak: peak.total, default=None)


def memory(config: Experiment, placement: Placement, models: Models, device_bytes: int | None = None) -> Memory:
    """Count every component whose model is known; `device_bytes` is what an engine takes its share of."""
    working: dict[str, Load] = {}
    for component in placement.components:
        shape = models.of(component.name)
        if shape is not None and component.devices:
            working[component.name] = working_load(config, component, shape, device_bytes)
    idle = {name: idle_load(config, name, load) for name, load in working.items()}
    peaks = [
        _peak(names, devices, working, idle, in_turns=placement.colocated)
        for names, devices in placement.groups().items()
        if any(name in working for name in names)
    ]
    return Memory(working, idle, tuple(peaks))


def _peak(
    names: tuple[str, ...],
    devices: tuple[int, ...],
    working: Mapping[str, Load],
    idle: Mapping[str, Load],
    *,
    in_turns: bool,
) -> Peak:
    counted = [name for name in names if name in working]
    if not in_turns:
        return Peak(devices, names, None, {name: working[name] for name in counted})
    moments = [
        Peak(devices, names, worker, {name: (working if name == worker else idle)[name] for name in counted})
        for worker in counted
    ]
    return max(moments, key=lambda moment: moment.total)
