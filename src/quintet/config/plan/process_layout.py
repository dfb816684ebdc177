"""Processes of a run, and the components that run in each: one per device, or several engines or env hosts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat

from quintet.config.native.experiment import Experiment
from quintet.config.plan.placement import LOGPROBS, RESTARTABLE, SECTION_TITLES, Placement, place_components
from quintet.config.torchrun import describe_rank

STANDALONE_LEARNERS = (LOGPROBS, "reference", "critic", "reward")
"""Components besides engines that may have devices without the actor."""


@dataclass(frozen=True, slots=True)
class StandaloneLearners:
    """Components besides engines with the same devices, which the actor does not use."""

    components: tuple[str, ...]
    ranks: tuple[int, ...]
    name: str
    """Name in messages."""

    def shard_writer(self, rank: int) -> str:
        """Return the name of a rank that writes shards of a checkpoint, for example `2 (critic and reference)`."""
        return f"{rank} ({self.name})"


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """Device of a rank on its node."""

    number: int
    """Its number among all devices of the node."""
    index: int
    """Its number among those that processes use."""
    num_used: int
    """Maximum number of devices that the processes of one node use."""


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    """Device and components of each rank. Rank 0 is the controller and has a device of the actor."""

    devices: tuple[int, ...]
    """Global device number of each rank."""
    devices_per_node: int
    num_nodes: int
    learner_ranks: tuple[int, ...]
    """Ranks of the actor and of all components on its devices."""
    engine_ranks: frozenset[int]
    """Ranks whose devices engines use."""
    standalone: Mapping[str, tuple[int, ...]]
    """Ranks of each component that has devices without the actor, by name."""
    titles: Mapping[str, str]
    """Name of each component in messages: that of its worker group, if it has one."""
    rank_components: tuple[tuple[str, ...], ...]
    """Components of each rank, by name."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.devices)

    @property
    def per_node(self) -> int:
        """Number of processes of a node."""
        return self.size // self.num_nodes

    @property
    def standalone_ranks(self) -> tuple[int, ...]:
        """Ranks without the actor that have a component."""
        return tuple(sorted({rank for ranks in self.standalone.values() for rank in ranks}))

    @property
    def restartable_ranks(self) -> frozenset[int]:
        """Ranks whose process can be started again while the others continue: those that only have an
        engine or host environments."""
        learners = {rank for name, ranks in self.standalone.items() if name not in RESTARTABLE for rank in ranks}
        return frozenset(self.standalone_ranks) - learners

    @property
    def standalone_learners(self) -> tuple[StandaloneLearners, ...]:
        """Components besides engines that have devices without the actor, by these devices."""
        components: dict[tuple[int, ...], tuple[str, ...]] = {}
        for name in STANDALONE_LEARNERS:
            if ranks := self.standalone.get(name):
                components[ranks] = (*components.get(ranks, ()), name)
        return tuple(StandaloneLearners(names, ranks, self._joined(names)) for ranks, names in components.items())

    def standalone_learners_of(self, rank: int) -> StandaloneLearners | None:
        """Return those that a rank has."""
        return next((learners for learners in self.standalone_learners if rank in learners.ranks), None)

    def _joined(self, names: Iterable[str]) -> str:
        return " and ".join(self.titles[name] for name in names)

    def components_of(self, rank: int) -> str:
        """Return the names of a rank's components for messages; empty if all ranks have the same and none has a name
        of its own."""
        is_named = any(title != SECTION_TITLES.get(name, name) for name, title in self.titles.items())
        is_different = len(set(self.rank_components)) > 1
        return self._joined(self.rank_components[rank]) if is_named or is_different else ""

    def describe_rank(self, rank: int) -> str:
        """Return the name of a rank in messages and records, for example `rank 2 (critic and reference)`."""
        return describe_rank(rank, self.components_of(rank))

    @property
    def cpu_ranks(self) -> frozenset[int]:
        """Ranks that need no GPU: those that only host environments, or have nothing to do."""
        others = {rank for name, ranks in self.standalone.items() if name != "envs" for rank in ranks}
        return frozenset(range(self.size)).difference(self.learner_ranks, others)

    @property
    def used_devices_per_node(self) -> int:
        """Maximum number of devices that the processes of one node use."""
        return max(len(set(self._devices_of_node(rank))) for rank in range(0, self.size, self.per_node))

    def local_device(self, rank: int) -> LocalDevice:
        """Return the rank's device on its node."""
        used = list(dict.fromkeys(self._devices_of_node(rank)))
        device = self.devices[rank]
        return LocalDevice(device % self.devices_per_node, used.index(device), self.used_devices_per_node)

    def _devices_of_node(self, rank: int) -> Sequence[int]:
        first = rank - rank % self.per_node
        return self.devices[first : first + self.per_node]

    def has_engine(self, rank: int) -> bool:
        """Return whether an engine may use the rank's device."""
        return rank in self.engine_ranks

    def has_standalone(self, component: str) -> bool:
        """Return whether a component has devices that the actor does not use."""
        return bool(self.standalone.get(component))


