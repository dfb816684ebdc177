"""Changes of a configuration that its run needs on a machine: devices, packages, models and data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintet import hardware
from quintet.cli.choices import data_file_problems, missing_packages, unknown_choices
from quintet.config.composed import ComposedConfig, config_value
from quintet.config.native.experiment import Experiment
from quintet.config.native.section import Section
from quintet.config.problems import ConfigProblem

MODEL = "runs/small/checkpoints/global_step_0/hf"
MAKE_MODEL = "quintet train name=small training.steps=0 warm_start=null validation.before_training=false"
"""Creates `MODEL`, which has random weights."""
MODEL_CONTEXT = 2048
"""Tokens that it reads."""
DATA = "data/addition"
MAKE_DATA = f"quintet data make addition {DATA} --train 200 --validation 16"
ROWS = 200
DATA_KEYS: Mapping[str, object] = {
    "data.train_files": [f"{DATA}/train.parquet"],
    "data.validation_files": [f"{DATA}/validation.parquet"],
}
PROMPT_KEY = "data.prompt_key"
TRIAL_GROUPS = 16
"""Prompts of a step of these rows."""
MODELS = ("policy.path", "critic.path", "reference.path", "reward.model.path", "sft.path")
LEARNERS = ("actor", "critic", "reference")
ENGINE = "rollout.engine"


@dataclass(frozen=True, slots=True)
class Change:
    """Values of native keys that a machine needs, and why."""

    values: Mapping[str, object]
    reason: str
    prepare: str | None = None
    """Command that creates what they name."""


def machine_changes(composed: ComposedConfig, devices: int) -> Iterator[Change]:
    """Yield the changes for a machine with that many devices, its GPUs or one CPU."""
    config = composed.experiment
    yield from _gpu_changes(config)
    yield from _device_changes(config, devices)
    yield from _package_changes(composed)
    yield from _missing_files(composed)


def _device_changes(config: Experiment, devices: int) -> Iterator[Change]:
    unit = f"{devices} device{'s' * (devices > 1)}"
    placed = config.placement
    if placed.nodes > 1:
        yield Change({"placement.nodes": 1}, "this is one machine")
    if placed.devices_per_node > devices:
        yield Change({"placement.devices_per_node": devices}, f"this machine has {unit}")
    keys = [f"{name}.parallel.{size}" for name in LEARNERS for size in _sizes(getattr(config, name).parallel)]
    if not _is_replaced(config.rollout.engine):
        keys += [f"{ENGINE}_options.{size}_parallel" for size in ("tensor", "pipeline")]
    for key in keys:
        size = config_value(config, key)
        if isinstance(size, int) and size > 1 and devices % size:
            yield Change({key: 1}, f"this machine has {unit}")


def _sizes(section: Section) -> list[str]:
    return [name for name, value in section if isinstance(value, int) and not isinstance(value, bool)]


def _is_replaced(engine: str) -> bool:
    """Return whether the embedded engine takes the place of an engine for GPUs, whose options then do not matter."""
    return engine != "hf" and not hardware.num_gpus()


def _gpu_changes(config: Experiment) -> Iterator[Change]:
    """Yield changes for a machine without a GPU."""
    if hardware.num_gpus():
        return
    if _is_replaced(config.rollout.engine):
        yield Change({ENGINE: "hf"}, "this machine has no GPU; the embedded engine also runs on CPUs")
    if config.policy.attention == "flash_attention_2":
        yield Change({"policy.attention": "sdpa"}, "flash attention needs a GPU")
    for key in ("policy.dtype", "critic.dtype", "reference.dtype", f"{ENGINE}_options.dtype"):
        if config_value(config, key) == "float16":
            yield Change({key: "float32"}, "CPUs compute float16 slowly")


def _package_changes(composed: ComposedConfig) -> Iterator[Change]:
    config = composed.experiment
    for problem in missing_packages(composed):
        value: dict[str, object] = {}
        if problem.key == "tracking.loggers":
            value = {problem.key: [name for name in config.tracking.loggers if name != problem.value] or ["console"]}
        elif problem.key == ENGINE:
            value = {ENGINE: "hf"}
        elif problem.key.endswith(".backend"):
            value = {problem.key: "fsdp"}
        elif problem.key.endswith(".liger"):
            value = {problem.key: False}
        if value:
            yield Change(value, problem.message.partition(") ")[2] or problem.message)


def _missing_files(composed: ComposedConfig) -> Iterator[Change]:
    """Yield a small model and generated rows in place of those that are not on this machine."""
    config = composed.experiment
    missing = {problem.key: problem for problem in unknown_choices(composed) if problem.key in MODELS}
    if absent := {key: MODEL for key in missing if config_value(config, key) != MODEL}:
        names = ", ".join(str(missing[key].value) for key in absent)
        yield Change(absent, f"not on this machine: {names}; this model has random weights", MAKE_MODEL)
    uses_model = config.policy.path == MODEL or "policy.path" in missing
    limits = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")
    if uses_model and sum(int(str(config_value(config, key))) for key in limits) > MODEL_CONTEXT:
        yield Change(dict.fromkeys(limits, MODEL_CONTEXT // 4), f"that model reads {MODEL_CONTEXT:,} tokens")
    files = {problem.key: problem for problem in data_file_problems(composed)}
    absent_files = {key: value for key, value in DATA_KEYS.items() if key in files and not _is_set(config, key, value)}
    if absent_files:
        columns = {} if config_value(config, PROMPT_KEY) == "prompt" else {PROMPT_KEY: "prompt"}
        names = ", ".join(str(files[key].value) for key in absent_files)
        yield Change(absent_files | columns, f"not on this machine: {names}; these rows are sums", MAKE_DATA)
    training = config.training
    if (absent_files or files) and training.groups_per_step > TRIAL_GROUPS:
        sizes = {"training.groups_per_step": TRIAL_GROUPS, "training.mini_batches": min(training.mini_batches, 4)}
        yield Change(sizes, f"those files have {ROWS} rows")


def _is_set(config: Experiment, key: str, value: Any) -> bool:
    return bool(list(config_value(config, key) or ()) == value)


def remaining_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield what is missing on this machine, except the model and the data that commands create first."""
    problems = (*unknown_choices(composed), *missing_packages(composed), *data_file_problems(composed))
    yield from (problem for problem in problems if not str(problem.value).startswith((MODEL, f"{DATA}/")))
