"""Workers of a ROLL configuration: the devices of each, how many of them share its model, and the native placement."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.roll.algorithm import needs_reference, trains_critic
from quintet.config.dialects.roll.device_mapping import parse_device_mapping
from quintet.config.dialects.roll.kinds import TABLES
from quintet.config.dialects.value_types import ValueType
from quintet.config.dotted import is_inside
from quintet.config.native.experiment import Experiment
from quintet.config.native.placement import PlacementConfig

LEARNERS = {"actor_train": "actor", "critic": "critic", "reference": "reference"}
"""Native names of ROLL's workers that run a model for training or for log-probs."""
COMPONENTS = LEARNERS | {"actor_infer": "rollout"}
"""Native names of all of ROLL's workers."""
GPUS_PER_NODE = "num_gpus_per_node"
MICRO_BATCH = "training_args.per_device_train_batch_size"
ACCUMULATION = "training_args.gradient_accumulation_steps"
STEP = ("rollout_batch_size", "num_return_sequences_in_group")
GROUP_SIZE = "train_env_manager.group_size"
STRATEGY, STRATEGY_OPTIONS = "strategy_args.strategy_name", "strategy_args.strategy_config"
_DEFAULTS = {MICRO_BATCH: 8, ACCUMULATION: 1}
"""ROLL's defaults, for the critic; its reference has only those of the policy."""
_SPLITS: Mapping[str, Sequence[str]] = TABLES["splits"]
"""Keys by which a model is split, by strategy. Expert-parallel devices train on different sequences."""
IGNORED = tuple(TABLES["ignored"])
"""Keys that other workers than policy and critic take from the policy, or do not need."""
POLICY_SPLITS = ("actor_train.model_args.ulysses_size",)
_COMMON = ("actor.parallel.", "actor.sharding.", "actor.memory.", "actor.megatron.")
_LEARNING = ("actor.optimizer.", "actor.inference_budget.", "actor.gradient_checkpointing")


@dataclass(frozen=True, slots=True)
class Worker:
    """Section of one kind of workers."""

    values: ForeignValues
    name: str
    """`actor_train`, `actor_infer`, `reference` or `critic`."""

    def key(self, name: str) -> str:
        """Return the full name of one of its keys."""
        return f"{self.name}.{name}"

    def option(self, name: str) -> str:
        """Return the full name of an option of its strategy."""
        return f"{self.name}.{STRATEGY_OPTIONS}.{name}"

    @property
    def is_set(self) -> bool:
        """Whether the user wrote any of its keys."""
        return any(is_inside(key, self.name) for key in self.values.merged.sources)

    @property
    def strategy(self) -> str:
        """`megatron`, `fsdp2`, `deepspeed`, `hf`, `vllm` or `sglang`, for training and for inference."""
        return strategy_kind(self.values[self.key(STRATEGY)])

    @property
    def mapping(self) -> str:
        """The key with its devices: the policy's for a reference or critic whose key is not set."""
        key, policy = self.key("device_mapping"), "actor_train.device_mapping"
        follows = self.name in ("reference", "critic") and self.values.is_set(policy) and not self.values.is_set(key)
        return policy if follows else key

    @property
    def devices(self) -> tuple[int, ...] | None:
        """Device numbers over all nodes; None for the CPU.

        Raises:
            ValueError: its `device_mapping` is malformed.
        """
        mapping = self.values[self.mapping]
        return None if mapping is None else parse_device_mapping(str(mapping))

    @property
    def world_size(self) -> int:
        """Number of processes, one per device."""
        return len(self.devices or (0,))

    @property
    def splits(self) -> tuple[str, ...]:
        """Keys by which its model is split."""
        return tuple(map(self.key, _SPLITS.get(self.strategy, ())))

    @property
    def model_devices(self) -> int:
        """Devices that share one model and one sequence."""
        return math.prod(self.values[key] or 1 for key in self.splits)

    @property
    def pass_size(self) -> int:
        """Sequences of one pass on all devices."""
        return self.training_argument(MICRO_BATCH) * self.world_size // self.model_devices

    @property
    def update_size(self) -> int:
        """Sequences of one optimizer step."""
        accumulated = self.training_argument(MICRO_BATCH) * self.training_argument(ACCUMULATION)
        return accumulated * self.world_size // self.model_devices

    def training_argument(self, name: str) -> int:
        """Return the micro-batch size or the accumulation steps, or ROLL's default."""
        value = self.values[self.key(name)]
        return _DEFAULTS[name] if value is None else int(value)


