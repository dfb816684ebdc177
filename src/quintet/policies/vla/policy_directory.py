"""JSON files of a directory with an action policy; read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.policies.vla.action_normalization import check_action_statistics
from quintet.policies.vla.policy_settings import run_settings

STATISTICS_FILE = "dataset_statistics.json"
OPENVLA = "openvla"
"""`model_type` of OpenVLA and OpenVLA-OFT."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        MachineError: the file cannot be read, or contains something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MachineError(f"cannot read {path}: {error}", "use a directory of an action policy") from error
    if not isinstance(content, dict):
        raise MachineError(f"{path} is not a JSON object", "use a directory of an action policy")
    return content


def read_statistics(directory: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of actions and states by data set; `stored` is the content of `config.json`.

    Raises:
        MachineError: the file of statistics cannot be read.
    """
    file = directory / STATISTICS_FILE
    return {**(stored.get("norm_stats") or {}), **(read_json(file) if file.is_file() else {})}


def check_policy_directory(directory: Path, config: Experiment) -> None:
    """Check that the directory of a policy has statistics for the actions of the run.

    Raises:
        ConfigError: the statistics are missing, or have another number of dimensions.
        MachineError: a file cannot be read.
    """
    stored = read_json(directory / "config.json")
    if stored.get("model_type") == OPENVLA:
        settings = {"action_dim": 7, **stored, **run_settings(config, is_mlp=False)}
        check_action_statistics(read_statistics(directory, stored), settings.get("unnorm_key"), settings["action_dim"])
