"""Low-rank adapters (LoRA, arXiv:2106.09685) inside a model, and back out of it.

peft puts them beside the linear layers and the model keeps its class, so that nothing else needs to know of them.
What is stored is what peft stores, `adapter_model.safetensors` and `adapter_config.json`; a merged model is one like
any other.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError, MachineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ADAPTER_DIRECTORY", "add_lora", "has_lora", "load_adapters", "merge", "merged_weights", "save_adapters"]

ADAPTER_DIRECTORY = "lora_adapter"
"""Name of the directory with adapters, beside that of a model."""
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
ADAPTER = "default"
ALL_LINEAR = "all-linear"
STORED_PREFIX = "base_model.model."
"""Before every name in peft's files: the way from its own wrapper to the model."""
PATTERN_SIGNS = frozenset("*+?()[]{}|^$\\")


def add_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int = 0, key: str = "policy.lora") -> None:
    """Put adapters into the model, which they don't change yet, or those that `config.path` holds. From now on they
    alone get gradients. `seed` decides their first values, `key` is where the configuration stands.

    Raises:
        ConfigError: the model has no such layers, or stored adapters aren't of the kind that is asked for.
        MachineError: stored adapters are missing or damaged.
    """
    from peft import inject_adapter_in_model

    settings = _settings(config, key)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, model, ADAPTER)
        except ValueError as error:
            raise _no_such_layers(model, config, key) from error
    _refuse_tied(model, config, key)
    if config.path is not None:
        load_adapters(model, Path(config.path))


def _settings(config: LoraConfig, key: str) -> Any:
    """peft's own configuration: ours, or that of the adapters to start from."""
    from peft import LoraConfig as Settings

    if config.path is not None:
        return _stored_settings(config, key)
    return Settings(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_targets(config.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _targets(names: tuple[str, ...]) -> str | list[str]:
    """A single name with the signs of a regular expression is one, for whole names of layers."""
    if ALL_LINEAR in names:
        return ALL_LINEAR
    return names[0] if len(names) == 1 and PATTERN_SIGNS & set(names[0]) else list(names)


def _stored_settings(config: LoraConfig, key: str) -> Any:
    from peft import LoraConfig as Settings
    from peft import PeftConfig

    directory = Path(str(config.path))
    if not (directory / SETTINGS).is_file() or not (directory / WEIGHTS).is_file():
        hint = f"{key}.path names a directory with {SETTINGS} and {WEIGHTS}"
        raise MachineError(f"no adapters at {directory}", hint)
    settings = PeftConfig.from_pretrained(directory)
    if not isinstance(settings, Settings):
        raise ConfigError(f"{directory} holds {settings.peft_type} adapters, not LoRA", key=f"{key}.path")
    for ours, theirs in {"rank": settings.r, "alpha": settings.lora_alpha}.items():
        if getattr(config, ours) != theirs:
            raise ConfigError(
                f"{key}.{ours} = {getattr(config, ours):g}, but the adapters at {directory} have {theirs:g}",
                key=f"{key}.{ours}",
                value=getattr(config, ours),
                hint=f"set {key}.{ours}={theirs:g}",
            )
    settings.init_lora_weights, settings.inference_mode = True, False
    return settings


def _no_such_layers(model: PreTrainedModel, config: LoraConfig, key: str) -> ConfigError:
    there = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = ", ".join(config.target_modules)
    return ConfigError(
        f"{key}.target_modules = {names}: {type(model).__name__} has no such layers",
        key=f"{key}.target_modules",
        value=config.target_modules,
        hint=f"it has {', '.join(sorted(there))}; {ALL_LINEAR} takes every one but the head",
    )


def _refuse_tied(model: PreTrainedModel, config: LoraConfig, key: str) -> None:
    """Embedding and head that are one matrix can't be adapted apart: merged, they would be two."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.tie_word_embeddings and any(module in ends for _, module in _adapted(model)):
        raise ConfigError(
            f"{key}.target_modules = {', '.join(config.target_modules)}: embedding and head of this model are one",
            key=f"{key}.target_modules",
            value=config.target_modules,
            hint=f"leave them out; {ALL_LINEAR} does",
        )


def has_lora(model: nn.Module) -> bool:
    """Whether there are adapters in it."""
    return any(True for _ in _adapted(model))


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with adapters, by name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' matrices under the names that peft's files have."""
    marks = (f".{ADAPTER}.", f".{ADAPTER}")
    return {
        STORED_PREFIX + name.replace(marks[0], ".").removesuffix(marks[1]): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the model's weights would be with the adapters in them, W + (alpha / rank) B A, under the model's own
    names. The model stays as it is: merged and taken apart again, its weights would be rounded."""
    layers = dict(_adapted(model))
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        owner, found, kind = name.partition(".base_layer.")
        whole = tensor + layers[owner].get_delta_weight(ADAPTER) if found and kind == "weight" else tensor
        weights[f"{owner}.{kind}" if found else name] = whole
    return weights


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Add the adapters to the weights and take them out: a plain model stays, all of whose weights get gradients."""
    for name, layer in list(_adapted(model)):
        plain = layer.get_base_layer()
        plain.weight += layer.get_delta_weight(ADAPTER)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(requires_grad=True)


def save_adapters(model: PreTrainedModel, directory: Path, base: str | Path) -> None:
    """Write the adapters as peft reads them; `base` is the model that they belong to."""
    from safetensors.torch import save_file

    settings: Any = copy.copy(model.peft_config[ADAPTER])
    if not isinstance(settings.target_modules, str):
        settings.target_modules = sorted(settings.target_modules)
    settings.base_model_name_or_path, settings.inference_mode = str(base), True
    directory.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(directory)
    tensors = {name: parameter.detach().contiguous() for name, parameter in _adapters(model).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: nn.Module, directory: Path) -> None:
    """Take up what `save_adapters`, or peft, wrote.

    Raises:
        MachineError: the file is missing, or its adapters aren't those of the model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = directory / WEIGHTS
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise MachineError(f"can't read adapters from {path}: {error}") from error
    own = _adapters(model)
    if fault := _difference(own, stored):
        raise MachineError(f"the adapters at {path} don't fit: {fault}", "take those of the same model")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])


def _difference(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> str | None:
    """In what they differ, in words; the first of all."""
    for name in sorted(own.keys() ^ stored.keys()):
        return f"{_short(name)} is {'missing' if name in own else 'too many'}"
    for name, tensor in own.items():
        if tensor.shape != stored[name].shape:
            return f"{_short(name)} is {list(stored[name].shape)}, not {list(tensor.shape)}"
    return None


def _short(name: str) -> str:
    return re.sub(rf"^{re.escape(STORED_PREFIX)}", "", name)
