"""Devices of each component."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.section import Count, ListOf, Section

REQUIRES_PROCESSES = Requires(Capability.PROCESSES)


class ChannelConfig(Section):
    """Queue through which a component passes on its results."""

    default_name: ClassVar[tuple[str, str]] = ("", "")
    """Component, and its results."""
    name: str | None = None
    """First part of its name in metrics; null uses that of the component, `rollout` or `envs`."""
    queue: str | None = None
    """Second part of its name in metrics; null uses what it holds: `groups`, `actions` or `observations`."""
    size: Count = 0
    """Maximum number of items; 0 sets no limit."""

    @property
    def full_name(self) -> str:
        """Name in metrics."""
        component, results = self.default_name
        return f"{self.name or component}/{self.queue or results}"

    @property
    def is_default(self) -> bool:
        """Whether it has neither a name nor a limit."""
        return (self.name, self.queue, self.size) == (None, None, 0)


class GroupChannelConfig(ChannelConfig):
    """Queue for complete groups that wait for the learner."""

    default_name: ClassVar[tuple[str, str]] = ("rollout", "groups")
    size: Count = 0
    """Maximum number of complete groups in the queue; the engines wait while it is full. 0 sets no limit beyond
    `rollout.async_ratio`. In a synchronous rollout the learner takes each group at once."""


class ActionChannelConfig(ChannelConfig):
    """Queue for the actions of responses that wait for their environment."""

    default_name: ClassVar[tuple[str, str]] = ("rollout", "actions")
    size: Count = 0
    """Maximum number of responses in the queue; the engines wait while it is full. 0 sets no limit."""


class ObservationChannelConfig(ChannelConfig):
    """Queue for observations that wait for an engine."""

    default_name: ClassVar[tuple[str, str]] = ("envs", "observations")
    size: Count = 0
    """Maximum number of observations in the queue; no further environment starts or is stepped while it is full. 0 sets
    no limit."""


class ComponentConfig(Section):
    """Devices and processes of one component."""

    devices: Annotated[ListOf[Count] | None, Requires(Capability.PROCESSES, ((0,), ()))] = None
    """Global device number of each process; `rollout` and `envs` may repeat numbers. An empty list uses the CPU. null:
    all devices for `actor` and `rollout` but those that only `envs` names, those of the actor for other components."""
    group: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")] | None = None
    """Name of its worker group in `quintet plan`, `quintet status` and messages about ranks; null uses the name of the
    component."""


class RolloutComponentConfig(ComponentConfig):
    """Devices and processes of the engines."""

    devices_per_worker: Annotated[PositiveInt, REQUIRES_PROCESSES] = 1
    """Devices of one engine: 1, or the product of its tensor and pipeline parallel sizes."""
    processes_per_device: PositiveInt = 1
    """Engines on each device that the actor does not use. Each takes `rollout.engine_options.memory_share` of it."""
    channel: GroupChannelConfig = GroupChannelConfig()
    """Queue for complete groups; with `rollout.async_ratio` it needs engines on devices of their own."""
    action_channel: ActionChannelConfig = ActionChannelConfig()
    """Queue for actions, in runs with environments."""


class EnvsComponentConfig(ComponentConfig):
    """Devices and processes of the environments."""

    processes_per_device: PositiveInt = 1
    """Processes that host environments on each device that the actor does not use."""
    channel: ObservationChannelConfig = ObservationChannelConfig()
    """Queue for observations, in runs with environments."""


class PlacementConfig(Section):
    """Devices of each component."""

    nodes: Annotated[PositiveInt, REQUIRES_PROCESSES] = 1
    """Number of nodes."""
    devices_per_node: Annotated[PositiveInt, REQUIRES_PROCESSES] = 1
    """Devices per node."""
    visible_devices: ListOf[Count] | None = None
    """GPUs of a node that the run may use, as in `CUDA_VISIBLE_DEVICES`, in the order of the devices; null uses all."""
    colocated: Annotated[bool, REQUIRES_PROCESSES] = True
    """Engines take turns with the learners on shared devices. false: they may compute at the same time, and engines
    without `devices` get those that the actor does not use."""
    weight_transfer: Literal["auto", "shared_memory", "process_group", "tcp"] = "auto"
    """How weights reach engines on devices without the actor: shared memory of one node, broadcasts over a process
    group (NCCL between GPUs with one engine each, otherwise gloo), or the connection over which the controller calls
    each engine. `auto` chooses shared memory on the node of the controller and a process group on others."""
    join_timeout_seconds: PositiveInt = 300
    """Time that a worker waits for the others at the start, and a run for one of its engines if all have died,
    seconds."""
    lost_after_seconds: PositiveFloat = 8.0
    """Time after which a node that does not answer, or a process that is stopped or sends no sign of life, is lost,
    seconds. Work of any length is no reason: the sign of life comes from a thread of its own."""
    call_timeout_seconds: PositiveFloat = 1800.0
    """Time for a collective of the learners, for a call of an engine on a device of its own, for the other ranks' part
    of a checkpoint, and for the start of a judge's server, seconds. A process that takes longer hangs: engines are
    restarted, otherwise the run ends."""
    offload_envs: bool = False
    """Offload simulators from their device during updates of the policy."""
    actor: ComponentConfig = ComponentConfig()
    """Learner of the policy."""
    rollout: RolloutComponentConfig = RolloutComponentConfig()
    """Generation engines."""
    critic: ComponentConfig = ComponentConfig()
    """Learner of the critic."""
    reference: ComponentConfig = ComponentConfig()
    """Reference policy."""
    logprobs: ComponentConfig = ComponentConfig()
    """Log-prob workers, which compute the policy's log-probs of a rollout before the updates of a step. On devices that
    the actor does not use they have a copy of the policy, with the settings of `actor`; otherwise the actor computes
    them."""
    reward: ComponentConfig = ComponentConfig()
    """Reward model."""
    envs: EnvsComponentConfig = EnvsComponentConfig()
    """Environments and simulators. On devices that the actor does not use, each process hosts environments; otherwise
    they run in the process of the controller."""
