"""LoRA adapters (arXiv:2106.09685): insertion by peft, merging, saving and loading.

peft injects the adapters into the linear layers and the model keeps its class, so that other code does not change.
Files are those of peft, `adapter_model.safetensors` and `adapter_config.json`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quintet.config.checks.adapters import (
    ALL_LINEAR,
    NO_SUCH_LAYERS,
    TIED_EMBEDDINGS,
    available_layers_hint,
    is_pattern,
    targets_without_head_hint,
)
from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError, MachineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_DIRECTORY = "lora_adapter"
"""Name of the directory with adapters, next to the model's directory."""
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_NAME = "default"
PARAMETER_ROLES = {
    "base_layer.weight": "base",
    f"lora_A.{ADAPTER_NAME}.weight": "lora_a",
    f"lora_B.{ADAPTER_NAME}.weight": "lora_b",
    f"lora_embedding_A.{ADAPTER_NAME}": "lora_a",
    f"lora_embedding_B.{ADAPTER_NAME}": "lora_b",
}
"""Role of an adapted layer's parameters by their names within the layer."""
UNSUPPORTED_OPTIONS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("use_dora", "lora_bias", "alora_invocation_tokens", "modules_to_save", "layer_replication"), ()),
    **dict.fromkeys(("trainable_token_indices", "target_parameters", "use_bdlora", "velora_config"), ()),
    "bias": ("none",),
    # the others change the base weights
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""Options of peft without an equivalent here, and their values that are supported besides none."""
EXPERT_LAYERS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of layers that peft takes for those of experts and their router."""
PEFT_PREFIX = "base_model.model."
"""Prefix of all names in peft's files."""


def add_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int = 0, key: str = "policy.lora") -> None:
    """Insert adapters into the model, new ones or those at `config.path`; only they are trainable afterwards.

    New adapters do not change the model's outputs. `seed` determines their initial values; `key` is the configuration
    key for error messages.

    Raises:
        ConfigError: no layer matches, or stored adapters differ from the configuration.
        MachineError: stored adapters are missing or damaged.
    """
    from peft import inject_adapter_in_model

    peft_config = _build_peft_config(config, key)
    if peft_config.target_modules == ALL_LINEAR and (routers := _linear_routers(model)):
        peft_config.exclude_modules = routers
    if _adapts_experts(peft_config, model):
        if config.path is not None or ALL_LINEAR not in config.target_modules:
            raise _stacked_experts(config, key)
        peft_config.target_modules = _linear_layers_without_experts(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(peft_config, model, ADAPTER_NAME)
        except ValueError as error:
            raise _no_matching_layers(model, config, key) from error
    _check_tied_embeddings(model, config, key)
    _check_head(model, config, key)
    for _, layer in _iter_lora_layers(model):
        layer.eval()
    if config.path is not None:
        load_adapters(model, Path(config.path))


def _build_peft_config(config: LoraConfig, key: str) -> Any:
    """Return peft's configuration of new adapters, or that of the adapters at `config.path`."""
    from peft import LoraConfig as PeftLoraConfig

    if config.path is not None:
        return _read_peft_config(config, key)
    return PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_target_modules(config.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _linear_routers(model: nn.Module) -> list[str]:
    """Return the names of routers that are linear layers with other results than a product, which adapters expect."""
    routers = ((name, type(part)) for name, part in model.named_modules() if isinstance(part, nn.Linear))
    return [name for name, cls in routers if cls.__name__.endswith("Router") and cls.forward is not nn.Linear.forward]


def _target_modules(names: tuple[str, ...]) -> str | list[str]:
    if ALL_LINEAR in names:
        return ALL_LINEAR
    return names[0] if is_pattern(names) else list(names)


def _adapts_experts(peft_config: Any, model: PreTrainedModel) -> bool:
    """Return whether peft would adapt the experts of a layer, which are one stacked tensor, or their router."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(peft_config)
    try:
        convert_peft_config_for_transformers(converted, model, None)
    except ValueError:
        # some of the layers that are stacked together
        return True
    return bool(converted.target_parameters)


def _linear_layers_without_experts(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers but the head and those that peft takes for experts."""
    head = model.get_output_embeddings()
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in layers} - EXPERT_LAYERS)


def _stacked_experts(config: LoraConfig, key: str) -> ConfigError:
    name = "path" if config.path is not None else "target_modules"
    value = config.path if config.path is not None else ", ".join(config.target_modules)
    return ConfigError(
        f"{key}.{name} = {value}: adapters of experts and routers are not supported", key=f"{key}.{name}", value=value
    )


