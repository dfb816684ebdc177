"""Language-model policies and the critics grown from them, on packed tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quintet.errors import ConfigError, MachineError, nearest
from quintet.policies.attention import Layout, PackedLayout, register_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "Packed",
    "ValueModel",
    "hidden_states",
    "load_model",
    "load_tokenizer",
    "recompute_activations",
    "token_statistics",
]


@dataclass(frozen=True, slots=True)
class Packed:
    """Token sequences as a model takes them, a shared prefix first (see `PackedLayout`).

    `tokens`, `positions` int64 [P]; `sources` int64 [M] where in `tokens` a prediction is made;
    `targets` int64 [M] the token predicted there.
    """

    tokens: Tensor
    positions: Tensor
    layout: PackedLayout
    sources: Tensor
    targets: Tensor


def load_model(
    directory: str | Path, *, trust_remote_code: bool = False, overrides: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """A causal language model in float32 whose attention follows a `Layout`; `overrides` are put over the values
    of its `config.json`.

    Raises:
        MachineError: the directory isn't a model that transformers can read.
        ConfigError: an override has no counterpart there.
    """
    from transformers import AutoModelForCausalLM

    _exists(directory)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=_config(directory, overrides or {}, trust_remote_code=trust_remote_code),
            dtype=torch.float32,
            attn_implementation=register_attention(),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise MachineError(f"can't load a model from {directory}: {error}", "give a Hugging Face directory") from error
    return model.eval()


def _config(directory: str | Path, overrides: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    for name, value in overrides.items():
        if not hasattr(config, name):
            close = nearest(name, config.to_dict())
            hint = f"did you mean policy.overrides.{close}?" if close else f"see {Path(directory) / 'config.json'}"
            raise ConfigError(
                f"policy.overrides.{name}: the model has no such value", key="policy.overrides", hint=hint
            )
        setattr(config, name, value)
    return config


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer that lies beside a model.

    Raises:
        MachineError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise MachineError(f"can't load a tokenizer from {directory}: {error}") from error


def recompute_activations(model: PreTrainedModel) -> None:
    """From now on each layer's activations are computed again in the backward pass instead of kept.

    transformers recomputes in layers that are in training mode; that mode is set for the layers
    alone and not for what they hold, so that no dropout comes in.

    Raises:
        ConfigError: the model's class can't.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} can't recompute activations", key="actor.gradient_checkpointing", value=True
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def _exists(directory: str | Path) -> None:
    if not (Path(directory) / "config.json").is_file():
        raise MachineError(f"no model at {directory}", "policy.path names a directory with config.json and weights")


def hidden_states(body: nn.Module, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Last hidden state of each token from a decoder without its head, [P] to [P, hidden]."""
    out = body(
        input_ids=tokens[None], position_ids=positions[None], attention_mask=None, use_cache=False, layout=layout
    )
    states: Tensor = out.last_hidden_state[0]
    return states


def token_statistics(model: PreTrainedModel, packed: Packed, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy at its place, nats, both float32 [M].

    Logits are made for the M predicted places alone and divided by `temperature`, as while sampling.
    """
    hidden = hidden_states(model.model, packed.tokens, packed.positions, packed.layout)
    logits = model.lm_head(hidden.index_select(0, packed.sources)).float() / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, packed.targets[:, None]).squeeze(-1), entropy


class ValueModel(nn.Module):
    """A critic: a decoder's body and a linear head; the estimate before each predicted token."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy.model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, packed: Packed) -> Tensor:
        """[M] values, in units of reward."""
        hidden = hidden_states(self.body, packed.tokens, packed.positions, packed.layout)
        values: Tensor = self.head(hidden.index_select(0, packed.sources))
        return values.squeeze(-1).float()
