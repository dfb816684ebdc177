"""Keys of DeepSpeed's options in the sections of ROLL's workers."""

from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.dialects.dialect import Reference
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.roll.kinds import TABLES
from quintet.config.dotted import get_value

DEEPSPEED, STRATEGY = "deepspeed", "strategy_args.strategy_name"
DOCUMENTED = "actor_train"
"""Worker by whose section the ledger documents DeepSpeed's options."""
TARGETS: Mapping[str, str] = TABLES["deepspeed_targets"]
"""Native sections of the workers whose options have an effect."""


def deepspeed_workers(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the workers of a file that use DeepSpeed."""
    return tuple(name for name in tree if DEEPSPEED in str(get_value(tree, f"{name}.{STRATEGY}", "")))


def deepspeed_reference(worker: str) -> Reference:
    """Return DeepSpeed's options in the section of a worker; those of workers without a model have no effect."""
    target = TARGETS.get(worker)
    return Reference(f"DeepSpeed of {worker}", lambda: tuple(_keys_of(worker, target)))


def _keys_of(worker: str, target: str | None) -> Iterator[KeySpec]:
    for spec in load_keys("roll", "roll_deepspeed"):
        condition = spec.only_if and (worker + spec.only_if[0].removeprefix(DOCUMENTED), spec.only_if[1])
        changes: dict[str, Any] = {"key": worker + spec.key.removeprefix(DOCUMENTED), "only_if": condition}
        if target is None:
            changes |= {"native": (), "computed": False, "requires": None, "noop": ()}
        else:
            changes["native"] = tuple(target + key.removeprefix("actor") for key in spec.native)
        yield spec.model_copy(update=changes)
