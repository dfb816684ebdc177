"""Names in VAGEN's reference, and marks of its releases."""

from collections.abc import Mapping
from typing import Any

from quintet.config.dotted import get_value, has_key

ENV = "env1"
"""Section of an environment in the reference's env_config.yaml; users choose any name."""
_NEWER = ("env_registry", "trainer.concat_multi_turn", "filter.filter_kwargs", "huggingface_hub.hf_save_freq")
_EVALUATION = ("experiment.default_max_turns", "run.live_summary", "backends.openai")


def is_evaluation(tree: Mapping[str, Any]) -> bool:
    """Whether a file is a configuration of `vagen.evaluate`, which asks models behind an API."""
    return any(has_key(tree, key) for key in _EVALUATION)


def is_newer(tree: Mapping[str, Any]) -> bool:
    """Whether a file is one of the releases since 2026, whose data files are lists of environments."""
    files = get_value(tree, "data.train_files")
    return any(has_key(tree, key) for key in _NEWER) or str(files).endswith((".yaml", ".yml"))
