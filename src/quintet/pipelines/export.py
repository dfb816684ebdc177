"""Export of a trained model as a Hugging Face directory: adapters merged, weights cast, with a model card."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quintet import __version__
from quintet.config.deprecation import upgrade_keys
from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.pipelines.model_lookup import find_model
from quintet.pipelines.sft.final_weights import write_directory
from quintet.pipelines.summary import config_summary
from quintet.policies.lora import read_base_model_path
from quintet.tracking.loggers import read_metrics
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import (
    CHECKPOINT_PREFIX,
    MANIFEST_FILE,
    STATE_FILE,
    Checkpoint,
    open_checkpoint,
    read_checkpoint,
)
from quintet.training.checkpoint.hf_directory import HfDirectory
from quintet.training.checkpoint.safetensors_files import stored_sizes, write_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that weights can be cast to."""
CARD = "README.md"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Result of an export."""

    source: Path
    target: Path
    step: int | None
    """Step of the checkpoint; None if the source is not a checkpoint."""
    parameters: int
    size: int
    """Size of the weights in bytes."""


def export(
    source: str, target: Path, dtype: str | None = None, *, warn: Callable[[str], None] = warnings.warn
) -> ExportResult:
    """Write the model of a checkpoint, run, model directory or adapter directory in the format of `transformers`: full
    weights, cast to `dtype` if given, and a model card. The target appears only when it is complete.

    Of a run the last good checkpoint is exported; `warn` gets a message for each newer one.

    Raises:
        MachineError: there is no such model, the checkpoint is damaged, or the target exists or cannot be
            written.
    """
    if target.exists():
        raise MachineError(f"{target} already exists", "choose another directory, or remove it")
    parent = next(path for path in target.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        reason = "no permission to write in it" if parent.is_dir() else "not a directory"
        raise MachineError(f"cannot write {target}: {parent}: {reason}", "choose another directory")
    target_dtype = DTYPES[dtype] if dtype else None
    source_path = Path(source).expanduser()
    enclosing = _enclosing_checkpoint(source_path)
    if (source_path / ADAPTER).is_file():
        with _translate_read_errors(source_path):
            write_directory(target, lambda directory: _merge(source_path, directory, target_dtype))
        return _export_result(source_path, target, None)
    model = find_model(source, warn).policy
    if not any(model.glob("*.safetensors")):
        raise MachineError(
            f"{model} has no weights in safetensors", "save it again with save_pretrained(safe_serialization=True)"
        )
    checkpoint = enclosing if model == source_path else read_checkpoint(model.parent)

    def write(directory: Path) -> None:
        _convert(model, directory, target_dtype)
        if checkpoint is not None:
            (directory / CARD).write_text(_card(checkpoint, dtype, target.resolve()))

    with _translate_read_errors(model):
        write_directory(target, write)
    return _export_result(model, target, checkpoint.step if checkpoint else None)


def _export_result(source: Path, target: Path, step: int | None) -> ExportResult:
    sizes = [stored_sizes(file) for file in target.glob("*.safetensors")]
    return ExportResult(source, target, step, sum(count for count, _ in sizes), sum(size for _, size in sizes))


def _enclosing_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint that contains a model or adapter directory; None for directories of other programs with the
    same name.

    Raises:
        MachineError: it is damaged.
    """
    parent = path.resolve().parent
    is_checkpoint = parent.name.startswith(CHECKPOINT_PREFIX) and any(
        (parent / name).is_file() for name in (STATE_FILE, MANIFEST_FILE)
    )
    return open_checkpoint(parent) if is_checkpoint and path.is_dir() else None


@contextmanager
def _translate_read_errors(path: Path) -> Iterator[None]:
    """Translate errors of damaged safetensors files.

    Raises:
        MachineError: the weights are damaged.
    """
    try:
        yield
    except SafetensorError as error:
        raise MachineError(f"cannot read the weights at {path}: {error}", "use another copy") from error


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _convert(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy a model's directory, one file with weights after the other."""
    size = 0
    # hidden files are not part of the model; one may be the staging directory being written
    for path in sorted(path for path in source.iterdir() if not path.name.startswith(".")):
        if path.suffix == ".safetensors":
            tensors = {name: _converted(tensor, dtype) for name, tensor in load_file(path).items()}
            size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            write_tensors(target / path.name, tensors)
        elif path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)
    if dtype is not None:
        _change(target / "config.json", {"dtype": str(dtype).removeprefix("torch.")})
    if (target / INDEX).is_file():
        _change(target / INDEX, {"metadata": {"total_size": size}})


def _change(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2) + "\n")


def _merge(adapters: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Write the adapters' base model with the adapters merged, by default in the base model's dtype.

    Raises:
        MachineError: the base model is missing.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = read_base_model_path(adapters)
    if base is None or not (base / "config.json").is_file() or not (adapters / "adapter_model.safetensors").is_file():
        hint = f"put it there, or set base_model_name_or_path in {adapters / ADAPTER}"
        raise MachineError(f"the base model {base} of the adapters at {adapters} is missing", hint)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    merged = PeftModel.from_pretrained(model, adapters).merge_and_unload()
    stored = json.loads((base / "config.json").read_text())
    merged.to(dtype or DTYPES.get(str(stored.get("dtype") or stored.get("torch_dtype")), torch.float32))
    # keep the first name of tied weights
    named = reversed(merged.state_dict(keep_vars=True).items())
    unique = {id(tensor): (name, tensor.detach()) for name, tensor in named}
    HfDirectory.from_model(merged).write(target.parent, target.name, dict(unique.values()))
    tokenizer_source = adapters if (adapters / "tokenizer_config.json").is_file() else base
    AutoTokenizer.from_pretrained(tokenizer_source, local_files_only=True).save_pretrained(target)
    (target / CARD).write_text(_head({}) + f"\n# {adapters.resolve().parent.name}\n\nAdapters merged into `{base}`.\n")


def _head(more: Mapping[str, Any]) -> str:
    """Return the card's YAML front matter; `more` replaces what is true of most models."""
    values = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["quintet"], **more}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def _card(checkpoint: Checkpoint, dtype: str | None, target: Path) -> str:
    """Return the model card: origin, results, usage from the directory `target`, and configuration."""
    experiment = checkpoint.state["experiment"]
    config = Experiment.model_validate(upgrade_keys(experiment), strict=False)
    run = RunDirectory(checkpoint.directory.resolve().parent.parent)
    way = "supervised fine-tuning" if config.sft else "reinforcement learning"
    seconds = float(checkpoint.state["seconds"])
    task = {"pipeline_tag": "robotics"} if config.env.is_simulator else {}
    lines = [
        _head(task | ({"base_model": config.policy.path} if config.policy.path else {})),
        f"# {config.name}, step {checkpoint.step}",
        "",
        f"Trained by {way} with Quintet {__version__}: {checkpoint.step} of {config.training.steps} steps, "
        f"{seconds / 60:.1f} minutes. Weights are in {dtype or 'the training dtype'}.",
        "",
        *_table(("", ""), list(config_summary(config).items())),
        *_results(run, checkpoint.step),
        "## Usage",
        "",
        *(_ROBOT_USAGE if config.env.is_simulator else _text_usage(target)),
        "",
        "## Configuration",
        "",
        "```yaml",
        yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


_ROBOT_USAGE = ("Set `policy.path` of a run on the simulator to this directory.",)


def _text_usage(target: Path) -> tuple[str, ...]:
    return (
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"path = {str(target)!r}",
        "model = AutoModelForCausalLM.from_pretrained(path)",
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        "```",
    )


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