def _read_peft_config(config: LoraConfig, key: str) -> Any:
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftConfig

    directory = Path(str(config.path))
    if not (directory / CONFIG_FILE).is_file() or not (directory / WEIGHTS_FILE).is_file():
        hint = f"set {key}.path to a directory with {CONFIG_FILE} and {WEIGHTS_FILE}"
        raise MachineError(f"no adapters at {directory}", hint)
    peft_config = PeftConfig.from_pretrained(directory)
    if not isinstance(peft_config, PeftLoraConfig):
        raise ConfigError(
            f"{key}.path = {directory} contains {peft_config.peft_type} adapters, not LoRA", key=f"{key}.path"
        )
    for field, stored in {"rank": peft_config.r, "alpha": peft_config.lora_alpha}.items():
        if getattr(config, field) != stored:
            raise ConfigError(
                f"{key}.{field} = {getattr(config, field):g}, but the adapters at {directory} have {stored:g}",
                key=f"{key}.{field}",
                value=getattr(config, field),
                hint=f"set {key}.{field}={stored:g}",
            )
    for option in UNSUPPORTED_OPTIONS:
        value = getattr(peft_config, option, None)
        if value and value not in UNSUPPORTED_OPTIONS[option]:
            message = f"adapters with {option} = {value} are not supported; `quintet export` merges them"
            raise ConfigError(f"{key}.path = {directory}: {message}", key=f"{key}.path")
    peft_config.init_lora_weights, peft_config.inference_mode = True, False
    return peft_config


def _no_matching_layers(model: PreTrainedModel, config: LoraConfig, key: str) -> ConfigError:
    linear_names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    names = ", ".join(config.target_modules)
    return ConfigError(
        f"{key}.target_modules = {names}: {NO_SUCH_LAYERS}",
        key=f"{key}.target_modules",
        value=config.target_modules,
        hint=available_layers_hint(f"{key}.target_modules", linear_names),
    )


def _check_head(model: PreTrainedModel, config: LoraConfig, key: str) -> None:
    """Raise if the head is adapted whose logits the model scales or caps: adapters add to the results of a layer."""
    head: Any = model.get_output_embeddings()
    if not has_adapters(head) or getattr(head.base_layer, "is_plain", True):
        return
    message = "adapters of a head whose logits the model scales or caps are not supported"
    if config.path is not None:
        raise ConfigError(f"{key}.path = {config.path}: {message}", key=f"{key}.path", value=config.path)
    raise ConfigError(
        f"{key}.target_modules = {', '.join(config.target_modules)}: {message}",
        key=f"{key}.target_modules",
        value=config.target_modules,
        hint=targets_without_head_hint(f"{key}.target_modules", config.target_modules),
    )


def _check_tied_embeddings(model: PreTrainedModel, config: LoraConfig, key: str) -> None:
    """Raise if a tied embedding or head is adapted: merging would untie them."""
    tied_modules = (model.get_input_embeddings(), model.get_output_embeddings())
    if not model.config.tie_word_embeddings or not any(each in tied_modules for _, each in _iter_lora_layers(model)):
        return
    if config.path is not None:
        message = f"{TIED_EMBEDDINGS}, and the adapters change one: `quintet export` merges them into the model"
        raise ConfigError(f"{key}.path = {config.path}: {message}", key=f"{key}.path", value=config.path)
    raise ConfigError(
        f"{key}.target_modules = {', '.join(config.target_modules)}: {TIED_EMBEDDINGS}",
        key=f"{key}.target_modules",
        value=config.target_modules,
        hint=targets_without_head_hint(f"{key}.target_modules", config.target_modules),
    )


def has_lora(model: nn.Module) -> bool:
    """Return whether any layer of the model has adapters."""
    return any(has_adapters(module) for module in model.modules())


def has_adapters(module: nn.Module) -> bool:
    """Return whether the layer has adapters, without importing peft."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def adapter_parameters(layer: Any) -> tuple[Any, Any, float]:
    """Return the parameter dicts of an adapted linear layer's A and B, and the scale of their product."""
    lora_a, lora_b = layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
    return lora_a._parameters, lora_b._parameters, float(layer.scaling[ADAPTER_NAME])


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def merged_head_weight(head: Any) -> Tensor:
    """Return a copy of a head's weight [vocabulary, hidden], with its adapters merged."""
    weight: Tensor = head.weight.detach()
    return weight + head.get_delta_weight(ADAPTER_NAME) if has_adapters(head) else weight.clone()


def adapter_scales(model: nn.Module) -> dict[str, float]:
    """Return the scale of B A by the name of the adapted layer."""
    return {name: float(layer.scaling[ADAPTER_NAME]) for name, layer in _iter_lora_layers(model)}


