"""A trained model as a directory to give away: adapters merged, types converted, a model card beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
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
from quintet.config.native import Experiment
from quintet.errors import MachineError
from quintet.pipelines.closing import config_summary
from quintet.pipelines.evaluate import find_model
from quintet.pipelines.sft_export import put
from quintet.policies.adapters import base_of
from quintet.tracking.loggers import read_metrics
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint import MANIFEST, NAME, STATE, Checkpoint, open_checkpoint, read_checkpoint
from quintet.training.hf_directory import HfDirectory
from quintet.training.tensor_files import stored_sizes, write_tensors

__all__ = ["DTYPES", "Exported", "export"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that weights can be converted to."""
CARD = "README.md"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    source: Path
    target: Path
    step: int | None
    """Of the checkpoint; None where it was none."""
    parameters: int
    size: int
    """Bytes of the weights."""


def export(source: str, target: Path, dtype: str | None = None) -> Exported:
    """Write the model of a checkpoint, a run, or a directory with a model or with adapters, as `transformers` reads
    it: whole weights, in `dtype` where one is named, and a model card. The directory is there whole or not at all.

    Raises:
        MachineError: there is no such model, the checkpoint is damaged, or something lies at the target.
    """
    if target.exists():
        raise MachineError(f"{target} is there already", "name another directory, or remove it")
    wanted = DTYPES[dtype] if dtype else None
    place = Path(source).expanduser()
    given = _checkpoint_around(place)
    if (place / ADAPTER).is_file():
        with _readable(place):
            put(target, lambda directory: _merge(place, directory, wanted))
        return _told(place, target, None)
    model = find_model(source).policy
    if not any(model.glob("*.safetensors")):
        raise MachineError(f"{model} has no weights in safetensors", "save it once more by transformers")
    checkpoint = given if model == place else read_checkpoint(model.parent)

    def write(directory: Path) -> None:
        _convert(model, directory, wanted)
        if checkpoint is not None:
            (directory / CARD).write_text(_card(checkpoint, dtype))

    with _readable(model):
        put(target, write)
    return _told(model, target, checkpoint.step if checkpoint else None)


def _told(source: Path, target: Path, step: int | None) -> Exported:
    sizes = [stored_sizes(file) for file in target.glob("*.safetensors")]
    return Exported(source, target, step, sum(count for count, _ in sizes), sum(size for _, size in sizes))


def _checkpoint_around(place: Path) -> Checkpoint | None:
    """The checkpoint that a directory with a model or with adapters is part of; other programs have directories of
    that name, too.

    Raises:
        MachineError: it is damaged.
    """
    around = place.resolve().parent
    ours = around.name.startswith(NAME) and any((around / name).is_file() for name in (STATE, MANIFEST))
    return open_checkpoint(around) if ours and place.is_dir() else None


@contextmanager
def _readable(place: Path) -> Iterator[None]:
    """
    Raises:
        MachineError: weights are torn.
    """
    try:
        yield
    except SafetensorError as error:
        raise MachineError(f"can't read the weights at {place}: {error}", "take another copy of them") from error


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _convert(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy a model's directory, one file with weights after the other."""
    size = 0
    # what begins with a point is no part of the model, and may be the very directory that is written
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
    """The model that the adapters belong to, with them in it; in that model's type where none is named.

    Raises:
        MachineError: that model isn't here.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = base_of(adapters)
    if base is None or not (base / "config.json").is_file() or not (adapters / "adapter_model.safetensors").is_file():
        hint = f"put it there, or set base_model_name_or_path in {adapters / ADAPTER}"
        raise MachineError(f"the adapters at {adapters} belong to {base}, and there is no model", hint)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    merged = PeftModel.from_pretrained(model, adapters).merge_and_unload()
    stored = json.loads((base / "config.json").read_text())
    merged.to(dtype or DTYPES.get(str(stored.get("dtype") or stored.get("torch_dtype")), torch.float32))
    # of tied weights the first name, as everywhere
    named = reversed(merged.state_dict(keep_vars=True).items())
    held = {id(tensor): (name, tensor.detach()) for name, tensor in named}
    HfDirectory.of(merged).write(target.parent, target.name, dict(held.values()))
    words = adapters if (adapters / "tokenizer_config.json").is_file() else base
    AutoTokenizer.from_pretrained(words, local_files_only=True).save_pretrained(target)
    (target / CARD).write_text(_head({}) + f"\n# {adapters.resolve().parent.name}\n\nAdapters merged into `{base}`.\n")


def _head(more: Mapping[str, Any]) -> str:
    """What the hub reads of a card."""
    values = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["quintet"], **more}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def _card(checkpoint: Checkpoint, dtype: str | None) -> str:
    """Where the model comes from, how well it does, and the configuration that made it."""
    experiment = checkpoint.state["experiment"]
    config = Experiment.model_validate(experiment, strict=False)
    run = RunDirectory(checkpoint.directory.resolve().parent.parent)
    way = "supervised fine-tuning" if config.sft else "reinforcement learning"
    seconds = float(checkpoint.state["seconds"])
    lines = [
        _head({"base_model": config.policy.path} if config.policy.path else {}),
        f"# {config.name}, step {checkpoint.step}",
        "",
        f"Trained by {way} with Quintet {__version__}: {checkpoint.step} of {config.training.steps} steps, "
        f"{seconds / 60:.1f} minutes. Weights are in {dtype or 'the type they were trained in'}.",
        "",
        *_table(("", ""), list(config_summary(config).items())),
        *_results(run, checkpoint.step),
        "## Loading it",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("this directory")',
        'tokenizer = AutoTokenizer.from_pretrained("this directory")',
        "```",
        "",
        "## Configuration",
        "",
        "```yaml",
        yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    ruled = [head, tuple("---" for _ in head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in ruled), ""]


def _results(run: RunDirectory, step: int) -> list[str]:
    """What validations up to that step measured: the first, and the last."""
    lines = [line for line in read_metrics(run.metrics) if line["step"] <= step] if run.metrics.is_file() else []
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("val/") and value is not None:
                found.setdefault(name, []).append((int(line["step"]), float(value)))
    if not found:
        return []
    rows = [
        (name.removeprefix("val/"), *(f"{value:.4g} (step {at})" for at, value in (values[0], values[-1])))
        for name, values in sorted(found.items())
    ]
    return ["## Results", "", *_table(("held out", "first", "last"), rows)]
