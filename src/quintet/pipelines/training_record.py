"""Records of how a model was trained, from which its model card is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from quintet.config.native.experiment import Experiment
from quintet.config.run_name import model_name
from quintet.contained_files import read_contained
from quintet.errors import MachineError
from quintet.tracking.metric_columns import read_columns
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import Checkpoint

RECORD_FILE = "quintet_training.json"
"""File beside final weights and exported models."""
FINE_TUNING_STATE = "reached"
"""Entry of the state of a checkpoint that only checkpoints of supervised fine-tuning have."""


class _DataFile(BaseModel):
    """A file that was trained or validated on."""

    split: str
    name: str
    rows: int
    sha256: str


class _Record(BaseModel):
    """Types of a `TrainingRecord`, of which any may come from somebody else."""

    model_config = ConfigDict(allow_inf_nan=False)

    kind: str
    step: int
    steps: int | None
    seconds: float
    base_model: str
    data: list[_DataFile]
    results: dict[str, list[tuple[int, float]]]
    experiment: dict[str, Any]


TrainingRecord = Mapping[str, Any]
"""JSON values: `kind`, `step`, `steps`, `seconds`, `base_model`, `data`, `results` and `experiment`."""


def checkpoint_record(checkpoint: Checkpoint) -> TrainingRecord:
    """Return the record of the model in a checkpoint of a run directory."""
    run = RunDirectory(checkpoint.directory.resolve().parent.parent)
    try:
        return _Record.model_validate(training_record(checkpoint.state, checkpoint.step, run)).model_dump()
    # any entry of the state of a run from somebody else may have any type
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        message = f"the state of {checkpoint.directory} does not describe a training: {str(error).splitlines()[0]}"
        raise MachineError(message, "use another checkpoint") from error


def training_record(state: Mapping[str, Any], step: int, run: RunDirectory) -> TrainingRecord:
    """Return the record of a model after a step of a run, from the state of a checkpoint, without paths of this
    machine."""
    experiment = state["experiment"]
    is_tuned = FINE_TUNING_STATE in state
    steps = state.get("steps") or (None if is_tuned else experiment.get("training", {}).get("steps"))
    return {
        "kind": "supervised fine-tuning" if is_tuned else "reinforcement learning",
        "step": step,
        "steps": steps,
        "seconds": float(state["seconds"]),
        "base_model": base_model_name(experiment, is_tuned=is_tuned),
        "data": state.get("data", []),
        "results": _results(run, step),
        "experiment": without_paths(experiment),
    }


def base_model_name(experiment: Mapping[str, Any], *, is_tuned: bool) -> str:
    """Return the name of the model that a run began with: of the hub, of a directory, or of a preset."""
    policy, sft = experiment.get("policy") or {}, experiment.get("sft") or {}
    path = (sft.get("path") if is_tuned else None) or policy.get("path")
    if path is not None:
        return model_name(path)
    preset = policy.get("preset") or Experiment().policy.preset
    return f"{preset}, a preset with random weights"


def without_paths(value: Any) -> Any:
    """Replace absolute paths in a configuration by their last part: they name directories of this machine."""
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and "\n" not in value
    return Path(value).name if is_path else value


def write_record(directory: Path, record: TrainingRecord) -> None:
    """Write the record of the model in a directory."""
    (directory / RECORD_FILE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_record(directory: Path) -> TrainingRecord | None:
    """Return the record of the model in a directory; None if it has none.

    Raises:
        MachineError: the record is damaged.
    """
    if not (directory / RECORD_FILE).is_file():
        return None
    try:
        return _Record.model_validate(json.loads(read_contained(directory, RECORD_FILE))).model_dump()
    except (OSError, ValueError, RecursionError) as error:
        message = f"{directory / RECORD_FILE} is no record of training"
        raise MachineError(message, "remove the file, or use another copy") from error


def _results(run: RunDirectory, step: int) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of the first and last validation up to a step, by metric."""
    metrics = read_columns(run.metrics)
    results: dict[str, list[tuple[int, float]]] = {}
    for name in metrics.names if run.metrics.is_file() else ():
        points = [point for point in zip(*metrics.points(name), strict=True) if point[0] <= step]
        if name.startswith("val/") and points:
            results[name] = [points[0], points[-1]]
    return results
