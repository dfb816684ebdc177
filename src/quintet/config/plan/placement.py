"""Devices of each component of a run, and checks of that placement."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from quintet.config.composed import ComposedConfig
from quintet.config.divisors import divisors, nearest_number
from quintet.config.native.experiment import Experiment
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.models import Models, find_models
from quintet.config.plan.parallelism import Parallelism, learner_parallelism, nearest_size, parallelism_problems
from quintet.config.problems import ConfigProblem, raise_problems

LEARNERS = ("actor", "reference", "critic")
RESTARTABLE = frozenset({"rollout", "envs"})
"""Components that lose nothing that another process does not have, and may have several processes per device."""
LOGPROBS = "logprobs"
"""Log-prob workers; they are a component if they have devices of their own."""
LOGPROBS_DEVICES = f"placement.{LOGPROBS}.devices"
SECTION_TITLES = {
    "rollout": "engines",
    "reward": "reward model",
    "envs": "environments",
    LOGPROBS: "log-prob workers",
}
"""Names of components in messages and tables where they differ from their section."""
STARTED = "several devices are started by torchrun, see docs/ranks.md"
MAX_DEVICES = 1 << 16
"""More devices are taken for a mistake."""


Devices = tuple[int, ...] | range
"""Global device numbers, ascending. A range if they are consecutive, so that thousands cost as much as one."""


def as_devices(numbers: Sequence[int]) -> Devices:
    """Return ascending numbers as a range if they are consecutive, otherwise as a tuple.

    >>> as_devices((2, 3, 4)), as_devices([1, 3]), as_devices(())
    (range(2, 5), (1, 3), ())
    """
    if not numbers:
        return ()
    if isinstance(numbers, range):
        return numbers
    is_consecutive = numbers[-1] - numbers[0] == len(numbers) - 1 and len(set(numbers)) == len(numbers)
    return range(numbers[0], numbers[-1] + 1) if is_consecutive else tuple(numbers)


def are_within(devices: Devices, others: Devices) -> bool:
    """Return whether all devices are among others."""
    if isinstance(devices, range) and isinstance(others, range):
        return others.start <= devices.start and devices.stop <= others.stop
    return devices == others or set(devices) <= set(others)


def share_devices(devices: Devices, others: Devices) -> bool:
    """Return whether some devices are among others."""
    if isinstance(devices, range) and isinstance(others, range):
        return max(devices.start, others.start) < min(devices.stop, others.stop)
    return not set(devices).isdisjoint(others)


@dataclass(frozen=True, slots=True)
class Component:
    """A component of the run and its devices."""

    name: str
    """Name of its section of `placement`."""
    devices: Devices
    """Empty for the CPU."""
    parallelism: Parallelism
    processes: Devices
    """Global device number of each process, ascending; empty for the CPU."""
    group: str | None = None
    """Name of its worker group, `placement.<component>.group`."""

    @property
    def title(self) -> str:
        """Name in messages and tables."""
        return self.group or SECTION_TITLES.get(self.name, self.name)

    @property
    def num_processes(self) -> int:
        """Number of processes; one on the CPU."""
        return max(1, len(self.processes))

    @property
    def processes_per_device(self) -> int:
        """Maximum number of processes of a device; 0 for the CPU."""
        if isinstance(self.processes, range):
            return 1
        return max(Counter(self.processes).values(), default=0)

    @property
    def copies(self) -> int:
        """Number of data-parallel ranks of a learner, or of engines."""
        return max(1, len(self.processes) // self.parallelism.devices_per_copy)


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of all components."""

    nodes: int
    devices_per_node: int
    colocated: bool
    """Whether components on the same devices take turns."""
    components: tuple[Component, ...]

    @property
    def devices(self) -> range:
        return range(min(self.nodes * self.devices_per_node, MAX_DEVICES))

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices that no component uses."""
        used = {device for component in self.components for device in component.devices}
        return tuple(device for device in self.devices if device not in used)

    def of(self, name: str) -> Component | None:
        """Return a component, None if the run does not have it."""
        return next((component for component in self.components if component.name == name), None)

    def is_standalone(self, name: str) -> bool:
        """Return whether a component has devices that the actor does not use."""
        component, actor = self.of(name), self.of("actor")
        return component is not None and not are_within(component.devices, actor.devices if actor else ())

    def by_node(self, component: Component) -> dict[int, tuple[int, ...]]:
        """Return the devices of a component by node."""
        nodes = groupby(component.devices, key=lambda device: device // self.devices_per_node)
        return {node: tuple(devices) for node, devices in nodes}

    def groups(self) -> dict[tuple[str, ...], Devices]:
        """Return the devices for each set of components that share them."""
        placed = [component for component in self.components if component.devices]
        if all(component.devices == placed[0].devices for component in placed):
            return {tuple(component.name for component in placed): placed[0].devices} if placed else {}
        holders: dict[int, list[str]] = defaultdict(list)
        for component in self.components:
            for device in component.devices:
                holders[device].append(component.name)
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for device in sorted(holders):
            groups[tuple(holders[device])].append(device)
        return {names: as_devices(devices) for names, devices in groups.items()}


def learner_section(component: str) -> str:
    """Return the section with the settings of a learner; log-prob workers have those of the actor."""
    return "actor" if component == LOGPROBS else component


def has_log_prob_workers(config: Experiment) -> bool:
    """Return whether log-prob workers compute the log-probs of a rollout, and not the actor."""
    devices = config.placement.logprobs.devices
    return config.scores_rollout and bool(devices) and set(devices or ()) != set(_devices(config, "actor"))


def actor_scores_rollout(config: Experiment) -> bool:
    """Return whether the actor computes log-probs of a rollout before the updates of a step."""
    return config.scores_rollout and not has_log_prob_workers(config)


def place_components(config: Experiment) -> Placement:
    """Assign devices to every component, valid or not."""
    placement = config.placement
    components = tuple(
        Component(
            name,
            as_devices(devices),
            _parallelism(config, name),
            _processes(config, name, devices),
            getattr(placement, name).group,
        )
        for name in _components(config)
        for devices in [_devices(config, name)]
    )
    # fine-tuning without reinforcement learning has its own key for devices
    tuned = 0 if config.sft_only is None else -(-config.sft_devices // placement.nodes)
    per_node = max(placement.devices_per_node, _engine_devices(config), tuned)
    return Placement(placement.nodes, per_node, placement.colocated, components)


def _components(config: Experiment) -> list[str]:
    """Return the names of the components that need devices; text envs need none."""
    if config.evaluation is not None:
        return []
    if config.sft_only is not None:
        return ["actor", "reference"] if config.sft_only.distillation else ["actor"]
    if config.generation is not None:
        return ["actor", "rollout"]
    needed = {
        "actor": True,
        "rollout": True,
        LOGPROBS: has_log_prob_workers(config),
        "reference": config.needs_reference,
        "critic": config.needs_critic and not config.critic.shares_policy,
        "reward": config.reward is not None and config.reward.model is not None,
        "envs": config.env.is_simulator or config.placement.envs.devices is not None or _names_envs(config),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def _names_envs(config: Experiment) -> bool:
    """Return whether the environments in the process of the controller have a name."""
    return config.placement.envs.group is not None and not config.env.reads_prompts


def _devices(config: Experiment, name: str) -> Devices:
    if config.sft_only is not None:
        return range(config.sft_devices)
    if name == "rollout" and (count := _engine_devices(config)):
        return range(count)
    placement = config.placement
    # without training, the policy is where the engines are
    is_beside_engines = config.generation is not None
    devices = getattr(placement, "rollout" if is_beside_engines else name).devices
    if devices is not None:
        return as_devices(sorted(set(devices)))
    actor = None if is_beside_engines else placement.actor.devices
    all_devices = range(min(placement.nodes * placement.devices_per_node, MAX_DEVICES))
    env_devices = frozenset(placement.envs.devices or ()).difference(actor or ())
    free: Devices = all_devices
    if env_devices:
        free = tuple(device for device in all_devices if device not in env_devices) or all_devices
    if name == "rollout":
        others = () if placement.colocated else frozenset(actor or ())
        return tuple(device for device in free if device not in others) if others else free
    devices = free if actor is None else as_devices(sorted(set(actor)))
    return devices[:1] if name == "envs" and not config.env.is_simulator else devices


def _processes(config: Experiment, name: str, devices: Sequence[int]) -> Devices:
    """Return the device of each process: as often as it is listed, times the processes per device."""
    component = getattr(config.placement, name)
    if name not in RESTARTABLE or (component.devices is None and component.processes_per_device == 1):
        return as_devices(devices)
    listed, count = Counter(component.devices or ()), component.processes_per_device
    return as_devices([device for device in devices for _ in range(max(1, listed[device]) * count)])


def _engine_devices(config: Experiment) -> int:
    """Return how many devices a tensor- or pipeline-parallel engine takes if `placement` is left at its defaults, 0 for
    any other run."""
    placement, options = config.placement, config.rollout.engine_options
    size = options.tensor_parallel * options.pipeline_parallel
    unplaced = placement.nodes == placement.devices_per_node == 1 and placement.rollout.devices is None
    return min(size, MAX_DEVICES) if unplaced and size > 1 else 0


def _parallelism(config: Experiment, name: str) -> Parallelism:
    if name in (*LEARNERS, LOGPROBS) and config.generation is None:
        learner = getattr(config, learner_section(name))
        return learner_parallelism(learner.backend, learner.parallel, learner.sharding.group_size)
    if name != "rollout":
        return Parallelism("engine")
    options, worker = config.rollout.engine_options, config.placement.rollout.devices_per_worker
    tensor, pipeline = options.tensor_parallel, options.pipeline_parallel
    return Parallelism("engine", tensor=worker if tensor * pipeline == 1 else tensor, pipeline=pipeline)


def placement_problems(composed: ComposedConfig, placement: Placement, models: Models) -> Iterator[ConfigProblem]:
    """Yield missing devices and parallel degrees that do not divide."""
    yield from _check_cluster(composed)
    yield from _check_shared(composed, placement)
    yield from _check_groups(composed, placement)
    yield from idle_log_prob_workers(composed)
    for component in placement.components:
        missing = list(_check_missing(composed, placement, component))
        yield from missing
        if missing or not component.devices:
            continue
        workers = list(_check_workers(composed)) if component.name == "rollout" else []
        yield from workers
        if component.name == LOGPROBS:
            yield from _check_log_prob_workers(composed, component)
        elif component.name in (*LEARNERS, "rollout") and not workers:
            yield from split_problems(composed, component.name, len(component.devices), models.of(component.name))


def check_placement(composed: ComposedConfig) -> None:
    """Refuse a placement that cannot work; `quintet plan` prints the same message.

    Raises:
        ConfigError: one message names every invalid key and the nearest valid values.
    """
    config = composed.experiment
    raise_problems(placement_problems(composed, place_components(config), find_models(config)))


def _check_cluster(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    placement = composed.experiment.placement
    nodes, per_node, visible = placement.nodes, placement.devices_per_node, placement.visible_devices
    if nodes * per_node > MAX_DEVICES:
        key = "placement.nodes" if nodes > per_node else "placement.devices_per_node"
        yield composed.problem(key, f"that would be {nodes * per_node:,} devices")
    if visible and len(visible) < per_node:
        key, problem = "placement.devices_per_node", composed.describe("placement.visible_devices")
        hint = f"nearest valid value: {key}={len(visible)}, or placement.visible_devices=null"
        yield composed.problem(key, f"{problem} are fewer", hint)


def _check_shared(composed: ComposedConfig, placement: Placement) -> Iterator[ConfigProblem]:
    """Yield components besides engines that share some devices with another one, and must share all or none."""
    # a simulator takes turns with the learners on any of their devices, and the controller has one of them
    in_place = composed.experiment.env.is_simulator or composed.experiment.placement.envs.devices is None
    exempt = ("rollout", "envs") if in_place else ("rollout",)
    components = [component for component in placement.components if component.name not in exempt]
    for index, component in enumerate(components):
        for other in components[:index]:
            if component.devices != other.devices and share_devices(component.devices, other.devices):
                shared = set(component.devices).intersection(other.devices)
                key, name = f"placement.{component.name}.devices", other.title
                numbers = format_ranges(sorted(shared))
                problem = f"they share {numbers} with the {name}, and must share all devices or none"
                yield composed.problem(key, problem, f"nearest valid value: {key}={list(other.devices)}")
                break


def _check_groups(composed: ComposedConfig, placement: Placement) -> Iterator[ConfigProblem]:
    """Yield names of worker groups that another component has, too: messages would not say which one is meant."""
    first: dict[str, Component] = {}
    for component in sorted(placement.components, key=lambda each: each.group is not None):
        other = first.setdefault(component.title, component)
        if other is not component:
            key, other_key = (f"placement.{each.name}.group" for each in (component, other))
            its_name = composed.describe(other_key) if other.group else f"placement.{other.name}, by default"
            yield composed.problem(key, f"another component has this name, too: {its_name}", f"{key}=null")


def _check_missing(composed: ComposedConfig, placement: Placement, component: Component) -> Iterator[ConfigProblem]:
    num_devices = len(placement.devices)
    if not component.devices or component.devices[-1] < num_devices:
        return
    key = "sft.devices" if composed.experiment.sft_only else f"placement.{component.name}.devices"
    nodes, last = component.devices[-1] // placement.devices_per_node + 1, num_devices - 1
    size = f"{placement.nodes} × {placement.devices_per_node}"
    problem = f"there are {num_devices} devices ({size}), the last is {last}"
    existing = [device for device in component.devices if device <= last] or [last]
    yield composed.problem(key, problem, f"nearest valid value: {key}={existing}, or placement.nodes={nodes}")


def _check_workers(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    key, options = "placement.rollout.devices_per_worker", composed.experiment.rollout.engine_options
    split = options.tensor_parallel * options.pipeline_parallel
    if composed.value(key) not in (1, split):
        problem = f"rollout.engine_options.tensor_parallel splits an engine over {split} devices"
        yield composed.problem(key, problem, f"nearest valid value: {key}={split}")


def idle_log_prob_workers(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield log-prob workers on devices of their own that would have nothing to compute."""
    config, recompute = composed.experiment, "rollout.recompute_logprobs"
    devices = frozenset(config.placement.logprobs.devices or ())
    if not devices or config.scores_rollout or "actor" not in _components(config):
        return
    if devices <= set(_devices(config, "actor")):
        return
    why = f"the workers would have no log-probs to compute: {composed.describe(recompute)}"
    yield composed.problem(LOGPROBS_DEVICES, why, f"{LOGPROBS_DEVICES}=null, or {recompute}=true")


