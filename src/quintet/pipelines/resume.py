"""Find the checkpoint that a run resumes from: the last good one of its own, possibly one of its warm start, a named
one, or one of a remote store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quintet.config.deprecation import upgrade_keys
from quintet.config.native.experiment import Experiment
from quintet.config.schema import documented_key
from quintet.errors import ConfigError, MachineError
from quintet.package_files import read_yaml
from quintet.tracking.progress import Progress
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import (
    Checkpoint,
    find_checkpoint,
    finish_interrupted_replacements,
    open_checkpoint,
)
from quintet.training.checkpoint.remote_store import RemoteStore

KEYS = read_yaml(__file__)
WITHOUT_SERVICE = {"env.service.protocol": "quintet", "envs.*.env.service.protocol": "quintet"}
"""Values of keys with which a run has the numbers of one without an environment service."""
ALLOWED = (
    *KEYS["may_change"],
    *(f"{part}.{key}" for part in ("actor", "critic", "reference") for key in KEYS["placement"]),
)
"""Keys, and sections, that may change on resume."""


def find_resume_checkpoint(
    config: Experiment, directory: RunDirectory, progress: Progress, remote: RemoteStore | None
) -> Checkpoint | None:
    """Return the checkpoint that `resume` asks for; None if the run starts from the beginning.

    Raises:
        MachineError: the checkpoint is damaged, or all of them are.
        ConfigError: it belongs to another experiment.
    """
    if config.resume == "never":
        return None
    checkpoint = (
        _newest(directory, progress, remote) if config.resume == "auto" else open_checkpoint(Path(config.resume))
    )
    if checkpoint is not None:
        _check_same_experiment(config, checkpoint)
    return checkpoint


def _newest(directory: RunDirectory, progress: Progress, remote: RemoteStore | None) -> Checkpoint | None:
    """Return the last good local checkpoint or, if there is none, the last good one of the remote store. Checkpoints of
    the warm start count if there are no others."""
    damaged: dict[Path, str] = {}
    for root in (directory.checkpoints, directory.warm_start_checkpoints):
        finish_interrupted_replacements(root)
    checkpoint = find_checkpoint(directory.checkpoints, damaged.__setitem__)
    if checkpoint is None and not damaged:
        checkpoint = find_checkpoint(directory.warm_start_checkpoints, damaged.__setitem__)
    if checkpoint is None and remote is not None:
        checkpoint = remote.download_latest(directory.checkpoints, damaged.__setitem__)
        if checkpoint is not None:
            progress.note(f"fetched {checkpoint.directory.name} from {remote.url}")
    if checkpoint is None and damaged:
        problems = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
        raise MachineError(
            f"every checkpoint in {directory.path} is damaged ({problems})",
            "restore one from a copy, or start again with resume=never, which removes the run's previous results",
        )
    for path, problem in damaged.items():
        progress.note(f"skipping checkpoint {path.name}: {problem}")
    return checkpoint


def _check_same_experiment(config: Experiment, checkpoint: Checkpoint) -> None:
    current, saved = (
        _flat(part) for part in (config.model_dump(mode="json"), _upgraded(checkpoint.entry("experiment", dict)))
    )
    megatron = config.actor.megatron
    keeps_schedule = megatron is not None and megatron.use_checkpoint_opt_param_scheduler
    allowed = (*ALLOWED, "actor.optimizer.") if keeps_schedule else ALLOWED  # the checkpoint's schedule continues
    changed = [
        key
        for key in sorted(current | saved)
        if _value(current, key) != _value(saved, key) and not documented_key(key).startswith(allowed)
    ]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{key} = {current.get(key)!r}, but {checkpoint.directory} was saved with {saved.get(key)!r}",
            key=key,
            value=current.get(key),
            hint="restore the value, set another `name`, or start again with resume=never",
        )


def _value(flat: Mapping[str, Any], key: str) -> Any:
    value = flat.get(key)
    return WITHOUT_SERVICE.get(documented_key(key)) if value is None else value


def _upgraded(experiment: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a checkpoint under today's keys; keys added since then have their default."""
    try:
        return Experiment.model_validate(upgrade_keys(experiment), strict=False).model_dump(mode="json")
    except ValidationError:
        return experiment


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
