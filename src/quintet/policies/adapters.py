"""Low-rank adapters (LoRA, arXiv:2106.09685) inside a model, and back out of it.

peft puts them beside the linear layers and the model keeps its class, so that nothing else needs to know of them.
What is stored is what peft stores, `adapter_model.safetensors` and `adapter_config.json`; a merged model is one like
any other.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quintet.config.adapters import ALL_LINEAR, NO_SUCH_LAYERS, ONE_MATRIX, is_pattern, there_are
from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError, MachineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ADAPTER_DIRECTORY",
    "adapter_tables",
    "add_lora",
    "base_of",
    "has_lora",
    "head_weight",
    "is_adapted",
    "is_adapter",
    "load_adapters",
    "merge",
    "merge_stream",
    "merged_weights",
    "plain_weights",
    "read_adapters",
    "save_adapters",
    "scales",
    "stored_adapters",
]

ADAPTER_DIRECTORY = "lora_adapter"
"""Name of the directory with adapters, beside that of a model."""
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
ADAPTER = "default"
PARTS = {
    "base_layer.weight": "whole",
    f"lora_A.{ADAPTER}.weight": "first",
    f"lora_B.{ADAPTER}.weight": "second",
    f"lora_embedding_A.{ADAPTER}": "first",
    f"lora_embedding_B.{ADAPTER}": "second",
}
"""What an adapted layer's parameters are called in it, and what they are."""
STORED_PREFIX = "base_model.model."
"""Before every name in peft's files: the way from its own wrapper to the model."""


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
    for _, layer in _adapted(model):
        layer.eval()
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
    if ALL_LINEAR in names:
        return ALL_LINEAR
    return names[0] if is_pattern(names) else list(names)


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
    for kind in ("use_dora", "lora_bias", "alora_invocation_tokens"):
        if getattr(settings, kind, None):
            raise ConfigError(f"{directory} holds adapters with {kind}, which isn't known here", key=f"{key}.path")
    settings.init_lora_weights, settings.inference_mode = True, False
    return settings


def _no_such_layers(model: PreTrainedModel, config: LoraConfig, key: str) -> ConfigError:
    there = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    names = ", ".join(config.target_modules)
    return ConfigError(
        f"{key}.target_modules = {names}: {NO_SUCH_LAYERS}",
        key=f"{key}.target_modules",
        value=config.target_modules,
        hint=there_are(there),
    )


def _refuse_tied(model: PreTrainedModel, config: LoraConfig, key: str) -> None:
    """Embedding and head that are one matrix can't be adapted apart: merged, they would be two."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.tie_word_embeddings and any(module in ends for _, module in _adapted(model)):
        raise ConfigError(
            f"{key}.target_modules = {', '.join(config.target_modules)}: {ONE_MATRIX}",
            key=f"{key}.target_modules",
            value=config.target_modules,
            hint=f"leave them out; {ALL_LINEAR} does",
        )


def has_lora(model: nn.Module) -> bool:
    """Whether there are adapters in it."""
    return any(is_adapted(module) for module in model.modules())


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a layer with adapters beside it; peft isn't loaded for the answer."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def adapter_tables(layer: Any) -> tuple[Any, Any, float]:
    """Where the parameters of an adapted linear layer's two matrices are looked up, and by what their product is
    multiplied."""
    first, second = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    return first._parameters, second._parameters, float(layer.scaling[ADAPTER])


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_" in name


def head_weight(head: Any) -> Tensor:
    """The matrix of a head, [vocabulary, hidden], with its adapters in it where it has some."""
    weight: Tensor = head.weight.detach()
    return weight + head.get_delta_weight(ADAPTER) if is_adapted(head) else weight.clone()


def scales(model: nn.Module) -> dict[str, float]:
    """By what the product of each adapted layer's matrices is multiplied, by the layer's name."""
    return {name: float(layer.scaling[ADAPTER]) for name, layer in _adapted(model)}


def merge_stream(weights: Iterable[tuple[str, Tensor]], scale: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
    """The same weights with the adapters among them added, W + scale · B A, under the plain model's names. One layer
    at a time is held, and none is changed.

    Raises:
        ValueError: adapters come without what they belong to.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, part = _split(name)
        if part not in PARTS:
            yield f"{layer}.{part}" if part else name, tensor
            continue
        parts = held.setdefault(layer, {})
        parts[PARTS[part]] = tensor
        if len(parts) == 3:
            product = (parts["second"] @ parts["first"]) * scale[layer]
            yield f"{layer}.weight", parts["whole"] + (product.T if "embedding" in part else product)
            del held[layer]
    if held:
        raise ValueError(f"weights are missing of {', '.join(sorted(held))}")


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's weights under the names that they have without adapters, which are added to them."""
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return merge_stream(named, scales(model)) if has_lora(model) else named


