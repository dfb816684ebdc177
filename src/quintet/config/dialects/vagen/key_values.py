"""Names in VAGEN's reference, marks of its releases, and value types of its keys."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from quintet.config.dialects.dialect import tables
from quintet.config.dialects.value_types import ValueType
from quintet.config.dotted import get_value, has_key
from quintet.config.yaml_reader import read_text

TABLES = tables("vagen")
ENV = "env1"
"""Section of an environment in the reference's env_config.yaml; users choose any name."""
LISTS = {"train_envs": "data.train_files", "val_envs": "data.val_files"}
"""Keys of the files with lists of environments, by the section that their entries are in."""
_NEWER = ("env_registry", "trainer.concat_multi_turn", "filter.filter_kwargs", "huggingface_hub.hf_save_freq", *LISTS)
AGENT_LOOPS = {
    "vagen.agent_loop.gym_agent_loop_no_concat.GymAgentLoop": True,
    "vagen.agent_loop.gym_agent_loop.GymAgentLoop": False,
}
"""VAGEN's agent loops, with whether they start each turn with a new context."""
TARGET = re.compile(r"""^[ -]*_target_:\s*["']?([\w.]+)""", re.MULTILINE)
_EVALUATION = ("experiment.default_max_turns", "run.live_summary", "backends.openai")


def is_evaluation(tree: Mapping[str, Any]) -> bool:
    """Whether a file is a configuration of `vagen.evaluate`, which asks models behind an API."""
    return any(has_key(tree, key) for key in _EVALUATION)


def is_newer(tree: Mapping[str, Any]) -> bool:
    """Whether a file is one of the releases since 2026, whose data files are lists of environments."""
    files = get_value(tree, "data.train_files")
    return any(has_key(tree, key) for key in _NEWER) or str(files).endswith((".yaml", ".yml"))


def loop_by_turns(path: str) -> bool | None:
    """Return whether VAGEN's agent loop in a file starts each turn with a new context; None if that is not known.

    The class that the file names decides; without the file, its name.
    """
    file = Path(path).expanduser()
    text = read_text(file) if file.is_file() else ""
    if not text:
        return {"agent.yaml": False, "agent_no_concat.yaml": True}.get(file.name)
    target = TARGET.search(text)
    return AGENT_LOOPS.get(target[1]) if target else None


def _is_agent_loop(value: Any) -> bool:
    return isinstance(value, str) and loop_by_turns(value) is not None


def _file_named(*names: str) -> ValueType:
    return ValueType(
        f"a file {' or '.join(names)}", lambda value: isinstance(value, str) and PurePath(value).name in names, ()
    )


VALUE_TYPES = {
    "agent_dataset": _file_named("gym_agent_dataset.py"),
    "agent_loop_file": ValueType("a file of VAGEN's agent loops (agent.yaml, agent_no_concat.yaml)", _is_agent_loop),
}
