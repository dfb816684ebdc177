"""Loading of models and tokenizers, and settings of loaded models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from quintet.config.native.policy import PolicyConfig
from quintet.config.plan.model_support import unsupported_reason
from quintet.errors import ConfigError, MachineError, UserError, did_you_mean
from quintet.loading_lock import LOADING_LOCK
from quintet.policies.attention import MODELS_HINT, register_attention
from quintet.policies.model_check import check_model
from quintet.policies.model_files import check_index
from quintet.policies.output_head import install_output_head
from quintet.policies.recurrent_layers import pack_recurrent_layers
from quintet.policies.transformers_interface import checkpointing_attribute
from quintet.policies.vision.image_encoder import (
    is_vision_language,
    placeholder_tokens,
    prepare_vision_encoder,
    text_decoder,
)
from quintet.policies.vision.image_processing import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

ROUTER_LOSS_KEYS = ("router_aux_loss_coef", "output_router_logits")
"""Settings of the load-balancing loss of mixture-of-experts models.

No learner adds this loss, whatever the model's `config.json` says: the experts of a policy are balanced already, and
the term would pull the policy away from the objective. verl omits it by default, too.
"""


def load_model(
    directory: str | Path,
    *,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    is_computed: bool = True,
) -> PreTrainedModel:
    """Load a language model or vision-language model in float32 whose attention follows a `AttentionLayout`.

    `overrides` replace values of its `config.json`. Unless it `is_computed` here, but by vLLM or SGLang, it is neither
    checked nor refused for its architecture.

    Raises:
        MachineError: transformers cannot load the directory, or our forward pass differs from transformers'.
        ConfigError: an override names a setting that the model's configuration does not have.
    """
    _require_config_json(directory)
    check_index(Path(directory))
    try:
        config = _load_config(directory, overrides or {}, trust_remote_code=trust_remote_code)
        if is_computed and (reason := unsupported_reason(config.to_dict())):
            raise MachineError(f"cannot use the model at {directory}: {reason}", MODELS_HINT)
        auto = _auto_class(config)
        with LOADING_LOCK:
            model, loading = auto.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                attn_implementation=register_attention(),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
            )
    except (UserError, MemoryError):
        raise
    except (OSError, ValueError, SafetensorError) as error:
        if "Unrecognized configuration class" in str(error):
            # followed by the names of all classes that are recognized
            raise MachineError(
                f"cannot use the model at {directory}: transformers has no {auto.__name__} of model_type"
                f" {config.model_type!r}",
                MODELS_HINT,
            ) from error
        hint = "use a Hugging Face model directory, as save_pretrained writes it"
        raise MachineError(f"cannot load a model from {directory}: {error}", hint) from error
    except Exception as error:
        # the code of an architecture, or of the directory, may raise anything
        raise MachineError(
            f"cannot load the model at {directory}: {type(error).__name__}: {error}", MODELS_HINT
        ) from error
    require_own_head(model, loading["missing_keys"], directory)
    _prepare(model, directory, is_computed=is_computed)
    loaded: PreTrainedModel = model
    return loaded


def _prepare(model: Any, directory: str | Path, *, is_computed: bool) -> None:
    """Adapt a loaded model to packed sequences and images, and compare it with transformers' own forward pass."""
    model.eval()
    if is_computed and hasattr(model, "model"):
        pack_recurrent_layers(text_decoder(model.model))
    if is_vision_language(model.config):
        prepare_vision_language_model(model, directory)
    elif is_computed and hasattr(model, "lm_head"):
        install_output_head(model)
    if is_computed:
        check_model(model, directory)
        limit_positions(model)


