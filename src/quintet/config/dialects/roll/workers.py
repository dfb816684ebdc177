"""Workers of a ROLL configuration: where each runs, and how many devices share its model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.roll.algorithm import needs_reference, trains_critic
from quintet.config.dialects.roll.device_mapping import parse_device_mapping

LEARNERS = {"actor_train": "actor", "critic": "critic", "reference": "reference"}
"""Native names of ROLL's workers that run a model for training or for log-probs."""
CRITIC_DEFAULTS: dict[str, Any] = {
    "critic.optimizer.learning_rate": 5e-5,
    "critic.optimizer.weight_decay": 0.0,
    "critic.optimizer.warmup_steps": 0,
}
"""ROLL's defaults of a critic."""
MICRO_BATCH = "training_args.per_device_train_batch_size"
ACCUMULATION = "training_args.gradient_accumulation_steps"
STRATEGY, STRATEGY_OPTIONS = "strategy_args.strategy_name", "strategy_args.strategy_config"
_DEFAULTS = {MICRO_BATCH: 8, ACCUMULATION: 1}
"""ROLL's defaults, for the critic; its reference has only those of the policy."""
_SPLITS = {
    "megatron": (
        f"{STRATEGY_OPTIONS}.tensor_model_parallel_size",
        f"{STRATEGY_OPTIONS}.pipeline_model_parallel_size",
        f"{STRATEGY_OPTIONS}.context_parallel_size",
    ),
    "fsdp2": ("model_args.ulysses_size",),
}
"""Keys by which a model is split, by strategy. Expert-parallel devices train on different sequences."""
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
        return any(key == self.name or key.startswith(f"{self.name}.") for key in self.values.merged.sources)

    @property
    def strategy(self) -> str:
        """`megatron`, `fsdp2`, `hf`, `vllm` or `sglang`, for training and for inference."""
        return strategy_kind(self.values[self.key(STRATEGY)])

    @property
    def devices(self) -> tuple[int, ...] | None:
        """Device numbers over all nodes; None for the CPU.

        Raises:
            ValueError: its `device_mapping` is malformed.
        """
        mapping = self.values[self.key("device_mapping")]
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


def workers(values: ForeignValues) -> tuple[Worker, ...]:
    """Return the workers of a run: policy and engine, and reference and critic if they are configured or needed."""
    policy, engine, reference, critic = (
        Worker(values, name) for name in ("actor_train", "actor_infer", "reference", "critic")
    )
    scorers = (reference,) if reference.is_set or needs_reference(values) else ()
    return (policy, engine, *scorers, *((critic,) if trains_critic(values, critic.is_set) else ()))


def shared_keys(name: str) -> Iterator[KeySpec]:
    """Yield the keys of `actor_train` that `reference` or `critic` also takes, without separate documentation."""
    specs = load_keys("roll", "roll")
    documented = {spec.key for spec in specs}
    sections = _COMMON if name == "reference" else _COMMON + _LEARNING
    for spec in specs:
        worker_key = name + spec.key.removeprefix("actor_train")
        is_shared = spec.direct and spec.key.startswith("actor_train.") and worker_key not in documented
        if is_shared and spec.native[0].startswith(sections):
            yield spec


def applies_to(spec: KeySpec, strategy: str) -> bool:
    """Whether a key has an effect with a strategy."""
    return spec.only_if is None or strategy_kind(spec.only_if[1]) == strategy


def strategy_kind(strategy_name: str) -> str:
    """Return `megatron` for `megatron_train` and `megatron_infer`."""
    return strategy_name.partition("_")[0]
