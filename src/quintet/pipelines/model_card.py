"""Model cards of exported models: origin, results, usage and configuration, without paths of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from quintet import __version__
from quintet.config.deprecation import upgrade_keys
from quintet.config.native.experiment import Experiment
from quintet.pipelines.summary import config_summary
from quintet.tracking.loggers import read_metrics
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import Checkpoint

CARD = "README.md"
FINE_TUNING_STATE = "reached"
"""Entry of `state.json` that only checkpoints of supervised fine-tuning have."""


def plain_card(name: str, text: str) -> str:
    """Return the card of a model whose training is unknown."""
    return _head({}) + f"\n# {name}\n\n{text} Exported by Quintet {__version__}.\n"


def _head(more: Mapping[str, Any]) -> str:
    """Return the card's YAML front matter; `more` replaces what is true of most models."""
    values = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["quintet"], **more}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def checkpoint_card(checkpoint: Checkpoint, dtype: str | None, target: str) -> str:
    """Return the card of a checkpoint: origin, results, usage from the directory named `target`, and configuration."""
    experiment = checkpoint.state["experiment"]
    config = Experiment.model_validate(upgrade_keys(experiment), strict=False)
    run = RunDirectory(checkpoint.directory.resolve().parent.parent)
    is_tuned = FINE_TUNING_STATE in checkpoint.state
    way = "supervised fine-tuning" if is_tuned else "reinforcement learning"
    steps = f"{checkpoint.step} updates" if is_tuned else f"{checkpoint.step} of {config.training.steps} steps"
    summary = _fine_tuning_summary(config) if is_tuned else config_summary(config)
    seconds = float(checkpoint.state["seconds"])
    task = {"pipeline_tag": "robotics"} if config.env.is_simulator else {}
    lines = [
        _head(task),
        f"# {config.name}, step {checkpoint.step}",
        "",
        f"Trained by {way} with Quintet {__version__}: {steps}, "
        f"{seconds / 60:.1f} minutes. Weights are in {dtype or 'the training dtype'}.",
        "",
        *_table(("", ""), [(key, str(_without_paths(value))) for key, value in summary.items()]),
        *_results(run, checkpoint.step),
        "## Usage",
        "",
        *(_ROBOT_USAGE if config.env.is_simulator else _text_usage(target)),
        "",
        "## Configuration",
        "",
        "```yaml",
        yaml.safe_dump(_without_paths(config.model_dump(mode="json", exclude_defaults=True)), sort_keys=False).rstrip(),
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


def _fine_tuning_summary(config: Experiment) -> dict[str, str]:
    """Return the settings of supervised fine-tuning."""
    sft = config.sft
    if sft is None:
        return {}
    return {
        "model": sft.path or config.policy.preset or str(config.policy.path),
        "epochs": str(sft.epochs),
        "conversations an update": str(sft.batch),
        "learning rate": f"{sft.optimizer.learning_rate:g}",
        "seed": str(config.seed),
    }


def _without_paths(value: Any) -> Any:
    """Replace absolute paths in a configuration by their last part: they name directories of this machine."""
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and "\n" not in value
    return Path(value).name if is_path else value


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    ruled = [head, tuple("---" for _ in head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in ruled), ""]


def _results(run: RunDirectory, step: int) -> list[str]:
    """Return the card's table of the first and last validation up to that step."""
    lines = [line for line in read_metrics(run.metrics) if line["step"] <= step] if run.metrics.is_file() else []
    history: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("val/") and value is not None:
                history.setdefault(name, []).append((int(line["step"]), float(value)))
    if not history:
        return []
    rows = [
        (name.removeprefix("val/"), *(f"{value:.4g} (step {at})" for at, value in (values[0], values[-1])))
        for name, values in sorted(history.items())
    ]
    return ["## Results", "", *_table(("held out", "first", "last"), rows)]
