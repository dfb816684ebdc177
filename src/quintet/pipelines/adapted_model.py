"""Models with adapters in the format of peft: loading, and merging that keeps what they compute."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from quintet.errors import MachineError
from quintet.pipelines.export_check import CannotLoadError, load_plain_model
from quintet.policies.lora import CONFIG_FILE, PEFT_PREFIX, WEIGHTS_FILE, read_base_model_path
from quintet.runtime.learners.learner_checkpoint import HF

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WRAPPERS = ("base_layer", "modules_to_save", "original_module", "token_adapter", "default")
"""Parts that peft adds to the names of parameters."""
GENERATIVE_TASKS = (None, "CAUSAL_LM")
"""`task_type` of adapters of models that generate text."""


def adapter_base(adapters: Path) -> Path:
    """Return the directory of the adapters' base model.

    Raises:
        MachineError: it is missing.
    """
    base = available_base(adapters)
    if base is None:
        merged = adapters.resolve().parent / HF
        elsewhere = f"export {merged}, which has them merged"
        # the files of a checkpoint must not be changed
        if not merged.is_dir():
            elsewhere = f"set base_model_name_or_path in {adapters / CONFIG_FILE}"
        hint = f"put it there, or {elsewhere}"
        raise MachineError(
            f"the base model {read_base_model_path(adapters)} of the adapters at {adapters} is missing", hint
        )
    return base


def available_base(adapters: Path) -> Path | None:
    """Return the directory of the adapters' base model; None if there are no adapters, or it is missing.

    Raises:
        MachineError: the adapters name no base model.
    """
    base = read_base_model_path(adapters) if (adapters / WEIGHTS_FILE).is_file() else None
    return base if base is not None and (base / "config.json").is_file() else None


def load_adapted_model(
    adapters: Path, base: Path, *, config: PreTrainedConfig | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the base model in float32 with adapters that are not merged, as a `PeftModel`; `config` replaces that of
    the base model.

    Raises:
        MachineError: transformers or peft cannot load them, or adapters have no place in the model.
    """
    from peft import PeftModel

    task = json.loads((adapters / CONFIG_FILE).read_text(encoding="utf-8")).get("task_type")
    if task not in GENERATIVE_TASKS:
        raise MachineError(f"the adapters at {adapters} have task_type {task}: only CAUSAL_LM can be exported")
    try:
        model = load_plain_model(base, config=config, trust_remote_code=trust_remote_code)
        _resize_vocabulary(model, adapters)
        adapted = PeftModel.from_pretrained(model, adapters)
    except (CannotLoadError, ValueError, RuntimeError, TypeError, IndexError) as error:
        raise MachineError(f"cannot load the adapters at {adapters} on {base}: {error}") from error
    _require_all_used(adapted, adapters)
    return adapted.eval()


def _resize_vocabulary(model: PreTrainedModel, adapters: Path) -> None:
    """Give embedding and head as many rows as the adapters' file has, if it has the whole matrices.

    Raises:
        MachineError: the file has one of the two, and they are not tied.
    """
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {name for name, module in model.named_modules() if any(module is other for other in modules)}
    with safe_open(adapters / WEIGHTS_FILE, framework="pt") as file:
        shapes = {_layer_name(key): file.get_slice(key).get_shape() for key in file.keys() if ".lora_" not in key}  # noqa: SIM118
    stored = {name: shapes[f"{name}.weight"][0] for name in names if f"{name}.weight" in shapes}
    rows = max(stored.values(), default=0)
    if rows in (0, modules[0].weight.shape[0]):
        return
    if len(stored) < len(names) and not model.config.tie_word_embeddings:
        raise MachineError(
            f"the adapters at {adapters} have a vocabulary resized to {rows} rows, but only the rows of"
            f" {', '.join(sorted(stored))}: save them again with {' and '.join(sorted(names))} in modules_to_save"
        )
    model.resize_token_embeddings(rows, mean_resizing=False)


def _layer_name(name: str) -> str:
    """Return the name of a parameter in the base model, or that of an adapter without the name of its set."""
    return re.sub(rf"\.({'|'.join(WRAPPERS)})(?=\.|$)", "", name.removeprefix(PEFT_PREFIX))


def _require_all_used(adapted: nn.Module, adapters: Path) -> None:
    """Raise if the model has no place for a tensor of the adapters' file, which peft only skips."""
    from peft import get_peft_model_state_dict

    with safe_open(adapters / WEIGHTS_FILE, framework="pt") as file:
        stored = set(file.keys())
    names = {_layer_name(name) for name in get_peft_model_state_dict(adapted, save_embedding_layers=False)}
    names |= {_layer_name(name) for name, _ in adapted.named_parameters(remove_duplicate=False)}
    if unused := sorted(name for name in stored if _layer_name(name) not in names):
        raise MachineError(f"the model has no place for {unused[0]} of the adapters at {adapters}")


@torch.no_grad()
def merge_adapted_model(adapted: Any) -> PreTrainedModel:
    """Merge the adapters of a `PeftModel` in place, and return the model without them.

    peft adds an adapter to its layer's weight. If embedding and head share that weight, the other one would change,
    too: they are separated before, and the configuration says so unless they are equal in the end.

    Raises:
        MachineError: adapters of this kind cannot be merged.
    """
    was_tied = adapted.get_base_model().config.tie_word_embeddings
    for module in list(_adapters_of_tied_weights(adapted)):
        module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)
    try:
        model: PreTrainedModel = adapted.merge_and_unload()
    except (AttributeError, ValueError, TypeError, NotImplementedError) as error:
        kind = type(adapted.peft_config[adapted.active_adapter]).__name__.removesuffix("Config")
        raise MachineError(f"adapters of this kind ({kind}) cannot be merged: {error}") from error
    if was_tied:
        _record_tie(model)
    return model


def _adapters_of_tied_weights(adapted: nn.Module) -> Iterator[Any]:
    """Yield the base layers of adapters whose weight belongs to another module, too."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    shared: dict[int, int] = {}
    for module in adapted.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            shared[id(weight)] = shared.get(id(weight), 0) + 1
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            base = module.get_base_layer()
            if shared.get(id(base._parameters.get("weight")), 0) > 1:
                yield base


def _record_tie(model: PreTrainedModel) -> None:
    """Tie embedding and head again if they are equal, and make the configuration say whether they are tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        return
    is_tied = torch.equal(embedding.weight, head.weight)
    if is_tied:
        head.weight = embedding.weight
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = is_tied
