"""The workers of a ROLL configuration: where each runs, and how many devices share its model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quintet.config.dialects.conversion import Values
from quintet.config.dialects.devices import parse_device_mapping
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.roll.algorithm import needs_reference, trains_critic
from quintet.config.dialects.roll.keys import ROLL_KEYS

__all__ = ["CRITIC", "LEARNERS", "Worker", "alike", "counts", "workers"]

LEARNERS = {"actor_train": "actor", "critic": "critic", "reference": "reference"}
"""ROLL's names of workers that hold a model which learns, or computes as if it did, and the native ones."""
CRITIC: dict[str, Any] = {
    "critic.optimizer.learning_rate": 5e-5,
    "critic.optimizer.weight_decay": 0.0,
    "critic.optimizer.warmup_steps": 0,
}
"""ROLL's defaults of a critic's training, where its section says nothing."""
_OPTIONS = "strategy_args.strategy_config"
_SPLITS = {
    "megatron": (
        f"{_OPTIONS}.tensor_model_parallel_size",
        f"{_OPTIONS}.pipeline_model_parallel_size",
        f"{_OPTIONS}.context_parallel_size",
    ),
    "fsdp2": ("model_args.ulysses_size",),
}
"""By what a model is shared out. Experts are shared out among devices that learn from different sequences."""
_COMMON = ("actor.parallel.", "actor.sharding.", "actor.memory.", "actor.megatron.")
_LEARNING = ("actor.optimizer.", "actor.inference_budget.", "actor.gradient_checkpointing")


@dataclass(frozen=True, slots=True)
class Worker:
    """One section of workers."""

    values: Values
    name: str
    """`actor_train`, `actor_infer`, `reference` or `critic`."""

    def key(self, name: str) -> str:
        """A key of it."""
        return f"{self.name}.{name}"

    def option(self, name: str) -> str:
        """The key of an option of its strategy."""
        return f"{self.name}.{_OPTIONS}.{name}"

    @property
    def given(self) -> bool:
        """Whether somebody configured it at all."""
        return any(key == self.name or key.startswith(f"{self.name}.") for key in self.values.written.sources)

    @property
    def strategy(self) -> str:
        """`megatron`, `fsdp2`, `hf`, `vllm` or `sglang`, whether it trains or not."""
        return _kind(self.values[self.key("strategy_args.strategy_name")])

    @property
    def devices(self) -> tuple[int, ...] | None:
        """Numbers of its devices over all nodes; None for the CPU.

        Raises:
            ValueError: its `device_mapping` doesn't name any; the message tells why.
        """
        mapping = self.values[self.key("device_mapping")]
        return None if mapping is None else parse_device_mapping(str(mapping))

    @property
    def world(self) -> int:
        """Its processes, one for each device."""
        return len(self.devices or (0,))

    @property
    def splits(self) -> tuple[str, ...]:
        """The keys that say how its model is shared out."""
        return tuple(map(self.key, _SPLITS.get(self.strategy, ())))

    @property
    def shards(self) -> int:
        """Devices that share one model and one sequence."""
        return math.prod(self.values[key] or 1 for key in self.splits)


def workers(values: Values) -> tuple[Worker, ...]:
    """Those that a run has: policy and engine always, reference and critic where they are configured or needed."""
    always = (Worker(values, "actor_train"), Worker(values, "actor_infer"))
    reference, critic = Worker(values, "reference"), Worker(values, "critic")
    scores = (reference,) if reference.given or needs_reference(values) else ()
    return always + scores + ((critic,) if trains_critic(values, critic.given) else ())


def alike(name: str) -> Iterator[Row]:
    """The keys of `actor_train` that `reference` or `critic` takes too and that aren't documented for it."""
    documented = {row.key for row in ROLL_KEYS}
    taken = _COMMON if name == "reference" else _COMMON + _LEARNING
    for row in ROLL_KEYS:
        here = name + row.key.removeprefix("actor_train")
        shared = row.direct and row.key.startswith("actor_train.") and here not in documented
        if shared and row.native[0].startswith(taken):
            yield row


def counts(row: Row, strategy: str) -> bool:
    """Whether a key means something to a worker of that strategy."""
    return row.only_if is None or _kind(row.only_if[1]) == strategy


def _kind(strategy_name: str) -> str:
    return strategy_name.partition("_")[0]