def _check_log_prob_workers(composed: ComposedConfig, component: Component) -> Iterator[ConfigProblem]:
    """Yield a number of devices over which the actor's parallel sizes cannot split its model."""
    key = LOGPROBS_DEVICES
    devices = component.devices
    split = component.parallelism
    problems = [problem for _, problem in parallelism_problems(split, len(devices), None)]
    actor_devices = _devices(composed.experiment, "actor")
    if not problems or any(parallelism_problems(split, len(actor_devices), None)):
        return
    fewer = (devices[:count] for count in range(len(devices), 0, -1))
    valid = next((part for part in fewer if not any(parallelism_problems(split, len(part), None))), None)
    hint = f"{key}=null" if valid is None else f"nearest valid value: {key}={list(valid)}, or {key}=null"
    yield composed.problem(key, f"the workers split the model as the actor does, and {problems[0]}", hint)


def split_problems(
    composed: ComposedConfig, name: str, count: int, shape: ModelShape | None = None
) -> Iterator[ConfigProblem]:
    """Yield the parallel degrees of a component that cannot work on `count` devices; `shape` is None if unknown."""
    parallelism = _parallelism(composed.experiment, name)
    for part, problem in parallelism_problems(parallelism, count, shape):
        key = _key(name, part)
        size = nearest_size(parallelism, part, count, shape)
        hint = f"nearest valid value: {key}={size}" if size else None
        yield composed.problem(key, problem, f"{hint}; {STARTED}" if count == 1 and hint else hint)


def _key(component: str, part: str) -> str:
    """Return the native key of a parallel degree."""
    if component == "rollout":
        return f"rollout.engine_options.{part}_parallel"
    return f"{component}.sharding.group_size" if part == "group" else f"{component}.parallel.{part}"


def nearest_batches(groups: int, episodes: int, parts: int, ranks: int) -> str:
    """Return a hint: the nearest numbers of mini-batches and groups that give every rank equally many episodes."""
    valid = [part for part in divisors(episodes) if episodes // part % ranks == 0]
    unit = parts * ranks // math.gcd(parts * ranks, episodes // groups)
    multiples = [number for number in (groups - groups % unit, groups - groups % unit + unit) if number]
    more = " or ".join(map(str, multiples))
    fewer = f"training.mini_batches={nearest_number(parts, valid)}, or " if valid else ""
    return f"nearest valid value: {fewer}training.groups_per_step={more}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: `0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