def is_agentic(values: ForeignValues) -> bool:
    """Whether the run is one in environments."""
    return GROUP_SIZE in values.dialect.specs()


def step_keys(values: ForeignValues) -> tuple[str, ...]:
    """Return the keys whose product is the number of sequences of a step, or of the episodes in environments."""
    return STEP[:1] if is_agentic(values) else STEP


def workers(values: ForeignValues) -> tuple[Worker, ...]:
    """Return the workers of a run: policy and engine, and reference and critic if they are configured or needed."""
    policy, engine, reference, critic = (
        Worker(values, name) for name in ("actor_train", "actor_infer", "reference", "critic")
    )
    scorers = (reference,) if reference.is_set or needs_reference(values) else ()
    return (policy, engine, *scorers, *((critic,) if trains_critic(values, critic.is_set) else ()))


def exported_learners(run: Experiment) -> tuple[str, ...]:
    """Return ROLL's names of the workers that train or score in a native run."""
    present = {"actor_train": True, "critic": run.needs_critic, "reference": run.algorithm.kl is not None}
    return tuple(name for name, is_present in present.items() if is_present)


def shared_keys(name: str, strategy: str) -> Iterator[KeySpec]:
    """Yield the keys of `actor_train` that `reference` or `critic` also takes, without separate documentation.

    They have an effect with the strategy.
    """
    specs = (*load_keys("roll", "roll"), *load_keys("roll", "roll_workers"))
    documented = {spec.key for spec in specs}
    sections = _COMMON if name == "reference" else _COMMON + _LEARNING
    for spec in specs:
        worker_key = name + spec.key.removeprefix("actor_train")
        is_shared = spec.direct and spec.key.startswith("actor_train.") and worker_key not in documented
        if is_shared and spec.native[0].startswith(sections) and applies_to(spec, strategy):
            yield spec


def ineffective_worker_keys(values: ForeignValues) -> Iterator[str]:
    """Yield a remark for each key of `actor_train` that the user changed for an engine or reference without effect."""
    honoured = {
        f"{name}.{spec.key.removeprefix('actor_train.')}"
        for name in ("reference",)
        for spec in shared_keys(name, Worker(values, name).strategy)
    }
    reasons = {"actor_infer": "an engine generates", "reference": "a reference does not train"}
    specs = values.dialect.specs()
    for key in values.merged.leaves():
        section, spec = key.partition(".")[0], values.dialect.spec(key)
        if section not in reasons or spec is None or key in specs or key in honoured or not spec.native:
            continue
        if key.endswith(IGNORED) or f".{STRATEGY_OPTIONS}." in key or spec.key in POLICY_SPLITS:
            continue
        if values[key] not in (values.merged.interpolated(spec.default), values[spec.key]):
            yield f"{values.describe(key)} has no effect: {reasons[section]}"


def applies_to(spec: KeySpec, strategy: str) -> bool:
    """Whether a key has an effect with a strategy."""
    if spec.only_if is None:
        return True
    needed = spec.only_if[1]
    names = needed.choices if isinstance(needed, ValueType) else (needed,)
    return strategy in map(strategy_kind, names)


def strategy_kind(strategy_name: str) -> str:
    """Return `megatron` for `megatron_train` and `megatron_infer`."""
    return strategy_name.partition("_")[0]


