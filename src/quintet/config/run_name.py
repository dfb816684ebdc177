"""Names of models, and of runs whose configuration has no `name`."""

from __future__ import annotations

import re
from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import PolicyConfig
from quintet.config.plan.row_counts import learns_from_files

HUB_PREFIX = "models--"
"""Beginning of the name of a model's directory in the cache of the hub."""
PARTS_OF_A_RUN = {"model": 2, "merged_model": 2, "policy": 2, "lora_adapter": 2, "hf": 4}
"""Directories whose name does not tell the model: with so many parts, the path begins with the name of the run."""
MAX_CHARACTERS = 80


def model_name(path: str) -> str:
    """Return the name of the model in a directory.

    >>> model_name("/home/me/.cache/huggingface/hub/models--org--small/snapshots/0a1b")
    'org/small'
    >>> model_name("runs/words/checkpoints/global_step_6/hf"), model_name("/models/small")
    ('words/checkpoints/global_step_6/hf', 'small')
    """
    parts = Path(path).parts
    for part in parts:
        if part.startswith(HUB_PREFIX):
            return part.removeprefix(HUB_PREFIX).replace("--", "/")
    return "/".join(parts[-PARTS_OF_A_RUN.get(parts[-1], 1) :]) if parts else path


def default_run_name(config: Experiment) -> str:
    """Return the name of a run that has none: its environments or data, and its model unless that is the default; with
    `sft` for fine-tuning, so that reinforcement learning on the same data is another run."""
    parts = ("sft" if config.sft_only else "", _task(config), _model(config))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(part for part in parts if part))
    return name.strip("-._")[:MAX_CHARACTERS] or "run"


def _task(config: Experiment) -> str:
    files = [*config.data.train_files, *config.data.validation_files] if config.data else []
    if config.evaluation is not None:
        return Path(config.evaluation.path).stem
    if learns_from_files(config) and files:
        return Path(files[0]).stem
    return "-".join(getattr(env.config, "simulator", env.name) for env in config.run_envs)


def _model(config: Experiment) -> str:
    path = (config.sft_only.path if config.sft_only else None) or config.policy.path
    if path is None:
        preset = config.policy.preset
        return "" if preset in (None, PolicyConfig(overrides={}).preset) else str(preset)
    name = model_name(path)
    # a model of a run is called like the run, a model of the hub like itself
    return name.split("/")[0] if Path(path).name in PARTS_OF_A_RUN else name.split("/")[-1]
