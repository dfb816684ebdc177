"""Export of a trained model as a Hugging Face directory: adapters merged, weights cast, with a model card."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quintet.config.compose import load_experiment
from quintet.config.run_name import model_name
from quintet.contained_files import contained_path, read_contained
from quintet.errors import MachineError
from quintet.hardware import memory_bytes
from quintet.pipelines.adapted_model import adapter_base, available_base, load_adapted_model, merge_adapted_model
from quintet.pipelines.export_check import (
    CannotLoadError,
    ModelProbe,
    UnequalLogitsError,
    cast_tensor,
    check_directory,
    check_tensors,
    compute_logits,
    has_close_weights,
    load_plain_model,
    logit_difference,
    probe_arguments,
    require_equal_logits,
    round_weights,
)
from quintet.pipelines.model_card import CARD, plain_card, training_card
from quintet.pipelines.model_lookup import find_model
from quintet.pipelines.sft.final_weights import write_directory
from quintet.pipelines.training_record import TrainingRecord, checkpoint_record, read_record, write_record
from quintet.policies.lora import ADAPTER_DIRECTORY, CONFIG_FILE
from quintet.policies.model_files import check_model_files
from quintet.runtime.learners.learner_checkpoint import HF
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

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that weights can be cast to."""
INDEX = "model.safetensors.index.json"
FLOAT32_BYTES = 4
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of vision-language models about their images."""


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
    check: ExportCheck


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """Result of comparing the written directory with the trained policy."""

    rounding: float | None
    """Largest change of a logit by rounding the weights to their dtype in the files; None if logits were not
    compared."""
    reason: str = ""
    """Why only the tensors in the files were compared."""


def export(
    source: str,
    target: Path,
    dtype: str | None = None,
    *,
    trust_remote_code: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> ExportResult:
    """Write the model of a checkpoint, run, model directory or adapter directory in the format of `transformers`: full
    weights, cast to `dtype` if given, and a model card. The target appears only when it is complete, and when
    transformers has loaded it and computed the logits of the trained policy.

    Of a run the last good checkpoint is exported; `warn` gets a message for each newer one. Code in model directories
    runs only with `trust_remote_code`, whatever the run's configuration says: it may come from somebody else.

    Raises:
        MachineError: there is no such model, the checkpoint is damaged, the target exists or cannot be written, or the
            written model is not the trained policy.
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
    if (source_path / CONFIG_FILE).is_file():
        check_model_files(source_path)
        policy = _PolicySource.of(source_path, enclosing, trust_remote_code=trust_remote_code)
        card = _Card.of(source_path, enclosing, dtype, target.name)
        return _write(
            source_path, target, None, lambda directory: _merge(source_path, directory, target_dtype, policy, card)
        )
    model = find_model(source, warn).policy
    if not any(model.glob("*.safetensors")):
        raise MachineError(
            f"{model} has no weights in safetensors", "save it again with save_pretrained(safe_serialization=True)"
        )
    checkpoint = enclosing if model == source_path else read_checkpoint(model.parent)
    policy = _PolicySource.of(model, checkpoint, trust_remote_code=trust_remote_code)
    card = _Card.of(model, checkpoint, dtype, target.name)

    def write(directory: Path) -> ExportCheck:
        _convert(model, directory, target_dtype)
        if card.record is not None or not (directory / CARD).exists():
            card.write(directory, f"A copy of `{Path(os.path.abspath(model)).name}`, in {dtype or 'its own dtype'}.")
        return _check_converted(model, directory, target_dtype, policy)

    return _write(model, target, checkpoint.step if checkpoint else None, write)


def _write(source: Path, target: Path, step: int | None, write: Callable[[Path], ExportCheck]) -> ExportResult:
    checks: list[ExportCheck] = []
    with _translate_read_errors(source):
        write_directory(target, lambda directory: checks.append(write(directory)))
    size = sum(stored_sizes(file)[1] for file in target.glob("*.safetensors"))
    return ExportResult(source, target, step, _num_parameters(target), size, checks[0])


