"""Check that the target layers of LoRA exist in the model, by the tensor names in its files."""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quintet.config.composed import ComposedConfig
from quintet.config.model_locations.locations import config_file
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import LoraConfig
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.models import find_models, policy_path
from quintet.config.problems import ConfigProblem

ALL_LINEAR = "all-linear"
NO_SUCH_LAYERS = "the model has no such layers"
TIED_EMBEDDINGS = "embedding and head of this model share one matrix"
EMBEDDING_AND_HEAD = ("embed_tokens", "lm_head")
"""A tied head has no tensor in the files."""
PATTERN_SIGNS = frozenset("*+?()[]{}|^$\\")
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26
"""A larger index is not read."""


def is_pattern(names: Collection[str]) -> bool:
    """Return whether the names are a single regular expression for full layer names."""
    return len(names) == 1 and bool(PATTERN_SIGNS & set(*names))


def available_layers_hint(key: str, layers: Iterable[str]) -> str:
    """Return a hint that lists the layers of the model; `key` is that of the target layers."""
    names = sorted({name.rpartition(".")[2] for name in layers})
    return f"it has {', '.join(names)}; for all linear layers but the head: {key}={ALL_LINEAR}"


def targets_without_head_hint(key: str, targets: Collection[str]) -> str:
    """Return a hint with targets that leave out embedding and head."""
    others = [target for target in targets if target.rpartition(".")[2] not in EMBEDDING_AND_HEAD]
    shorter = f"{key}=[{', '.join(others)}], or " if 0 < len(others) < len(targets) else ""
    return f"{shorter}{key}={ALL_LINEAR}"


def adapter_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield each `target_modules` without a match in the model, if its files are available and of a known family."""
    config = composed.experiment
    if config.evaluation is not None:
        return
    for key, lora in _lora_sections(config):
        shape = find_models(config).of("actor")
        if lora.path is None and ALL_LINEAR not in lora.target_modules and shape is not None and shape.known:
            yield from _check_targets(composed, f"{key}.target_modules", lora.target_modules, shape)


def _lora_sections(config: Experiment) -> Iterator[tuple[str, LoraConfig]]:
    if config.sft is not None and config.sft.lora is not None:
        yield "sft.lora", config.sft.lora
    if config.sft_only is None and config.policy.lora is not None:
        yield "policy.lora", config.policy.lora


def _check_targets(
    composed: ComposedConfig, key: str, targets: tuple[str, ...], shape: ModelShape
) -> Iterator[ConfigProblem]:
    layers = _layers(composed.experiment, shape)
    if not layers:
        return
    try:
        matched = _match(targets, layers)
    except re.error as error:
        yield composed.problem(key, f"invalid regular expression: {error}", f"{key}={ALL_LINEAR}")
        return
    if is_pattern(targets) and shape.vision:
        return  # full names differ between its files and the loaded model
    if not matched:
        linear = (name for name in layers if "norm" not in name and "embed" not in name)
        yield composed.problem(key, NO_SUCH_LAYERS, available_layers_hint(key, linear))
    elif shape.tied and any(name.rpartition(".")[2] in EMBEDDING_AND_HEAD for name in matched):
        yield composed.problem(key, TIED_EMBEDDINGS, targets_without_head_hint(key, targets))


def _match(targets: tuple[str, ...], layers: Collection[str]) -> list[str]:
    if is_pattern(targets):
        pattern = re.compile(targets[0])
        return [name for name in layers if pattern.fullmatch(name)]
    return [name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)]


def _layers(config: Experiment, shape: ModelShape) -> list[str]:
    """Return the full names of the model's layers, an empty list if they are unknown."""
    path = policy_path(config)
    if path is None:
        return list(_preset_layers(shape))
    file = config_file(path)
    tensors = [] if file is None else _tensors(file.parent)
    layers = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    return sorted(layers | {"lm_head"}) if layers else []


def _preset_layers(shape: ModelShape) -> Iterator[str]:
    yield from ("model.embed_tokens", "lm_head")
    for layer in range(shape.layers):
        yield from (f"model.layers.{layer}.self_attn.{name}" for name in shape.attention_linears)
        if shape.experts is None:
            yield from (f"model.layers.{layer}.mlp.{name}" for name in shape.mlp_linears)
        else:
            yield f"model.layers.{layer}.mlp.gate"


def _tensors(directory: Path) -> list[str]:
    """Return the tensor names in a model's files, an empty list if they cannot be read: loading reports that."""
    try:
        index = directory / INDEX
        if index.is_file() and index.stat().st_size <= MAX_INDEX_BYTES:
            return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return [name for file in directory.glob("*.safetensors") for name in _names_in(file)]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError):
        return []


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())
