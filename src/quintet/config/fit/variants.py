"""Variants of learners and engines that `proposals.py` combines: sizes, budgets and offloads, with memory and time."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product

from quintet.config.checks.backends import backend_problems
from quintet.config.checks.sharding import sharding_problems
from quintet.config.composed import ComposedConfig, with_values
from quintet.config.divisors import divisors
from quintet.config.fit.overrides import Changes, assignment
from quintet.config.native.experiment import Experiment
from quintet.config.plan.advice import TIGHT_FIT
from quintet.config.plan.batches import max_sequence_tokens, rank_workload
from quintet.config.plan.component_memory import MemoryUse, idle_memory
from quintet.config.plan.devices import DeviceFigures
from quintet.config.plan.memory import MemoryPlan, is_supported, learner_memory, plan_memory
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Devices, Placement, place_components, placement_problems
from quintet.config.plan.step_time import Seconds, engine_seconds, learner_seconds, offload_seconds
from quintet.config.problems import ConfigProblem

Progress = Callable[[int], None]
Need = tuple[int, int]
"""Bytes on a device while the fullest of several components computes, and while others do."""
BUDGETS = (4096, 8192, 16384, 32768, 65536)
"""Tokens of a micro-batch that are tried, besides those of one sequence and of the configuration."""
OFFLOADS = ("optimizer", "parameters")
"""What trained models offload, in this order."""
MEMORY_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of an engine that are tried if the configuration sets one."""
ENGINE = "rollout.engine_options"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices to fit a run into."""

    nodes: int
    devices_per_node: int
    device_bytes: int
    figures: DeviceFigures

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def usable_bytes(self) -> int:
        """Memory without the share for CUDA, communication and fragmentation, which are not estimated."""
        return int(TIGHT_FIT * self.device_bytes)

    def changes(self, composed: ComposedConfig) -> Changes:
        """Return the settings with which a run has these devices; if fewer are visible than a node has, all become
        so."""
        sizes = {"placement.nodes": self.nodes, "placement.devices_per_node": self.devices_per_node}
        visible = composed.experiment.placement.visible_devices
        if visible is None or len(visible) >= self.devices_per_node:
            return sizes
        return {**sizes, "placement.visible_devices": tuple(range(self.devices_per_node))}


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of the learners or of the engines, with their memory and time."""

    changes: Changes
    active: Mapping[str, MemoryUse]
    """Each component while it computes."""
    waiting: Mapping[str, MemoryUse]
    """Each component while another one computes."""
    seconds: float
    needs: tuple[Need, ...]
    """For each group of devices."""
    changed_sizes: int = 0
    """How many of the changes are parallel sizes."""

    @property
    def costs(self) -> tuple[float, ...]:
        """Time, changes and memory; a variant with the same parallel sizes and no higher cost is better."""
        return (self.seconds, len(self.changes), *chain(*self.needs))


