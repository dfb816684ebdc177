"""Conversion of verl's training engines VeOmni and TorchTitan, in whose place FSDP2 shards and splits learners.

Keys with one native counterpart are direct in the ledger; this module has those that follow from several.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.verl.batches import ACTOR, GPUS, REF, num_gpus
from quintet.config.dialects.verl.dialect import TRAINING_ENGINES
from quintet.config.divisors import nearest_multiple
from quintet.config.problems import ConfigProblem

STRATEGY, STEPS = "actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.optim.total_training_steps"
LEARNERS = {"actor": ACTOR, "reference": REF, "critic": "critic"}
SPLITS = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
SHARD, REPLICATE = "data_parallel_shard_size", "data_parallel_replicate_size"
DEFAULTS_FILE = re.compile(r"(^|/)trainer/config/(engine/torchtitan|_generated_\w+)\.yaml:\d+$")
"""verl's files of all keys of an engine: their values are defaults, no wish of the user."""


def training_engine(values: ForeignValues) -> str | None:
    """Return `veomni` or `torchtitan`; None if another engine trains."""
    strategy = values[STRATEGY]
    return strategy if strategy in TRAINING_ENGINES else None


def training_engines_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the sizes, recomputation and schedules of the learners of VeOmni or TorchTitan."""
    engine = training_engine(values)
    for learner, section in LEARNERS.items() if engine else ():
        if engine == "veomni":
            _veomni_to_native(values, native, learner, section)
        else:
            _torchtitan_to_native(values, native, learner, section)


def training_engine_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield sizes that the engine refuses at start-up, as they do not make up the GPUs."""
    engine = training_engine(values)
    if engine == "torchtitan":
        yield from _torchtitan_problems(values)
    elif engine == "veomni":
        size, ulysses = (
            "actor_rollout_ref.actor.veomni.fsdp_size",
            "actor_rollout_ref.actor.veomni.ulysses_parallel_size",
        )
        ranks = num_gpus(values) // values[ulysses]
        if 0 < values[size] < ranks:
            yield from values.divisor_problems(size, ranks, f"data-parallel ranks, from {values.describe(*GPUS)}")


def _value(values: ForeignValues, key: str) -> Any:
    """Return the value of a key; of a critic's that is not set, verl's default."""
    value = values[key]
    spec = values.dialect.spec(key)
    return spec.default if value is None and spec is not None else value


def _veomni_to_native(values: ForeignValues, native: NativeBuilder, learner: str, section: str) -> None:
    size, ulysses = f"{section}.veomni.fsdp_size", f"{section}.veomni.ulysses_parallel_size"
    per_sequence, ranks = _value(values, ulysses), _value(values, size)
    native.set(f"{learner}.parallel.ulysses", per_sequence, ulysses)
    # ranks that share a sequence hold different shards, too
    group = ranks * per_sequence if 0 < ranks < num_gpus(values) // per_sequence else None
    native.set(f"{learner}.sharding.group_size", group, size, ulysses)
    if learner != "reference":
        _veomni_schedule_to_native(values, native, f"{learner}.optimizer", f"{section}.optim")


def _veomni_schedule_to_native(values: ForeignValues, native: NativeBuilder, optimizer: str, section: str) -> None:
    minimum, share = f"{section}.lr_min", f"{section}.lr_decay_ratio"
    rate = native.get(f"{optimizer}.learning_rate")
    final = min(1.0, _value(values, minimum) / rate)
    native.set(f"{optimizer}.min_learning_rate_ratio", final, minimum, f"{section}.lr")
    if _value(values, share) == 1:
        return
    if (values[STEPS] or -1) > 0:
        native.set(f"{optimizer}.decay_steps", max(1, int(values[STEPS] * values[share])), share, STEPS)
    else:
        native.require(share, Capability.SCHEDULES)


def _torchtitan_to_native(values: ForeignValues, native: NativeBuilder, learner: str, section: str) -> None:
    tensor, pipeline, context = keys = [f"{section}.torchtitan.{name}" for name in SPLITS]
    sizes = [int(_value(values, key)) for key in keys]
    for part, key, size in zip(("tensor", "pipeline", "context"), keys, sizes, strict=True):
        native.set(f"{learner}.parallel.{part}", size, key)
    native.set(f"{learner}.parallel.sequence", sizes[0] > 1 and sizes[1] == 1, tensor, pipeline)
    replicate, shard = f"{section}.torchtitan.{REPLICATE}", f"{section}.torchtitan.{SHARD}"
    copies = int(_value(values, replicate))
    ranks = num_gpus(values) // math.prod(sizes)
    group = max(1, ranks // copies) * sizes[2] if copies > 1 else None
    native.set(f"{learner}.sharding.group_size", group, replicate, shard, context)
    if learner == "actor" and not _is_wish(values, shard) and values[shard] not in (-1, ranks // copies):
        native.remarks.append(f"{shard} is not set: using {ranks // copies}, so that all GPUs take part")
    checkpoint = f"{section}.torchtitan.activation_checkpoint"
    if learner != "reference":
        native.set(f"{learner}.gradient_checkpointing", _value(values, checkpoint) != "none", checkpoint)


def _is_wish(values: ForeignValues, key: str) -> bool:
    return values.is_set(key) and not DEFAULTS_FILE.search(values.source(key))


def _torchtitan_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    shard = "actor_rollout_ref.actor.torchtitan.data_parallel_shard_size"
    others = [f"{ACTOR}.torchtitan.{name}" for name in (REPLICATE, *SPLITS)]
    gpus, devices = num_gpus(values), math.prod(int(values[key]) for key in others)
    shards = values[shard] if _is_wish(values, shard) and values[shard] != -1 else max(1, gpus // devices)
    if shards * devices == gpus:
        return
    larger = [key for key in others if values[key] > 1]
    product = f" with {values.describe(*larger)}" if larger else ""
    problem = f"{product} makes {shards * devices} GPUs, and there are {gpus}, from {values.describe(*GPUS)}".strip()
    fitting = f"{shard}={gpus // devices}" if gpus % devices == 0 else f"{GPUS[1]}={nearest_multiple(gpus, devices)}"
    yield values.problem(shard, problem, f"nearest valid value: {fitting}")
