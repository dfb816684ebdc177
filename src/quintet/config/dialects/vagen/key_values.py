"""Names in VAGEN's reference, marks of its releases, and value types of its keys."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from quintet.config.dialects.dialect import tables
from quintet.config.dialects.value_types import ValueType
from quintet.config.dotted import get_value, has_key

TABLES = tables("vagen")
ENV = "env1"
"""Section of an environment in the reference's env_config.yaml; users choose any name."""
LISTS = {"train_envs": "data.train_files", "val_envs": "data.val_files"}
"""Keys of the files with lists of environments, by the section that their entries are in."""
_NEWER = ("env_registry", "trainer.concat_multi_turn", "filter.filter_kwargs", "huggingface_hub.hf_save_freq", *LISTS)
_EVALUATION = ("experiment.default_max_turns", "run.live_summary", "backends.openai")


def is_evaluation(tree: Mapping[str, Any]) -> bool:
    """Whether a file is a configuration of `vagen.evaluate`, which asks models behind an API."""
    return any(has_key(tree, key) for key in _EVALUATION)


def is_newer(tree: Mapping[str, Any]) -> bool:
    """Whether a file is one of the releases since 2026, whose data files are lists of environments."""
    files = get_value(tree, "data.train_files")
    return any(has_key(tree, key) for key in _NEWER) or str(files).endswith((".yaml", ".yml"))


def _file_named(*names: str) -> ValueType:
    return ValueType(
        f"a file {' or '.join(names)}", lambda value: isinstance(value, str) and PurePath(value).name in names, ()
    )


VALUE_TYPES = {
    "agent_dataset": _file_named("gym_agent_dataset.py"),
    "agent_loop_file": _file_named("agent.yaml", "agent_no_concat.yaml"),
}
