"""Whether the layers that adapters are to go into are in the model, as its files name them: without torch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from quintet.config.compose import Composed
from quintet.config.faults import Fault
from quintet.config.native import Experiment
from quintet.config.native.policy import LoraConfig
from quintet.config.plan.models import config_file, find_models
from quintet.config.plan.shapes import Shape
from quintet.config.plan.steps import fine_tuning
from quintet.config.plan.values import fault

__all__ = ["ALL_LINEAR", "NO_SUCH_LAYERS", "ONE_MATRIX", "adapter_faults", "is_pattern", "there_are"]

ALL_LINEAR = "all-linear"
NO_SUCH_LAYERS = "the model has no such layers"
ONE_MATRIX = "embedding and head of this model are one"
ENDS = ("embed_tokens", "lm_head")
"""Embedding and head; a head that is the embedding has no tensor of its own."""
PATTERN_SIGNS = frozenset("*+?()[]{}|^$\\")
INDEX = "model.safetensors.index.json"
LARGEST = 1 << 26
"""Bytes of the longest list of tensors that is read."""


def is_pattern(names: Collection[str]) -> bool:
    """A single name with the signs of a regular expression is one, for whole names of layers."""
    return len(names) == 1 and bool(PATTERN_SIGNS & set(*names))


def there_are(layers: Iterable[str]) -> str:
    """What to do about layers that aren't there: those that are."""
    found = sorted({name.rpartition(".")[2] for name in layers})
    return f"it has {', '.join(found)}; {ALL_LINEAR} takes every one but the head"


def adapter_faults(composed: Composed) -> Iterator[Fault]:
    """Of each `target_modules` that name nothing in the model; of a model that isn't known or isn't here, none."""
    config = composed.experiment
    if config.evaluation is not None:
        return
    for key, lora in _asked(config):
        shape = find_models(config).of("actor")
        if lora.path is None and ALL_LINEAR not in lora.target_modules and shape is not None and shape.known:
            yield from _targets(composed, f"{key}.target_modules", lora.target_modules, shape)


def _asked(config: Experiment) -> Iterator[tuple[str, LoraConfig]]:
    if config.sft is not None and config.sft.lora is not None:
        yield "sft.lora", config.sft.lora
    if fine_tuning(config) is None and config.policy.lora is not None:
        yield "policy.lora", config.policy.lora


def _targets(composed: Composed, key: str, targets: tuple[str, ...], shape: Shape) -> Iterator[Fault]:
    layers = _layers(composed.experiment, shape)
    if not layers:
        return
    try:
        found = _named(targets, layers)
    except re.error as error:
        yield fault(composed, key, f"that is no regular expression: {error}", f"{ALL_LINEAR} needs none")
        return
    if is_pattern(targets) and shape.vision:
        return  # in memory its layers have other whole names than in its files
    if not found:
        plain = (name for name in layers if "norm" not in name and "embed" not in name)
        yield fault(composed, key, NO_SUCH_LAYERS, there_are(plain))
    elif shape.tied and any(name.rpartition(".")[2] in ENDS for name in found):
        yield fault(composed, key, ONE_MATRIX, f"leave them out; {ALL_LINEAR} does")


def _named(targets: tuple[str, ...], layers: Collection[str]) -> list[str]:
    """Layers that are meant."""
    if is_pattern(targets):
        pattern = re.compile(targets[0])
        return [name for name in layers if pattern.fullmatch(name)]
    return [name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)]


def _layers(config: Experiment, shape: Shape) -> list[str]:
    """Whole names of the model's layers; empty where its files don't tell them."""
    path = config.sft.path if config.sft and config.sft.path else config.policy.path
    if path is None:
        return list(_made(shape))
    file = config_file(path)
    tensors = [] if file is None else _tensors(file.parent)
    layers = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    return sorted(layers | {"lm_head"}) if layers else []


def _made(shape: Shape) -> Iterator[str]:
    """Of a policy that is made on the spot."""
    yield from ("model.embed_tokens", "lm_head")
    for layer in range(shape.layers):
        yield from (f"model.layers.{layer}.self_attn.{name}" for name in shape.attention_linears)
        if shape.experts is None:
            yield from (f"model.layers.{layer}.mlp.{name}" for name in shape.mlp_linears)
        else:
            yield f"model.layers.{layer}.mlp.gate"


def _tensors(directory: Path) -> list[str]:
    """Names of the tensors in a model's files; empty where they can't be read, which is told when it is loaded."""
    try:
        index = directory / INDEX
        if index.is_file() and index.stat().st_size <= LARGEST:
            return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return [name for file in directory.glob("*.safetensors") for name in _header(file) if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError):
        return []


def _header(file: Path) -> Collection[str]:
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        found: dict[str, object] = json.loads(opened.read(min(size, LARGEST)))
    return found
