"""Devices of each component."""

from typing import Annotated, Literal

from pydantic import PositiveInt

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.section import Count, ListOf, Section

REQUIRES_CLUSTER = Requires(Capability.CLUSTER)


class ChannelConfig(Section):
    """Queue through which a component passes on its results."""

    name: Annotated[str | None, REQUIRES_CLUSTER] = None
    """Name of the buffer shared by the components; null chooses one."""
    queue: Annotated[str | None, REQUIRES_CLUSTER] = None
    """Name of the queue in the buffer; null chooses one."""
    size: Annotated[Count, REQUIRES_CLUSTER] = 0
    """Maximum items in the queue; 0 sets no limit."""


class ComponentConfig(Section):
    """Devices and processes of one component."""

    devices: Annotated[ListOf[Count] | None, Requires(Capability.CLUSTER, ((0,), ()))] = None
    """Global device number of each process; an empty list uses the CPU. null: all devices for `actor` and `rollout`,
    those of the actor for other components."""
    devices_per_worker: Annotated[PositiveInt, REQUIRES_CLUSTER] = 1
    """Devices of one process."""
    processes_per_device: Annotated[PositiveInt, REQUIRES_CLUSTER] = 1
    """Processes that share one device."""
    group: Annotated[str | None, REQUIRES_CLUSTER] = None
    """Name of the worker group; null uses the name of the component."""
    channel: ChannelConfig = ChannelConfig()
    """Queue for its results."""


class PlacementConfig(Section):
    """Devices of each component."""

    nodes: Annotated[PositiveInt, REQUIRES_CLUSTER] = 1
    """Number of nodes."""
    devices_per_node: Annotated[PositiveInt, REQUIRES_CLUSTER] = 1
    """Devices per node."""
    visible_devices: Annotated[ListOf[Count] | None, Requires(Capability.CLUSTER, ((0,),))] = None
    """Devices of a node that the run may use; null uses all."""
    colocated: Annotated[bool, REQUIRES_CLUSTER] = True
    """Engines take turns with the learners on shared devices. false: they may compute at the same time, and engines
    without `devices` get those that the actor does not use."""
    weight_transfer: Literal["auto", "shared_memory", "process_group", "tcp"] = "auto"
    """How weights reach engines on devices without the actor: shared memory of one node, broadcasts over a process
    group (NCCL between GPUs, gloo between CPUs), or the connection over which the controller calls each engine. `auto`
    chooses shared memory on the node of the controller and a process group on others."""
    join_timeout_seconds: Annotated[PositiveInt, REQUIRES_CLUSTER] = 300
    """Time that a worker waits for the others at the start, seconds."""
    offload_envs: Annotated[bool, Requires(Capability.EMBODIED)] = False
    """Offload simulators from their device during updates of the policy."""
    actor: ComponentConfig = ComponentConfig()
    """Learner of the policy."""
    rollout: ComponentConfig = ComponentConfig()
    """Generation engines."""
    critic: ComponentConfig = ComponentConfig()
    """Learner of the critic."""
    reference: ComponentConfig = ComponentConfig()
    """Reference policy."""
    reward: ComponentConfig = ComponentConfig()
    """Reward model."""
    envs: ComponentConfig = ComponentConfig()
    """Environments and simulators."""
