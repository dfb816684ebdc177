"""The configuration format of RAGEN."""

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.dialect import Dialect, key_files
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dotted import get_value


def _narrow(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """With `training.use_sft`, the stages of `sft` run before reinforcement learning, so their keys have an effect."""
    if get_value(tree, "training.use_sft") is not True:
        return dialect
    return dialect.with_references(dialect.reference("ragen").mapped(_without_sft_condition))


def _without_sft_condition(spec: KeySpec) -> KeySpec:
    return spec.model_copy(update={"only_if": None}) if spec.only_if == ("rl_or_sft", "sft") else spec


RAGEN = Dialect(
    "ragen",
    key_files("ragen", ["ragen"]),
    marks=(
        *("rl_or_sft", "system.n_gpus", "training.n_rollout", "training.max_turns", "optimization"),
        *("sft.env_type", "sft.data_generation", "sft.training", "model.base_model"),
        *("training.ppo_batch_size", "training.train_batch_size", "training.train_data_num"),
    ),
    trainers=("ragen.train",),
    framework_files={"base": {}},
    narrow=_narrow,
)
