"""On which devices of which nodes each component runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Count, Section

__all__ = ["ChannelConfig", "ComponentConfig", "PlacementConfig"]

Later = Waits(Capability.CLUSTER)


class ChannelConfig(Section):
    """The queue by which a component hands on what it made."""

    name: Annotated[str | None, Later] = None
    """Name of the buffer that the components share; null lets the run choose."""
    queue: Annotated[str | None, Later] = None
    """Name of the queue in it; null lets the run choose."""
    size: Annotated[Count, Later] = 0
    """Items that it holds; 0 for any number."""


class ComponentConfig(Section):
    """Where one component runs."""

    devices: Annotated[tuple[Count, ...] | None, Field(strict=False), Waits(Capability.CLUSTER, ((0,), ()))] = None
    """Device of each process, counted over all nodes; null takes all of them, an empty list the CPU."""
    devices_per_worker: Annotated[PositiveInt, Later] = 1
    """Devices that one process has."""
    processes_per_device: Annotated[PositiveInt, Later] = 1
    """Processes that share one device."""
    group: Annotated[str | None, Later] = None
    """Name of its processes; null takes the component's."""
    channel: ChannelConfig = ChannelConfig()
    """How it hands on what it made."""


class PlacementConfig(Section):
    """On which devices of which nodes each component runs."""

    nodes: Annotated[PositiveInt, Later] = 1
    """Machines."""
    devices_per_node: Annotated[PositiveInt, Later] = 1
    """Devices of each."""
    visible_devices: Annotated[tuple[Count, ...] | None, Field(strict=False), Waits(Capability.CLUSTER, ((0,),))] = None
    """Devices of a machine that the run may use; null takes all."""
    colocated: Annotated[bool, Later] = True
    """Engine and learners take turns on the same devices."""
    join_timeout_seconds: Annotated[PositiveInt, Later] = 300
    """How long a worker waits for the others at the start."""
    offload_worlds: Annotated[bool, Waits(Capability.EMBODIED)] = False
    """Simulators leave their device while the policy learns."""
    actor: ComponentConfig = ComponentConfig()
    """The policy's learner."""
    rollout: ComponentConfig = ComponentConfig()
    """The generation engines."""
    critic: ComponentConfig = ComponentConfig()
    """The critic's learner."""
    reference: ComponentConfig = ComponentConfig()
    """The reference."""
    reward: ComponentConfig = ComponentConfig()
    """The reward model."""
    worlds: ComponentConfig = ComponentConfig()
    """Worlds and simulators."""
