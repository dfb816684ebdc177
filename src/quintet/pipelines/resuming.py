"""Where a run goes on: the last good checkpoint of its own, one that it is given, or one from another store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quintet.config.keys import documented
from quintet.config.native import Experiment
from quintet.errors import ConfigError, MachineError
from quintet.tracking.progress import Progress
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from quintet.training.remote import RemoteStore

__all__ = ["starting_point"]

MAY_CHANGE = (
    *(
        "output_dir",
        "resume",
        "tracking.",
        "checkpoint.",
        "name",
        "placement.",
        "world.processes",
        "worlds.*.world.processes",
    ),
    *("training.steps", "data.epochs", "data.max_steps", "validation.only", "sft.devices"),
    *("sft.name", "sft.project", "sft.loggers", "sft.output_dir", "sft.remote_dir", "sft.merge", "sft.epochs"),
)
"""Keys, and sections, that a resumed run may set anew: they don't touch the numbers; more steps only
stretch the schedules."""
SPREADING = (
    *("backend", "parallel.", "memory.", "megatron"),
    *(f"sharding.{key}" for key in ("group_size", "policy", "min_parameters", "reshard_after_forward")),
    *(f"sharding.{key}" for key in ("sync_every_micro_batch", "forward_prefetch", "backward_prefetch")),
    *(f"sharding.{key}" for key in ("limit_all_gathers", "keep_original_parameters")),
)
ALLOWED = (*MAY_CHANGE, *(f"{part}.{key}" for part in ("actor", "critic", "reference") for key in SPREADING))
"""… nor does how weights lie over devices, but for rounding."""


def starting_point(
    config: Experiment, directory: RunDirectory, progress: Progress, remote: RemoteStore | None
) -> Checkpoint | None:
    """The checkpoint that `resume` says; None where the run begins.

    Raises:
        MachineError: it is damaged, or all are.
        ConfigError: it belongs to another experiment.
    """
    if config.resume == "never":
        return None
    checkpoint = (
        _newest(directory, progress, remote) if config.resume == "auto" else open_checkpoint(Path(config.resume))
    )
    if checkpoint is not None:
        _same_experiment(config, checkpoint)
    return checkpoint


def _newest(directory: RunDirectory, progress: Progress, remote: RemoteStore | None) -> Checkpoint | None:
    """The last good one here, else the last good one of the store."""
    damaged: dict[Path, str] = {}
    found = find_checkpoint(directory.checkpoints, damaged.__setitem__)
    if found is None and remote is not None:
        found = remote.fetch(directory.checkpoints, damaged.__setitem__)
        if found is not None:
            progress.note(f"fetched {found.directory.name} from {remote.url}")
    if found is None and damaged:
        faults = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
        raise MachineError(
            f"every checkpoint in {directory.checkpoints} is damaged ({faults})",
            "mend them, or start anew with resume=never: that removes what the run has left so far",
        )
    for path, why in damaged.items():
        progress.note(f"skipping checkpoint {path.name}: {why}")
    return found


def _same_experiment(config: Experiment, checkpoint: Checkpoint) -> None:
    now, then = (_flat(part) for part in (config.model_dump(mode="json"), _as_now(checkpoint.state["experiment"])))
    megatron = config.actor.megatron
    kept = megatron is not None and megatron.use_checkpoint_opt_param_scheduler
    allowed = (*ALLOWED, "actor.optimizer.") if kept else ALLOWED  # the checkpoint's schedule goes on
    changed = [
        key for key in sorted(now | then) if now.get(key) != then.get(key) and not documented(key).startswith(allowed)
    ]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{key} = {now.get(key)!r}, but {checkpoint.directory} was made with {then.get(key)!r}",
            key=key,
            value=now.get(key),
            hint="set it back, give the run another `name`, or start anew with resume=never",
        )


def _as_now(experiment: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a checkpoint; keys that came since have the value that means as before."""
    try:
        return Experiment.model_validate(experiment, strict=False).model_dump(mode="json")
    except ValidationError:
        return experiment


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