def process_layout(config: Experiment) -> ProcessLayout:
    """Return the processes of a run. Devices that no component uses have no process, unless the nodes would then have
    different numbers of processes."""
    placement = place_components(config)
    return _layout(placement, _devices_with_process(config, placement))


@lru_cache(maxsize=8)
def _layout(placement: Placement, devices_with_process: range) -> ProcessLayout:
    """Return the processes of a placement. The checks of a run ask for them a dozen times."""
    actor = placement.of("actor")
    actor_devices = frozenset(actor.devices if actor else ())
    nodes = _devices_by_node(placement, actor_devices, devices_with_process)
    devices = tuple(device for node in nodes for device in node)
    learner_ranks = _first_ranks(devices, tuple(actor_devices))
    standalone = {
        component.name: _first_ranks(devices, [each for each in component.processes if each not in actor_devices])
        for component in placement.components
    }
    rollout = placement.of("rollout")
    engine_devices = frozenset(rollout.devices if rollout else ())
    all_devices = devices or (0,)
    colocated_engines = frozenset(rank for rank in learner_ranks if devices[rank] in engine_devices)
    return ProcessLayout(
        all_devices,
        placement.devices_per_node,
        max(1, len(nodes)),
        learner_ranks or (0,),
        colocated_engines.union(standalone.get("rollout", ())),
        {name: ranks for name, ranks in standalone.items() if ranks},
        {component.name: component.title for component in placement.components},
        _components_of_ranks(all_devices, learner_ranks or (0,), standalone, placement),
    )


def _components_of_ranks(
    devices: Sequence[int], learner_ranks: Sequence[int], standalone: Mapping[str, Sequence[int]], placement: Placement
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the components in each rank: with a learner, all those on its device, or on the CPU."""
    by_device = {each.name: frozenset(each.devices) for each in placement.components}
    by_rank = {name: frozenset(ranks) for name, ranks in standalone.items()}
    with_learner = frozenset(learner_ranks)
    return tuple(
        tuple(name for name, used in by_device.items() if device in used or not used)
        if rank in with_learner
        else tuple(name for name, ranks in by_rank.items() if rank in ranks)
        for rank, device in enumerate(devices)
    )


def _devices_with_process(config: Experiment, placement: Placement) -> range:
    """Return the devices that may have a process: not the additional ones of an engine in a single process."""
    count = config.placement.nodes * config.placement.devices_per_node
    return placement.devices if config.sft_only else placement.devices[:count]


def _first_ranks(devices: Sequence[int], processes: Sequence[int]) -> tuple[int, ...]:
    """Return the first ranks on each of the devices in `processes`, as many as it contains the device."""
    left = Counter(processes)
    ranks = []
    for rank, device in enumerate(devices):
        if left[device]:
            left[device] -= 1
            ranks.append(rank)
    return tuple(ranks)


def _devices_by_node(
    placement: Placement, actor_devices: frozenset[int], devices: Sequence[int]
) -> list[Sequence[int]]:
    """Return the device of each process by node; nodes and devices of the actor come first, so that rank 0 has one."""
    used = {device for component in placement.components for device in component.devices}
    nodes: dict[int, list[int]] = {}
    counts = [Counter(component.processes) for component in placement.components]
    for device in sorted(used.intersection(devices)):
        count = max(each[device] for each in counts)
        node = nodes.setdefault(device // placement.devices_per_node, [])
        node += [device] * (1 if device in actor_devices else count)
    max_processes = max(map(len, nodes.values()), default=0)
    for number, node in nodes.items():
        all_devices = range(number * placement.devices_per_node, (number + 1) * placement.devices_per_node)
        idle = sorted(set(all_devices).difference(node))
        node += islice(chain(idle, repeat(node[-1])), max_processes - len(node))
    actor_first = [sorted(each, key=lambda device: (device not in actor_devices, device)) for each in nodes.values()]
    return sorted(actor_first, key=lambda each: each[0] not in actor_devices)