def undominated(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants that no other one beats or equals in all costs."""
    front: list[tuple[tuple[float, ...], Variant]] = []
    costs = [(variant.costs, variant) for variant in variants]
    for cost, variant in sorted(costs, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in front):
            front.append((cost, variant))
    return [variant for _, variant in front]


@dataclass
class VariantSearch:
    """The variants of a configuration on a cluster, and why others were rejected."""

    user: ComposedConfig
    """The configuration of the user."""
    base: ComposedConfig
    """The same on all devices of the cluster."""
    cluster: Cluster
    models: Models
    learners: tuple[str, ...]
    """Learners whose settings vary."""
    progress: Progress = lambda _: None
    """Called with the number of parallel sizes that were considered."""
    placement: Placement = field(init=False)
    """The components of `base`, on devices that no variant changes."""
    groups: Mapping[tuple[str, ...], Devices] = field(init=False)
    """The devices for each set of components that share them."""
    rejected: Counter[str] = field(default_factory=Counter)
    problems: list[ConfigProblem] = field(default_factory=list)
    """Problems of rejected parallel sizes."""
    _settable: dict[str, bool] = field(default_factory=dict)
    _user_values: dict[str, object] = field(default_factory=dict)
    """Values of the user by key, since each is compared thousands of times."""

    def __post_init__(self) -> None:
        self.placement = place_components(self.base.experiment)
        self.groups = self.placement.groups()

    def differing(self, changes: Changes) -> Changes:
        """Return the changes that differ from the configuration of the user."""
        return {key: value for key, value in changes.items() if self._user_value(key) != value}

    def _user_value(self, key: str) -> object:
        if key not in self._user_values:
            self._user_values[key] = self.user.value(key)
        return self._user_values[key]

    def layouts(self) -> Iterator[Changes]:
        """Yield the parallel sizes and sharding groups of the learners that pass all checks of a plan."""
        for number, degrees in enumerate(self._degrees()):
            self.progress(number)
            sizes = {f"{name}.parallel.{key}": size for name in self.learners for key, size in degrees.items()}
            for group in self._groups(degrees):
                layout = sizes | {f"{name}.sharding.group_size": group for name in self.learners if group}
                if self._can_set(layout) and not self._reject(self._problems(with_values(self.base, layout))):
                    yield layout

    def _degrees(self) -> Iterator[dict[str, int]]:
        """Yield parallel sizes whose product divides the devices; sequences are split one way or the other, or experts
        are distributed."""
        devices, shape = self.cluster.devices, self.models.of("actor")
        names, sizes = ("context", "ulysses", "expert"), divisors(devices)[1:]
        splits = [(1, 1, 1), *((size, 1, 1) for size in sizes)]
        if not self._on_megatron:
            splits += [(1, size, 1) for size in sizes]
        if shape and shape.experts:
            splits += [(1, 1, size) for size in divisors(math.gcd(devices, shape.experts.count))[1:]]
        stages = (size for size in divisors(devices) if shape is None or size <= shape.layers)
        for tensor, pipeline, split in product(divisors(self.cluster.devices_per_node), stages, splits):
            if devices % (tensor * pipeline * math.prod(split)) == 0:
                degrees = {"tensor": tensor, "pipeline": pipeline, **dict(zip(names, split, strict=True))}
                # an interleaved schedule needs stages
                yield degrees | ({"virtual_pipeline": 1} if pipeline == 1 else {})

    def _groups(self, degrees: Mapping[str, int]) -> Iterator[int | None]:
        """Yield sharding groups that span whole nodes: smaller ones hold more and are no faster."""
        yield None
        weights, sequence = degrees["tensor"] * degrees["pipeline"], degrees["context"] * degrees["ulysses"]
        for nodes in () if self._on_megatron else divisors(self.cluster.nodes)[:-1]:
            group, rest = divmod(nodes * self.cluster.devices_per_node, weights)
            if group > 1 and rest == 0 == group % sequence:
                yield group

    @cached_property
    def _offloading(self) -> list[tuple[Changes, Experiment]]:
        """Changes that offload, each with the configuration that has it alone: parallel sizes and budgets do not change
        what an offload takes and gives back."""
        return [(offload, with_values(self.base, offload).experiment) for offload in self._offloads()]

    @property
    def _on_megatron(self) -> bool:
        return self.base.experiment.actor.backend == "megatron"

    def engine_sizes(self) -> Iterator[Changes]:
        """Yield the tensor-parallel sizes of an engine that pass all checks; the `hf` engine has one device."""
        key, config = f"{ENGINE}.tensor_parallel", self.base.experiment
        fixed = config.rollout.engine == "hf" or config.placement.rollout.devices_per_worker > 1
        for size in (self.base.value(key),) if fixed else divisors(self.cluster.devices_per_node):
            changed = with_values(self.base, {key: size})
            problems = placement_problems(changed, place_components(changed.experiment), self.models)
            of_engine = (problem for problem in problems if problem.key.startswith(("rollout.", "placement.rollout.")))
            if self._can_set({key: size}) and not self._reject(of_engine):
                yield {key: size}

    def learner_variants(self, layout: Changes) -> Iterator[Variant]:
        """Yield budgets, gradient checkpointing, reductions and offloads of learners with these parallel sizes, those
        that make no difference to memory once."""
        different = []
        placed = with_values(self.base, layout)
        placement = place_components(placed.experiment)
        for budget, switches in product(self._budgets(layout), self._learner_switches()):
            changes = {**layout, **budget, **switches}
            config = self._changed(placed, {**budget, **switches}).experiment
            active = learner_memory(config, placement, self.models)
            if active in different:
                continue
            different.append(active)
            seconds = learner_seconds(config, placement, self.models, self.cluster.figures)
            for offload, offloading in self._offloading:
                idle = {name: idle_memory(offloading, name, use) for name, use in active.items()}
                yield self._variant({**changes, **offload}, offloading, MemoryPlan(active, idle, ()), seconds)

    def engine_variants(self, size: Changes) -> Iterator[Variant]:
        """Yield limits, sleep and offload of engines with this tensor-parallel size."""
        for limit, sleep, offload in product(self._engine_limits(), (False, True), (False, True)):
            switches = {f"{ENGINE}.sleep_between_steps": sleep, f"{ENGINE}.offload": offload}
            changes = {**size, **limit, **switches}
            if not self._can_switch(switches) or not self._can_set(limit):
                continue
            config = with_values(self.base, changes).experiment
            placement = place_components(config)
            memory = plan_memory(config, placement, self.models, self.cluster.device_bytes)
            seconds = engine_seconds(config, placement, self.models, memory, self.cluster.figures)
            active, idle = (
                {name: use for name, use in uses.items() if name == "rollout"} for uses in (memory.active, memory.idle)
            )
            yield self._variant(changes, config, MemoryPlan(active, idle, ()), seconds)

    def _variant(self, changes: Changes, config: Experiment, memory: MemoryPlan, seconds: Seconds) -> Variant:
        active, waiting = memory.active, memory.idle if self.placement.colocated else memory.active
        needs: list[Need] = []
        for names in self.groups:
            present = [name for name in names if name in active]
            idle = sum(waiting[name].total for name in present)
            extra = max((active[name].total - waiting[name].total for name in present), default=0)
            needs.append((idle + extra, idle))
        total = sum(seconds.values()) + sum(offload_seconds(config, memory, self.cluster.figures).values())
        differing = self.differing(changes)
        sizes = sum("parallel" in key or key.endswith("group_size") for key in differing)
        return Variant(differing, active, waiting, total, tuple(needs), sizes)

    def _changed(self, composed: ComposedConfig, changes: Changes) -> ComposedConfig:
        return with_values(composed, {key: value for key, value in changes.items() if composed.value(key) != value})

    @property
    def _trained(self) -> list[str]:
        return [name for name in self.learners if name != "reference"]

    def _can_set(self, changes: Changes, followers: tuple[str, ...] = ("critic", "reference")) -> bool:
        """Return whether the format of the user has keys for these settings, except those of `followers`, for which
        other frameworks often use the sizes of the actor."""
        needed = [change for change in self.differing(changes).items() if change[0].partition(".")[0] not in followers]
        return all(self._is_settable(assignment(*change)) for change in needed)

    def _is_settable(self, word: str) -> bool:
        if word not in self._settable:
            self._settable[word] = self.user.translate_hint(word) is not None
        return self._settable[word]

    def _can_switch(self, switches: Mapping[str, bool]) -> bool:
        supported = (not on or is_supported(self.base.experiment, key) for key, on in switches.items())
        return all(supported) and self._can_set(switches, followers=())

    def _problems(self, composed: ComposedConfig) -> Iterator[ConfigProblem]:
        """Yield the problems of parallel sizes; a plan lists those of other keys, with any sizes."""
        yield from placement_problems(composed, place_components(composed.experiment), self.models)
        for problem in (*backend_problems(composed), *sharding_problems(composed)):
            if {"parallel", "sharding"} & set(problem.key.split(".")):
                yield problem

    def _reject(self, problems: Iterator[ConfigProblem]) -> bool:
        """Return whether there is a problem, and count the first one."""
        problem = next(problems, None)
        if problem is not None:
            self.rejected[f"{problem.key}: {problem.message.rpartition('): ')[2]}"] += 1
            self.problems.append(problem)
        return problem is not None

    def _budgets(self, layout: Changes) -> Iterator[Changes]:
        """Yield the budget of the configuration, and others for all learners, up to the tokens of a rank. Numbers of
        sequences divide those of a rank, which other frameworks demand."""
        config = with_values(self.base, layout).experiment
        placement, length = place_components(config), max_sequence_tokens(config)
        components = filter(None, map(placement.of, self.learners))
        works = [
            rank_workload(config, component.name, component.copies, inference=inference)
            for component in components
            for inference in (False, True)
            if inference or component.name != "reference"
        ]
        largest = max(work.sequences_per_rank for work in works) * length
        yield {}
        for size in (length, *(size for size in BUDGETS if length < size < 2 * largest)):
            budget = {
                work.budget.key: size if work.budget.tokens else _divisor(work.sequences_per_rank, size // length)
                for work in works
            }
            if self.differing(budget) and self._can_set(budget):
                yield budget

    def _learner_switches(self) -> Iterator[Mapping[str, bool]]:
        """Yield whether layers are recomputed, and whether gradients are reduced after each micro-batch."""
        keys = [f"{name}.gradient_checkpointing" for name in self._trained]
        keys = [key for key in keys if self.base.value(key) is not None]
        for recompute, sync in product((False, True), (False, True)):
            reductions = {f"{name}.sharding.sync_every_micro_batch": sync for name in self._trained}
            switches = dict.fromkeys(keys, recompute) | reductions
            if self._can_switch(switches):
                yield switches

    def _offloads(self) -> Iterator[Mapping[str, bool]]:
        """Yield what is offloaded: nothing, the optimizer, or weights, too; the weights of the reference by itself."""
        reference = "reference" in self.learners
        for level, offload_reference in product(range(len(OFFLOADS) + 1), (False, True) if reference else (None,)):
            parts = {
                f"{name}.memory.offload_{part}": index < level
                for name in self._trained
                for index, part in enumerate(OFFLOADS)
            }
            if offload_reference is not None:
                parts["reference.memory.offload_parameters"] = offload_reference
            if self._can_switch(parts):
                yield parts

    def _engine_limits(self) -> list[Changes]:
        """Return memory shares if the configuration sets one, otherwise numbers of concurrent requests."""
        share, concurrent = self.base.value(f"{ENGINE}.memory_share"), self.base.experiment.rollout.max_concurrent
        if share is not None:
            return [{f"{ENGINE}.memory_share": value} for value in dict.fromkeys((share, *MEMORY_SHARES))]
        return [{"rollout.max_concurrent": concurrent >> halved} for halved in range(5) if concurrent >> halved]


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is not above the limit."""
    return max(divisor for divisor in divisors(number) if divisor <= max(1, limit))
