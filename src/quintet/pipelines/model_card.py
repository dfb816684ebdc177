"""Model cards of exported models: what happened in training, results, usage and configuration, without paths of this
machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from quintet import __version__
from quintet.config.deprecation import upgrade_keys
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import LoraConfig
from quintet.config.native.training import SftConfig
from quintet.config.plan.row_counts import learns_from_files
from quintet.config.run_name import PARTS_OF_A_RUN
from quintet.errors import MachineError
from quintet.pipelines.summary import config_summary
from quintet.pipelines.training_record import RECORD_FILE, TrainingRecord

CARD = "README.md"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SECTIONS_OF_FINE_TUNING = ("name", "seed", "policy", "data", "sft", "validation", "checkpoint")
"""Sections of the configuration that supervised fine-tuning reads."""
SECTIONS_OF_SOLVED_EPISODES = ("env", "envs", "rollout")
"""Sections that it reads in addition if an expert solves episodes."""
SECTIONS_OF_OTHER_COMMANDS = ("evaluation", "generation")


def plain_card(name: str, text: str) -> str:
    """Return the card of a model whose training is unknown."""
    return _head({}) + f"\n# {name}\n\n{text} Exported by Quintet {__version__}.\n"


def _head(more: Mapping[str, Any]) -> str:
    """Return the card's YAML front matter; `more` replaces what is true of most models."""
    values = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["quintet"], **more}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def training_card(record: TrainingRecord, dtype: str, target: str, note: str = "") -> str:
    """Return the card of a trained model: training, data, results, usage from the directory named `target`, and
    configuration. `note` is a sentence about the files.

    Raises:
        MachineError: the record has no valid configuration.
    """
    try:
        config = Experiment.model_validate(upgrade_keys(record["experiment"]), strict=False)
    except ValidationError as error:
        hint = f"if it is from another version of Quintet, remove {RECORD_FILE}"
        raise MachineError(
            f"the record of training has no valid configuration: {error.errors()[0]['msg']}", hint
        ) from error
    base, step, steps = str(record["base_model"]), record["step"], record["steps"]
    is_of_hub = HUB_NAME.fullmatch(base) and base.rpartition("/")[2] not in PARTS_OF_A_RUN
    head = {"base_model": base} if is_of_hub else {}
    head |= {"pipeline_tag": "robotics"} if config.env.is_simulator and config.sft_only is None else {}
    lora = _lora(config)
    done = f"{step} steps" if steps in (None, step) else f"{step} of {steps} steps"
    means, minutes = " with LoRA" if lora else "", record["seconds"] / 60
    lines = [
        _head(head),
        f"# {config.name}, step {step}",
        "",
        f"Trained by {record['kind']}{means}, with Quintet {__version__}: {done}, {minutes:.1f} minutes. "
        f"Weights are in {dtype}.{note and f' {note}'}",
        "",
        *_table(("", ""), list(_training_rows(config, base, lora))),
        *_data(record["data"]),
        *_results(record, config),
        "## Usage",
        "",
        *(_ROBOT_USAGE if "robotics" in head.values() else _text_usage(target)),
        "",
        "## Configuration",
        "",
        "```yaml",
        yaml.safe_dump(_used_settings(config), sort_keys=False).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


_ROBOT_USAGE = ("Set `policy.path` of a run on the simulator to this directory.",)


def _text_usage(target: str) -> tuple[str, ...]:
    return (
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"path = {target!r}",
        "model = AutoModelForCausalLM.from_pretrained(path)",
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        "```",
    )


def _lora(config: Experiment) -> LoraConfig | None:
    return config.policy.lora if config.sft_only is None else config.sft_only.lora


def _training_rows(config: Experiment, base: str, lora: LoraConfig | None) -> Iterator[tuple[str, str]]:
    """Yield the settings of the training as rows of a table."""
    yield "base model", base
    if config.sft_only is None:
        yield from ((key, value) for key, value in config_summary(config).items() if key not in ("policy", "seed"))
        if config.warm_start is not None:
            yield "warm start", f"at most {config.warm_start.updates:,} updates on demonstrations"
    else:
        yield from _fine_tuning_rows(config, config.sft_only)
    if lora is not None:
        yield "LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, {', '.join(lora.target_modules)}"
    yield "seed", str(config.seed)


def _fine_tuning_rows(config: Experiment, sft: SftConfig) -> Iterator[tuple[str, str]]:
    if sft.episodes is not None:
        envs = ", ".join(env.name for env in config.run_envs)
        yield "demonstrations", f"{sft.episodes.episodes:,} episodes of {envs}, solved by an expert"
    if sft.distillation is not None:
        yield "loss", "cross-entropy and the divergence from a teacher"
    yield "epochs", str(sft.epochs)
    yield "conversations a step", str(sft.batch)
    yield "learning rate", f"{sft.optimizer.learning_rate:g}, schedule {sft.optimizer.schedule}"


def _used_settings(config: Experiment) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without those that the run does not read."""
    settings = _with_names(config, config.model_dump(mode="json", exclude_defaults=True))
    sft = config.sft_only
    if sft is None:
        return {key: value for key, value in settings.items() if key not in SECTIONS_OF_OTHER_COMMANDS}
    used = (*SECTIONS_OF_FINE_TUNING, *(SECTIONS_OF_SOLVED_EPISODES if sft.episodes is not None else ()))
    settings = {key: value for key, value in settings.items() if key in used}
    unused = {"lora", *(("path", "preset") if sft.path is not None else ())}
    policy = {key: value for key, value in settings.pop("policy", {}).items() if key not in unused}
    return settings | ({"policy": policy} if policy else {})


def _with_names(section: BaseModel | Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the `name` of each choice, such as an env, which is the default of what it chooses."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        child = section.get(key) if isinstance(section, Mapping) else getattr(section, key)
        if isinstance(value, Mapping) and isinstance(child, BaseModel | Mapping):
            name = {"name": child.name} if isinstance(child, BaseModel) and hasattr(child, "name") else {}
            named[key] = name | _with_names(child, value)
        else:
            named[key] = value
    return named


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    ruled = [head, tuple("---" for _ in head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in ruled), ""]


def _data(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the card's table of data files."""
    if not files:
        return []
    rows = [(str(file["split"]), str(file["name"]), f"{file['rows']:,}", f"`{file['sha256']}`") for file in files]
    return ["## Data", "", *_table(("split", "file", "rows", "SHA-256"), rows)]


def _results(record: TrainingRecord, config: Experiment) -> list[str]:
    """Return the card's table of the first and last validation."""
    if not record["results"]:
        return []
    rows = [
        (name.removeprefix("val/"), *(f"{value:.4g} (step {at})" for at, value in values))
        for name, values in sorted(record["results"].items())
    ]
    from_training_rows = learns_from_files(config) and not (config.data and config.data.validation_files)
    measured_on = "training rows, since no rows were held out" if from_training_rows else "held out"
    return ["## Results", "", *_table((measured_on, "first", "last"), rows)]