def merge_adapter_stream(
    weights: Iterable[tuple[str, Tensor]], scales: Mapping[str, float]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with adapters merged, W + scale · B A, under the names of the base model.

    Keeps the tensors of one layer at a time and changes none of them.

    Raises:
        ValueError: a layer's base weight or one of its adapters is missing.
    """
    incomplete: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, suffix = _split_name(name)
        if suffix not in PARAMETER_ROLES:
            yield f"{layer}.{suffix}" if suffix else name, tensor
            continue
        roles = incomplete.setdefault(layer, {})
        roles[PARAMETER_ROLES[suffix]] = tensor
        if len(roles) == 3:
            product = _product(roles["lora_b"], roles["lora_a"]).mul_(scales[layer])
            yield f"{layer}.weight", _sum(roles["base"], product.T if "embedding" in suffix else product)
            del incomplete[layer]
    if incomplete:
        raise ValueError(f"incomplete weights of adapted layers: {', '.join(sorted(incomplete))}")


def _product(lora_b: Tensor, lora_a: Tensor) -> Tensor:
    """Return B A in the shape of the weight; those of a convolution have its kernel as further dimensions."""
    return (lora_b.flatten(1) @ lora_a.flatten(1)).view(len(lora_b), *lora_a.shape[1:])


def _sum(weight: Tensor, product: Tensor) -> Tensor:
    """Return the sum, in the memory of the product if that has its type and layout."""
    has_type = torch.result_type(weight, product) == product.dtype and product.is_contiguous()
    return product.add_(weight) if has_type else weight + product


class BaseWeights:
    """Host copies of the weights that adapters are merged into again and again."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def merge(self, weights: Iterable[tuple[str, Tensor]], scales: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
        """Keep the weights that are not adapters, and return all kept ones with the adapters merged; see
        `merge_adapter_stream`. Tensors of the host are kept as they are, so that they must not be written to."""
        adapters: dict[str, Tensor] = {}
        for name, tensor in weights:
            (adapters if is_adapter_name(name) else self._tensors)[name] = tensor.cpu()
        return merge_adapter_stream(chain(self._tensors.items(), adapters.items()), scales)


def iter_merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights with adapters merged, under the names of the base model."""
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return merge_adapter_stream(weights, adapter_scales(model)) if has_lora(model) else weights


def _split_name(name: str) -> tuple[str, str]:
    """Split a name into the layer's name and the parameter's; the latter is empty for layers without adapters."""
    for marker in ("base_layer.", "lora_"):
        layer, matched, rest = name.partition(f".{marker}")
        if matched:
            return layer, marker * (marker == "lora_" or rest == "weight") + rest
    return name, ""


def _iter_lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of layers with adapters."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def peft_state_dict(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the adapters among a model's weights under the names in peft's files."""
    return {_peft_name(name): tensor.detach() for name, tensor in weights if is_adapter_name(name)}


def _peft_name(name: str) -> str:
    return PEFT_PREFIX + name.replace(f".{ADAPTER_NAME}.", ".").removesuffix(f".{ADAPTER_NAME}")


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters into the weights and remove them; all weights become trainable."""
    for name, layer in list(_iter_lora_layers(model)):
        base = layer.get_base_layer()
        base.weight += layer.get_delta_weight(ADAPTER_NAME)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, base)
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(requires_grad=True)


def save_adapters(
    model: PreTrainedModel,
    directory: Path,
    base: str | Path,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write the adapters in peft's format; `base` is the path of their base model.

    They are taken from `weights`, full tensors under the model's names, or from the model.
    """
    from safetensors.torch import save_file

    peft_config: Any = copy.copy(model.peft_config[ADAPTER_NAME])
    if not isinstance(peft_config.target_modules, str):
        peft_config.target_modules = sorted(peft_config.target_modules)
    peft_config.base_model_name_or_path, peft_config.inference_mode = str(base), True
    directory.mkdir(parents=True, exist_ok=True)
    peft_config.save_pretrained(directory)
    adapters = peft_state_dict(model.named_parameters() if weights is None else weights)
    tensors = {name: tensor.contiguous() for name, tensor in adapters.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def read_base_model_path(directory: Path) -> Path | None:
    """Return the path of the base model from peft's configuration file; None if there are no adapters.

    Raises:
        MachineError: the file does not name a base model.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        base_model = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"{path} does not name the base model of the adapters: {error!r}") from error
    return Path(str(base_model))


def load_adapters(model: nn.Module, directory: Path) -> None:
    """Load adapters written by `save_adapters` or peft into the model.

    Raises:
        MachineError: the file cannot be read, or its adapters do not match the model.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in read_adapters(model.named_parameters(), directory):
            parameters[name].copy_(tensor)


def read_adapters(weights: Iterable[tuple[str, Tensor]], directory: Path) -> list[tuple[str, Tensor]]:
    """Read adapters written by `save_adapters` or peft, under the names in the model's `weights`.

    Raises:
        MachineError: the file cannot be read, or its adapters do not match the weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise MachineError(f"cannot read adapters from {path}: {error}") from error
    # peft stores the base weight of an adapted head, too
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".base_layer.weight")}
    parameters = {name: tensor for name, tensor in weights if is_adapter_name(name)}
    if problem := _describe_mismatch(peft_state_dict(parameters.items()), tensors):
        raise MachineError(f"the adapters at {path} do not match the model: {problem}", "use adapters of this model")
    return [(name, tensors[_peft_name(name)]) for name in parameters]


def _describe_mismatch(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str | None:
    """Return a description of the first difference, or None."""
    for name in sorted(parameters.keys() ^ tensors.keys()):
        return f"{_short_name(name)} is {'missing' if name in parameters else 'unexpected'}"
    for name, tensor in parameters.items():
        if tensor.shape != tensors[name].shape:
            return f"{_short_name(name)} is {list(tensors[name].shape)}, not {list(tensor.shape)}"
    return None


def _short_name(name: str) -> str:
    return re.sub(rf"^{re.escape(PEFT_PREFIX)}", "", name)