def placement_to_native(values: ForeignValues, native: NativeBuilder, further: Collection[int] = ()) -> None:
    """Set as many nodes as the highest device number needs, and the devices of each component; `further` devices have
    none."""
    present = {worker.name: worker for worker in workers(values)}
    devices_by_worker = {name: worker.devices for name, worker in present.items()}
    total = 1 + max((max(devices) for devices in (*devices_by_worker.values(), further) if devices), default=0)
    gpus_per_node = values[GPUS_PER_NODE]
    nodes = -(-total // gpus_per_node)
    per_node = total if nodes == 1 else gpus_per_node
    # a worker on the first device alone does not ask for more of them
    names = [name for name, devices in devices_by_worker.items() if devices and max(devices) > 0]
    origins = [f"{name}.device_mapping" for name in names or devices_by_worker]
    origins += [GPUS_PER_NODE] if nodes > 1 else []
    native.set("placement.nodes", nodes, *origins)
    native.set("placement.devices_per_node", per_node, *origins)
    _partly_shared_devices_to_native(values, native, devices_by_worker)
    on_cpu = not any(devices_by_worker.values())
    for name, devices in devices_by_worker.items():
        on_all = on_cpu or devices == tuple(range(nodes * per_node))
        key = f"placement.{COMPONENTS[name]}.devices"
        of_worker, mapping = f"{name}.device_mapping", present[name].mapping
        native.set(key, None if on_all else devices or (), *dict.fromkeys((of_worker, mapping)))
        if of_worker != mapping:
            native.remarks.append(
                f"{name}.device_mapping is not set: its devices are those of {values.describe(mapping)}"
            )
    learner, engine = (set(devices_by_worker[name] or ()) for name in ("actor_train", "actor_infer"))
    separate = bool(learner and engine and not learner & engine)
    native.set("placement.colocated", not separate, "actor_train.device_mapping", "actor_infer.device_mapping")


def _partly_shared_devices_to_native(
    values: ForeignValues, native: NativeBuilder, devices_by_worker: dict[str, tuple[int, ...] | None]
) -> None:
    """Mark reference and critic as unsupported on some of the actor's devices; the plan places them on all of these."""
    policy = set(devices_by_worker["actor_train"] or ())
    for name in ("reference", "critic"):
        devices = set(devices_by_worker.get(name) or ())
        if devices & policy and devices != policy:
            native.require(f"{name}.device_mapping", Capability.DEVICE_SHARING)
            devices_by_worker[name] = devices_by_worker["actor_train"]


def component_devices(placement: PlacementConfig, component: str) -> tuple[int, ...]:
    """Return the devices of a native component, numbered over all nodes."""
    devices: tuple[int, ...] | None = getattr(placement, component).devices
    return tuple(range(placement.nodes * placement.devices_per_node)) if devices is None else devices


def placement_from_native(foreign: ForeignBuilder) -> None:
    """Set the `device_mapping` of each worker."""
    run = foreign.experiment
    if run.placement.nodes > 1:
        foreign.set(GPUS_PER_NODE, run.placement.devices_per_node)
    for name in (*exported_learners(run), "actor_infer"):
        devices = component_devices(run.placement, COMPONENTS[name])
        foreign.set(f"{name}.device_mapping", _format_devices(devices))


def _format_devices(devices: tuple[int, ...]) -> str | None:
    if not devices:
        return None
    is_range = devices == tuple(range(devices[0], devices[-1] + 1))
    return f"list(range({devices[0]},{devices[-1] + 1}))" if is_range else str(list(devices))


def max_response(values: ForeignValues) -> tuple[int, tuple[str, ...]]:
    """Return the maximum response length and the keys from which it follows."""
    if values["sequence_length"] is not None:
        return values["sequence_length"] - values["prompt_length"], ("sequence_length", "prompt_length")
    lengths = ("response_length", "actor_infer.generating_args.max_new_tokens")
    return min(values[length] for length in lengths if values[length] is not None), lengths
