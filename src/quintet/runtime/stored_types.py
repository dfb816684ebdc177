"""Number types that a configuration leaves to a model's own files."""

from __future__ import annotations

import json
from pathlib import Path

from quintet.config.native import Experiment
from quintet.errors import ConfigError, MachineError

__all__ = ["stored_type", "with_types"]

NARROW = ("float32", "bfloat16", "float16")


def with_types(config: Experiment) -> Experiment:
    """The same with every `auto` replaced by the type that the model's own configuration names: of the policy and its
    engine, the critic and the reference. A model made on the spot is float32.

    Raises:
        ConfigError: a model names another type.
    """
    policy = config.policy
    own = stored_type(policy.path, "policy.dtype") if "auto" in _asked(config) else "float32"
    changes: dict[str, object] = {}
    if policy.dtype == "auto":
        changes["policy"] = policy.model_copy(update={"dtype": own})
    for name in ("critic", "reference"):
        part = getattr(config, name)
        if part.dtype == "auto":
            found = stored_type(part.path, f"{name}.dtype") if part.path else own
            changes[name] = part.model_copy(update={"dtype": found})
    return config.model_copy(update=changes) if changes else config


def _asked(config: Experiment) -> set[str | None]:
    return {config.policy.dtype, config.critic.dtype, config.reference.dtype}


def stored_type(directory: str | Path | None, key: str) -> str:
    """The type in which a model's weights are stored, as its `config.json` says; float32 where it says nothing, or
    where there is no directory. `key` is what was left to it.

    Raises:
        ConfigError: no learner and no engine computes in that type.
        MachineError: there is no model.
    """
    if directory is None:
        return "float32"
    path = Path(directory) / "config.json"
    if not path.is_file():
        told = f"{key} = auto is the type of the model that the run began with, and there is no {path}"
        raise MachineError(told, "put that file back, also where the run goes on from a checkpoint")
    stored = json.loads(path.read_text())
    named = str(stored.get("dtype") or stored.get("torch_dtype") or "float32")
    if named not in NARROW:
        raise ConfigError(
            f"the model at {directory} is stored in {named}",
            key=key,
            value="auto",
            hint=f"name the type instead: {', '.join(NARROW)}",
        )
    return named