def _num_parameters(directory: Path) -> int:
    return sum(stored_sizes(file)[0] for file in directory.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class _Card:
    """Facts about the training in the model card."""

    record: TrainingRecord | None
    """None if the training is unknown."""
    dtype: str | None
    target: str
    """Name of the exported directory."""

    @classmethod
    def of(cls, directory: Path, checkpoint: Checkpoint | None, dtype: str | None, target: str) -> _Card:
        """Read the record of the checkpoint, or of the final weights of fine-tuning or the export in `directory`."""
        record = read_record(directory) if checkpoint is None else checkpoint_record(checkpoint)
        return cls(record, dtype, target)

    def write(self, directory: Path, origin: str, note: str = "") -> None:
        """Write card and record. `origin` is all that is known without a record; `note` is about the files."""
        if self.record is None:
            (directory / CARD).write_text(plain_card(self.target, origin), encoding="utf-8")
            return
        stored = _read(directory / "config.json")
        dtype = self.dtype or stored.get("dtype") or stored.get("torch_dtype") or "the dtype of the source"
        (directory / CARD).write_text(training_card(self.record, str(dtype), self.target, note), encoding="utf-8")
        write_record(directory, self.record)


@dataclass(frozen=True, slots=True)
class _PolicySource:
    """Settings with which the run that trained a policy loaded its model."""

    overrides: Mapping[str, Any]
    """`policy.overrides`."""
    trusted: bool
    """Whether code in model directories may run."""

    @classmethod
    def of(cls, directory: Path, checkpoint: Checkpoint | None, *, trust_remote_code: bool) -> _PolicySource:
        """Read the configuration of the checkpoint, or of the run directory that contains `directory`."""
        run = RunDirectory(directory.resolve().parent)
        if checkpoint is not None:
            state = checkpoint.entry("experiment", dict)
        else:
            state = (
                load_experiment(str(contained_path(run.path, run.config.name)), []).experiment.model_dump(mode="json")
                if run.config.is_file()
                else {}
            )
        policy = state.get("policy")
        overrides = policy.get("overrides") if isinstance(policy, dict) else None
        return cls(overrides if isinstance(overrides, dict) else {}, trust_remote_code)

    def config(self, base: Path) -> PreTrainedConfig:
        """Return the configuration of the model at `base` with the overrides."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(base, trust_remote_code=self.trusted, local_files_only=True)
        for name, value in self.overrides.items():
            setattr(config, name, value)
        return config


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


def _convert(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy a model's directory, one file with weights after the other."""
    size = 0
    # hidden files are not part of the model; one may be the staging directory being written
    for path in sorted(path for path in source.iterdir() if not path.name.startswith(".")):
        if path.suffix == ".safetensors":
            tensors = {name: cast_tensor(tensor, dtype) for name, tensor in load_file(path).items()}
            size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            write_tensors(target / path.name, tensors)
        elif path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(
            json.dumps(_with_dtype(_read(target / "config.json"), name), indent=2) + "\n", encoding="utf-8"
        )
    if (target / INDEX).is_file():
        _change(target / INDEX, {"metadata": {"total_size": size}})


def _read(path: Path) -> dict[str, Any]:
    """
    Raises:
        MachineError: the file is no JSON object.
    """
    try:
        content = json.loads(read_contained(path.parent, path.name))
    except (OSError, ValueError, RecursionError) as error:
        raise MachineError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise MachineError(f"{path} is no JSON object")
    return content


def _change(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**_read(path), **values}, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a model's configuration with another dtype, also in the configurations of its parts that have one."""
    parts = {
        key: _with_dtype(part, name)
        for key, part in config.items()
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys()
    }
    old = {"torch_dtype": name} if "torch_dtype" in config else {}
    return {**config, **parts, "dtype": name, **old}


def _merge(adapters: Path, target: Path, dtype: torch.dtype | None, policy: _PolicySource, card: _Card) -> ExportCheck:
    """Write the adapters' base model with the adapters merged, by default in the base model's dtype, and check it.

    Raises:
        MachineError: the base model is missing or exceeds the memory, or the written model is not the policy.
    """
    from transformers import AutoTokenizer

    base = adapter_base(adapters)
    if shortage := _memory_shortage(FLOAT32_BYTES * _num_parameters(base)):
        hint = "export on a machine with more memory"
        raise MachineError(f"cannot merge the adapters at {adapters} into {base}: {shortage}", hint)
    _check_adapters_of_checkpoint(adapters, base, policy)
    stored = dtype or _stored_dtype(base)
    merged, check = _merged_policy(adapters, base, stored, policy)
    merged.to(stored)
    # keep the first name of tied weights
    named = reversed(merged.state_dict(keep_vars=True).items())
    unique = {id(tensor): (name, tensor.detach()) for name, tensor in named}
    HfDirectory.from_model(merged).write(target.parent, target.name, dict(unique.values()))
    for name in PROCESSOR_FILES:
        if (base / name).is_file() and not (target / name).exists():
            shutil.copy2(base / name, target / name)
    tokenizer_source = adapters if (adapters / "tokenizer_config.json").is_file() else base
    AutoTokenizer.from_pretrained(
        tokenizer_source, local_files_only=True, trust_remote_code=policy.trusted
    ).save_pretrained(target)
    merged_into = f"Adapters merged into `{model_name(str(base.resolve()))}`."
    card.write(target, merged_into, note=merged_into)
    del merged
    check_directory(target, check.expected, check.arguments, trust_remote_code=policy.trusted)
    return ExportCheck(check.rounding)


class _Expected(NamedTuple):
    """Expected results of the written model for the arguments, and the largest change of a logit by rounding."""

    expected: ModelProbe
    arguments: Mapping[str, Tensor]
    rounding: float


def _merged_policy(
    adapters: Path, base: Path, stored: torch.dtype, policy: _PolicySource
) -> tuple[PreTrainedModel, _Expected]:
    """Return the policy with its adapters merged and its weights rounded to `stored`, in float32."""
    message = "merging the adapters changes the logits"
    try:
        merged, arguments, logits = _merge_and_compare(adapters, base, policy, message)
    except UnequalLogitsError:
        # large adapters magnify the rounding of float32
        merged, arguments, logits = _merge_and_compare(adapters, base, policy, message, torch.float64)
    round_weights(merged, stored)
    expected = ModelProbe.of(merged, arguments)
    return merged, _Expected(expected, arguments, logit_difference(expected.logits, logits))


def _merge_and_compare(
    adapters: Path, base: Path, policy: _PolicySource, message: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, Mapping[str, Tensor], Tensor]:
    """Return the model with merged adapters, the inputs of the probe, and the logits before the merge, which are those
    after it, computed in `dtype`.

    Raises:
        UnequalLogitsError: the merge changes the logits; the text is `message`.
    """
    adapted = load_adapted_model(adapters, base, config=policy.config(base), trust_remote_code=policy.trusted).to(dtype)
    arguments = probe_arguments(adapted.config, base)
    logits = compute_logits(adapted, arguments)
    merged = merge_adapted_model(adapted)
    require_equal_logits(compute_logits(merged, arguments), logits, message)
    return merged.float(), arguments, logits


def _check_converted(source: Path, target: Path, dtype: torch.dtype | None, policy: _PolicySource) -> ExportCheck:
    """Compare a converted copy with its source, and the model of a checkpoint with its adapters, if their base model is
    there.

    Raises:
        MachineError: they differ.
    """
    if shortage := _memory_shortage(2 * FLOAT32_BYTES * _num_parameters(source)):
        check_tensors(source, target, dtype)
        return ExportCheck(None, shortage)
    try:
        model = load_plain_model(source, trust_remote_code=policy.trusted)
    except CannotLoadError as error:
        check_tensors(source, target, dtype)
        return ExportCheck(None, f"transformers cannot load {source}: {error}")
    arguments = probe_arguments(model.config, source)
    logits = compute_logits(model, arguments)
    adapters = source.resolve().parent / ADAPTER_DIRECTORY
    if source.resolve().name == HF and (base := available_base(adapters)) is not None:
        _require_adapted_base(source, model, logits, adapters, base, policy)
    if dtype is not None:
        round_weights(model, dtype)
    expected = ModelProbe.of(model, arguments, logits if dtype is None else None)
    del model
    check_directory(target, expected, arguments, trust_remote_code=policy.trusted)
    return ExportCheck(logit_difference(expected.logits, logits))


def _require_adapted_base(
    merged_directory: Path, model: PreTrainedModel, logits: Tensor, adapters: Path, base: Path, policy: _PolicySource
) -> None:
    """Compare the `model` at `hf/` of a checkpoint and its `logits` with the base model and the checkpoint's adapters.

    Raises:
        UnequalLogitsError: they differ.
    """
    stored = _stored_dtype(merged_directory)
    merged, trained = _merged_policy(adapters, base, stored, policy)
    if has_close_weights(model, merged, stored):
        return
    message = f"{merged_directory} is not {base} with the adapters at {adapters}: the logits differ"
    try:
        require_equal_logits(logits, trained.expected.logits, message)
    except UnequalLogitsError as error:
        hint = f"if another model has replaced {base} since, restore it, or export a copy of {merged_directory}"
        raise UnequalLogitsError(str(error), hint) from error


def _check_adapters_of_checkpoint(adapters: Path, base: Path, policy: _PolicySource) -> None:
    """Compare adapters of a checkpoint and their base model with `hf/` beside them, if both fit into memory.

    Raises:
        MachineError: they differ, or transformers cannot load `hf/`.
    """
    directory = adapters.resolve().parent / HF
    if not (directory / "config.json").is_file() or _memory_shortage(2 * FLOAT32_BYTES * _num_parameters(directory)):
        return
    try:
        model = load_plain_model(directory, trust_remote_code=policy.trusted)
    except CannotLoadError as error:
        raise MachineError(f"transformers cannot load {directory}: {error}") from error
    logits = compute_logits(model, probe_arguments(model.config, directory))
    _require_adapted_base(directory, model, logits, adapters, base, policy)


def _memory_shortage(needed: int) -> str:
    """Return why something that needs so many bytes does not fit into host memory; empty if it fits."""
    memory = memory_bytes()
    text = f"that takes {needed / 2**30:.0f} GiB of memory, and there are {memory / 2**30:.0f}"
    return text if needed > memory else ""


def _stored_dtype(directory: Path) -> torch.dtype:
    stored = _read(directory / "config.json")
    return DTYPES.get(str(stored.get("dtype") or stored.get("torch_dtype")), torch.float32)
