"""The configuration format of ROLL."""

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.dialect import Dialect, key_files

_OPTIONS = "strategy_args.strategy_config"


def _narrow(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Add keys that every ROLL file has and the reference omits: the run's name, its model and its algorithm."""
    added = key_files("roll", ["roll_run", "roll_algorithm", "roll_sampling"])
    return dialect.with_references(*dialect.references, *added)


ROLL = Dialect(
    "roll",
    key_files("roll", ["roll"]),
    marks=("actor_train", "actor_infer", "num_return_sequences_in_group", "reference.strategy_args"),
    # ROLL documents options that several kinds of workers take once
    shared_sections={
        f"reference.{_OPTIONS}": f"actor_train.{_OPTIONS}",
        "reference.model_args": "actor_train.model_args",
        "actor_infer.model_args": "actor_train.model_args",
        "critic": "actor_train",
    },
    programs=r"start_\w+_pipeline",
    narrow=_narrow,
)