def _split(name: str) -> tuple[str, str]:
    """A parameter's layer, and which part of it this is: empty where the layer has no adapters."""
    for mark in ("base_layer.", "lora_"):
        layer, found, rest = name.partition(f".{mark}")
        if found:
            return layer, mark * (mark == "lora_" or rest == "weight") + rest
    return name, ""


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with adapters, by name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def stored_adapters(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The adapters' matrices among a model's weights, under the names that peft's files have."""
    return {_stored_name(name): tensor.detach() for name, tensor in weights if is_adapter(name)}


def _stored_name(name: str) -> str:
    return STORED_PREFIX + name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the model's weights would be with the adapters in them, W + (alpha / rank) B A, under the model's own
    names. The model stays as it is: merged and taken apart again, its weights would be rounded."""
    layers = dict(_adapted(model))
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            continue
        owner, found, kind = name.partition(".base_layer.")
        whole = tensor + layers[owner].get_delta_weight(ADAPTER) if found and kind == "weight" else tensor
        weights[f"{owner}.{kind}" if found else name] = whole
    return weights


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters to the weights and take them out: a plain model stays, all of whose weights get gradients."""
    for name, layer in list(_adapted(model)):
        plain = layer.get_base_layer()
        plain.weight += layer.get_delta_weight(ADAPTER)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(requires_grad=True)


def save_adapters(
    model: PreTrainedModel,
    directory: Path,
    base: str | Path,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write the adapters as peft reads them; `base` is the model that they belong to. They are taken from `weights`,
    full tensors under the model's own names, or from the model itself."""
    from safetensors.torch import save_file

    settings: Any = copy.copy(model.peft_config[ADAPTER])
    if not isinstance(settings.target_modules, str):
        settings.target_modules = sorted(settings.target_modules)
    settings.base_model_name_or_path, settings.inference_mode = str(base), True
    directory.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(directory)
    stored = stored_adapters(model.named_parameters() if weights is None else weights)
    tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def base_of(directory: Path) -> Path | None:
    """The model that stored adapters belong to, as peft's file beside them says; None where there are none.

    Raises:
        MachineError: it doesn't say.
    """
    path = directory / SETTINGS
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"{path} doesn't say to which model the adapters belong: {error!r}") from error
    return Path(str(named))


def load_adapters(model: nn.Module, directory: Path) -> None:
    """Take up what `save_adapters`, or peft, wrote.

    Raises:
        MachineError: the file is missing, or its adapters aren't those of the model.
    """
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in read_adapters(model.named_parameters(), directory):
            own[name].copy_(tensor)


def read_adapters(weights: Iterable[tuple[str, Tensor]], directory: Path) -> list[tuple[str, Tensor]]:
    """What `save_adapters`, or peft, wrote, under the own names of a model that has those `weights`.

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
    own = {name: tensor for name, tensor in weights if is_adapter(name)}
    if fault := _difference(stored_adapters(own.items()), stored):
        raise MachineError(f"the adapters at {path} don't fit: {fault}", "take those of the same model")
    return [(name, stored[_stored_name(name)]) for name in own]


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
