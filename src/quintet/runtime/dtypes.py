"""Dtypes that are `auto` in a configuration, and are read from the model's files."""

from __future__ import annotations

import json
from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError, MachineError

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


def with_dtypes(config: Experiment) -> Experiment:
    """Return the configuration with each `auto` replaced by the dtype in which the model is stored: of the policy and
    its engine, the critic and the reference. Presets are float32.

    Raises:
        ConfigError: a model is stored in an unsupported dtype.
    """
    policy = config.policy
    dtypes = (policy.dtype, config.critic.dtype, config.reference.dtype)
    policy_dtype = stored_dtype(policy.path, "policy.dtype") if "auto" in dtypes else "float32"
    changes: dict[str, object] = {}
    if policy.dtype == "auto":
        changes["policy"] = policy.model_copy(update={"dtype": policy_dtype})
    for name in ("critic", "reference"):
        part = getattr(config, name)
        if part.dtype == "auto":
            dtype = stored_dtype(part.path, f"{name}.dtype") if part.path else policy_dtype
            changes[name] = part.model_copy(update={"dtype": dtype})
    return config.model_copy(update=changes) if changes else config


def stored_dtype(directory: str | Path | None, key: str) -> str:
    """Return the dtype in which a model is stored according to its `config.json`; float32 if it names none, or without
    a directory. `key` is the configuration key that is `auto`.

    Raises:
        ConfigError: the dtype is not supported.
        MachineError: there is no model.
    """
    if directory is None:
        return "float32"
    path = Path(directory) / "config.json"
    if not path.is_file():
        message = f"{key} = auto is the dtype of the run's initial model, and there is no {path}"
        raise MachineError(message, "restore that file; it is needed even if the run resumes from a checkpoint")
    stored = json.loads(path.read_text(encoding="utf-8"))
    dtype = str(stored.get("dtype") or stored.get("torch_dtype") or "float32")
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(
            f"the model at {directory} is stored in {dtype}",
            key=key,
            value="auto",
            hint=", or ".join(f"{key}={name}" for name in SUPPORTED_DTYPES),
        )
    return dtype