def build_meta_model(directory: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build the model of a directory without its weights, on the device meta.

    Raises:
        MachineError: transformers does not know the model, or its files are damaged.
    """
    _require_config_json(directory)
    try:
        config = _load_config(directory, {}, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: PreTrainedModel = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        if (directory / "generation_config.json").is_file():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except (UserError, MemoryError):
        raise
    except (OSError, ValueError) as error:
        hint = "use a directory in Hugging Face format"
        raise MachineError(f"cannot load a model from {directory}: {error}", hint) from error
    except Exception as error:
        # the code of an architecture may raise anything for a config.json that it was not made for
        raise MachineError(f"cannot build the model at {directory}: {type(error).__name__}: {error}") from error
    return model


def _auto_class(config: PreTrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def require_own_head(model: PreTrainedModel, missing: Collection[str], directory: str | Path) -> None:
    """Raise if weights are `missing`, which transformers would replace by random ones, or if the head is another than
    the configuration says, so that other programs would use another one.

    Raises:
        MachineError: one of these.
    """
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise MachineError(f"the model at {directory} is incomplete: its files have no {names}")
    head = model.get_output_embeddings()
    is_tied = head is not None and getattr(model.config, "tie_word_embeddings", False)
    if is_tied and head.weight is not model.get_input_embeddings().weight:
        message = "tie_word_embeddings is true, but its files have a head that differs from the embedding"
        raise MachineError(f"the model at {directory} is ambiguous: {message}; set it to false in config.json")


def prepare_vision_language_model(model: PreTrainedModel, directory: str | Path) -> None:
    """Attach the image processor in `directory` to a vision-language model, and exclude placeholders of images from
    sampling.

    Raises:
        MachineError: the directory has no image processor.
    """
    prepare_vision_encoder(model, ImageProcessor.from_directory(directory))
    install_output_head(model, placeholder_tokens(model.config))


def _load_config(directory: str | Path, overrides: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    for name, value in overrides.items():
        if name in ROUTER_LOSS_KEYS and value:
            raise ConfigError(
                f"policy.overrides.{name} = {value}: the router's auxiliary loss is not supported",
                key="policy.overrides",
                value=value,
                hint=f"remove policy.overrides.{name}",
            )
        if not hasattr(config, name):
            settings = f"{Path(directory) / 'config.json'} has its settings"
            hint = did_you_mean(name, config.to_dict(), "policy.overrides.{}") or settings
            raise ConfigError(
                f"policy.overrides.{name}: the model's configuration has no such setting",
                key="policy.overrides",
                hint=hint,
            )
        setattr(config, name, value)
    return config


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model directory.

    Raises:
        MachineError: the directory has no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        # transformers raises anything for files that are not as it expects, such as a text in place of a mapping
        raise MachineError(f"cannot load a tokenizer from {directory}: {error}") from error


def load_policy_tokenizer(config: PolicyConfig, directory: str | Path) -> PreTrainedTokenizerFast:
    """Load the configured tokenizer, by default that of the model at `directory`; raises as `load_tokenizer` does."""
    return load_tokenizer(config.tokenizer or directory, trust_remote_code=config.runs_tokenizer_code)


def enable_activation_checkpointing(model: PreTrainedModel, key: str = "actor.gradient_checkpointing") -> None:
    """Recompute each layer's activations in the backward pass instead of storing them.

    transformers recomputes layers that are in training mode. The mode is set on the layers but not on their submodules,
    so that dropout stays off.

    Raises:
        ConfigError: the model's class does not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{key} = true: {type(model).__name__} does not support activation checkpointing",
            key=key,
            value=True,
            hint=f"set {key}=false",
        )
    checkpointing_attribute(model, "activation_checkpointing_enable")({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def disable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Store activations in the forward pass, undoing `enable_activation_checkpointing`."""
    if checkpointing_attribute(model, "is_activation_checkpointing"):
        checkpointing_attribute(model, "activation_checkpointing_disable")()


def _require_config_json(directory: str | Path) -> None:
    if not (Path(directory) / "config.json").is_file():
        raise MachineError(f"no model at {directory}", "use a directory with config.json and weights")


@torch.no_grad()
def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters to `dtype`.

    Buffers are not cast: rotary embeddings from rounded frequencies would be wrong at large positions.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def limit_positions(model: PreTrainedModel) -> None:
    """Make the model's rotary embeddings raise a `MachineError` for positions at which their frequencies change."""
    for module in model.modules():
        if hasattr(module, "inv_freq") and (limits := list(_limits(getattr(module, "config", None)))):
            module.register_forward_pre_hook(partial(_check_positions, min(limits)), with_kwargs=True)


def _limits(config: Any) -> Iterator[int]:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return
    for parameters in rope.values() if all(isinstance(value, Mapping) for value in rope.values()) else [rope]:
        if parameters.get("rope_type") == "longrope":
            yield int(parameters["original_max_position_embeddings"])
        elif parameters.get("rope_type") == "dynamic":
            yield int(config.max_position_embeddings)


def _check_positions(limit: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if (longest := int(positions.max()) + 1) > limit:
        raise MachineError(
            f"a sequence has {longest} tokens, but the rotary embedding of this model ({type(module).__name__}) changes"
            f" for all sequences of a pass beyond {limit}, which is not supported yet",
            f"limit rollout.max_prompt_tokens + rollout.max_response_tokens, and sft.max_tokens, to {limit}",
        )
