"""Find models on disk, and the configurations of the runs that trained them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.contained_files import contained_path
from quintet.errors import ConfigError, MachineError
from quintet.policies.lora import CONFIG_FILE
from quintet.policies.model_files import check_index, check_model_files
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import find_checkpoint, open_checkpoint


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk, and the configuration of the run that trained it, if that is beside it."""

    policy: Path
    config: Path | None = None


def find_model(location: str, warn: Callable[[str], None] = warnings.warn) -> StoredModel:
    """Return the model at a path: a Hugging Face directory, a `global_step_N` directory, or a run directory, of which
    the last good checkpoint is used; `warn` gets a message for each newer one.

    Raises:
        MachineError: there is none, or the checkpoint is damaged.
    """
    path = Path(location).expanduser()
    if (path / "config.json").is_file():
        check_model_files(path)
        return StoredModel(path)
    if (path / "hf").is_dir():
        check_index(path / "hf")
        return StoredModel(open_checkpoint(path).directory / "hf", _run_config(path.resolve().parent.parent))
    if (path / "checkpoints").is_dir():
        damaged: dict[Path, str] = {}
        checkpoint = find_checkpoint(contained_path(path, "checkpoints"), damaged.__setitem__)
        if checkpoint is not None:
            for item, problem in damaged.items():
                warn(f"skipping checkpoint {item.name}: {problem}; using {checkpoint.directory.name}")
            check_index(checkpoint.directory / "hf")
            return StoredModel(checkpoint.directory / "hf", _run_config(path))
        problems = "; ".join(f"{item.name}: {problem}" for item, problem in damaged.items()) or "there is none yet"
        hint = "use another run, or a directory with config.json and weights"
        raise MachineError(f"no complete checkpoint in {path / 'checkpoints'} ({problems})", hint)
    if (path / CONFIG_FILE).is_file():
        hint = f"merge them into their base model: quintet export {location} TARGET"
        raise MachineError(f"{location} has adapters, not a model", hint)
    raise MachineError(
        f"no model at {location}",
        "use a directory with config.json and weights, a global_step_N directory, or a run directory",
    )


def with_configured_model(
    composed: ComposedConfig, warn: Callable[[str], None] = warnings.warn, purpose: str = "evaluate"
) -> ComposedConfig:
    """Return the configuration with the model of `find_configured_model` as `policy.path`.

    Raises:
        ConfigError: there is no model.
        MachineError: the checkpoint is damaged.
    """
    config, sources = composed.experiment, dict(composed.provenance)
    path = find_configured_model(config, warn, purpose)
    is_initial = config.policy.path is not None and path == Path(config.policy.path)
    if not is_initial:
        sources |= {"policy.path": "checkpoint", "policy.preset": "checkpoint"}
    # adapters are already merged into the model of a checkpoint
    lora = config.policy.lora if is_initial else None
    policy = config.policy.model_copy(update={"path": str(path), "preset": None, "lora": lora})
    return replace(composed, experiment=config.model_copy(update={"policy": policy}), provenance=sources)


def find_configured_model(
    config: Experiment, warn: Callable[[str], None] = warnings.warn, purpose: str = "evaluate"
) -> Path:
    """Return the model of a configuration: the checkpoint that `resume` names, `policy.path`, or the last good
    checkpoint of the run of that name; `warn` gets a message for each newer one. `purpose` is what it is for.

    Raises:
        ConfigError: there is none of these.
        MachineError: the checkpoint is damaged.
    """
    if config.resume not in ("auto", "never"):
        return find_model(config.resume, warn).policy
    if config.policy.path is not None:
        return Path(config.policy.path)
    run = RunDirectory.from_config(config)
    if config.resume == "auto" and run.checkpoints.is_dir():
        return find_model(str(run.path), warn).policy
    missing = "resume=never ignores the checkpoints" if config.resume == "never" else "there is no checkpoint"
    raise ConfigError(
        f"no model to {purpose}: policy.path is null, and {missing} in {run.checkpoints}",
        key="policy.path",
        hint="policy.path=DIRECTORY policy.preset=null, or run `quintet train` first, and then with resume=auto",
    )


def find_run_config(path: Path) -> Path | None:
    """Return the configuration of the run whose directory, or whose checkpoint, is at `path`; None for other paths."""
    if (path / "config.json").is_file():
        return None
    if (path / "hf").is_dir():
        return _run_config(path.resolve().parent.parent)
    return _run_config(path) if (path / "checkpoints").is_dir() else None


def _run_config(run: Path) -> Path | None:
    """
    Raises:
        MachineError: the configuration is a link out of the run directory, whose contents messages would quote.
    """
    config = RunDirectory(run).config
    return contained_path(run, config.name) if config.is_file() else None
