"""Language-model policies and the critics grown from them, on packed tokens."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from quintet.errors import ConfigError, MachineError, nearest
from quintet.policies.adapters import head_weight
from quintet.policies.attention import Layout, MovableLayout, PackedLayout, register_attention
from quintet.policies.token_scores import LOGITS_AT_ONCE, token_scores
from quintet.policies.training_decoder import training_states
from quintet.policies.vocabulary_parallel import measures_of_shards, shared_linear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from quintet.policies.token_split import TokenSplit

__all__ = [
    "Packed",
    "PolicyModule",
    "TokenMeasures",
    "ValueModel",
    "View",
    "cast_weights",
    "compiled_measures",
    "hidden_states",
    "keep_activations",
    "load_model",
    "load_tokenizer",
    "recompute_activations",
    "token_measures",
    "token_statistics",
    "view",
]

logger = logging.getLogger(__name__)
Measures = Callable[..., tuple[Tensor, ...]]

ROUTER_LOSS = ("router_aux_loss_coef", "output_router_logits")
"""Of a mixture of experts: the term that spreads tokens evenly over them. It isn't in any learner's loss, whatever the
model's own `config.json` says: a policy's experts were balanced before it came here, and the term would pull it away
from the objective. verl, too, leaves it out by default."""

TRIAL_TOKENS = 24
TRIAL_GAP = 1e-3


@dataclass(frozen=True, slots=True)
class Packed:
    """Token sequences as a model takes them, a shared prefix first (see `PackedLayout`).

    `tokens`, `positions` int64 [P]; `sources` int64 [M] where in `tokens` a prediction is made;
    `targets` int64 [M] the token predicted there.
    """

    tokens: Tensor
    positions: Tensor
    layout: MovableLayout
    sources: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Packed:
        """The same there."""
        if self.tokens.device == device:
            return self
        tokens, positions, sources, targets = (
            x.to(device) for x in (self.tokens, self.positions, self.sources, self.targets)
        )
        return replace(
            self, tokens=tokens, positions=positions, layout=self.layout.to(device), sources=sources, targets=targets
        )


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
    model.eval()
    _hold_against_transformers(model, directory)
    return model


def _hold_against_transformers(model: PreTrainedModel, directory: str | Path) -> None:
    """A model whose attention or head does more than ours (soft caps, sinks, scaled logits, other kinds of layers)
    would be wrong without a word: a few tokens are computed both ways.

    Raises:
        MachineError: they differ.
    """
    tokens = torch.arange(TRIAL_TOKENS) * 7919 % model.config.get_text_config().vocab_size
    with torch.inference_mode():
        ours = model.lm_head(hidden_states(model.model, tokens, torch.arange(len(tokens)), _whole(len(tokens))))
        model.set_attn_implementation("eager")
        theirs = model(tokens[None], use_cache=False).logits[0]
        model.set_attn_implementation(register_attention())
    if not bool(theirs.isfinite().all()):
        raise MachineError(f"the weights at {directory} hold values that aren't numbers", "take an earlier checkpoint")
    gap = float((ours - theirs).abs().max())
    if not gap <= TRIAL_GAP * max(1.0, float(theirs.abs().max())):
        raise MachineError(
            f"{type(model).__name__} at {directory} computes something that isn't known here: logits differ by "
            f"{gap:.2g} from transformers' own",
            "take a model of another architecture, such as Llama, Mistral or Qwen",
        )


def _whole(length: int) -> PackedLayout:
    """One sequence."""
    return PackedLayout(torch.tensor([length]))


def _config(directory: str | Path, overrides: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    for name, value in overrides.items():
        if name in ROUTER_LOSS and value:
            raise ConfigError(
                f"policy.overrides.{name} = {value}: learners have no auxiliary loss of the router",
                key="policy.overrides",
                value=value,
                hint="leave it out; what balances experts besides is the policy's own objective",
            )
        if not hasattr(config, name):
            close = nearest(name, config.to_dict())
            hint = f"did you mean policy.overrides.{close}?" if close else f"see {Path(directory) / 'config.json'}"
            raise ConfigError(
                f"policy.overrides.{name}: the model has no such value", key="policy.overrides", hint=hint
            )
        setattr(config, name, value)
    return config


def load_tokenizer(
    directory: str | Path, *, trust_remote_code: bool = False, fast: bool = True
) -> PreTrainedTokenizerFast:
    """The tokenizer that lies beside a model. transformers 5 has each of them once, most in Rust: where one in Python
    was asked for, `fast` is false, and there is none, the log says so.

    Raises:
        MachineError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise MachineError(f"can't load a tokenizer from {directory}: {error}") from error
    if not fast and found.is_fast:
        logger.info("policy.fast_tokenizer = false: the tokenizer at %s is there in Rust alone", directory)
    return found


def recompute_activations(model: PreTrainedModel, key: str = "actor.gradient_checkpointing") -> None:
    """From now on each layer's activations are computed again in the backward pass instead of kept.

    transformers recomputes in layers that are in training mode; that mode is set for the layers
    alone and not for what they hold, so that no dropout comes in.

    Raises:
        ConfigError: the model's class can't.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} can't recompute activations", key=key, value=True, hint="set it to false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def keep_activations(model: PreTrainedModel) -> None:
    """From now on they are kept, whatever was asked for before."""
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


def _exists(directory: str | Path) -> None:
    if not (Path(directory) / "config.json").is_file():
        raise MachineError(f"no model at {directory}", "policy.path names a directory with config.json and weights")


@torch.no_grad()
def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the weights another type. Buffers stay: rotations from rounded frequencies would be others far from the
    beginning."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def hidden_states(body: nn.Module, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Last hidden state of each token from a decoder without its head, [P] to [P, hidden]."""
    if (found := training_states(body, tokens, positions, layout)) is not None:
        return found
    out = body(
        input_ids=tokens[None], position_ids=positions[None], attention_mask=None, use_cache=False, layout=layout
    )
    states: Tensor = out.last_hidden_state[0]
    return states


class View(NamedTuple):
    """What a model makes of the predicted places, and the head that turns it into logits."""

    hidden: Tensor
    """[M, hidden]."""
    head: Callable[[Tensor], Tensor]
    """[m, hidden] to [m, vocabulary]."""


def view(model: PreTrainedModel, packed: Packed) -> View:
    """The model's `View` of what is packed; its head is the model's own."""
    hidden = hidden_states(model.model, packed.tokens, packed.positions, packed.layout)
    return View(hidden.index_select(0, packed.sources), model.lm_head)


class TokenMeasures(NamedTuple):
    """Of each predicted place, float32 [M]."""

    logprobs: Tensor
    """Of the target, nats."""
    entropy: Tensor
    """Nats."""
    divergence: Tensor
    """Of the policy from another, summed over the vocabulary, nats; 0 without another."""
    squared_mass: Tensor
    """Sum of the squared probabilities of all tokens, without gradient; 0 where it wasn't asked for."""


def token_statistics(model: PreTrainedModel, packed: Packed, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy at its place, nats, both float32 [M]; see `token_measures`."""
    measures = token_measures(model, packed, temperature)
    return measures.logprobs, measures.entropy


def token_measures(
    model: PreTrainedModel,
    packed: Packed,
    temperature: float = 1.0,
    other: View | None = None,
    *,
    swapped: bool = False,
    squared_mass: bool = False,
    measures: Measures | None = None,
) -> TokenMeasures:
    """What the model says at each place, and how far it is from the `other` model's view of the same: KL(model ‖
    other), or with `swapped` KL(other ‖ model). No gradient flows into `other`.

    Logits are made for the M predicted places alone and divided by `temperature`, as while sampling. Where places ×
    vocabulary exceed `LOGITS_AT_ONCE`, they are made for some places after the other, and again in the backward pass.
    `measures` is what makes measures of logits, where that isn't `_measures` as it stands.
    """
    hidden, head = view(model, packed)
    found = token_scores(head, hidden, packed.targets, temperature) if other is None else None
    if found is not None:
        nothing = torch.zeros_like(found[0])
        return TokenMeasures(found[0], found[1], nothing, found[2] if squared_mass else nothing)
    places = max(1, LOGITS_AT_ONCE // model.lm_head.weight.shape[0])

    def measure(start: int) -> tuple[Tensor, ...]:
        """Of the places from `start` on."""
        part = slice(start, start + places)
        logits, theirs = head(hidden[part]), None
        if other is not None:
            with torch.no_grad():
                theirs = other.head(other.hidden[part])
        told = (packed.targets[part], temperature, theirs)
        if isinstance(logits, DTensor):
            return measures_of_shards(logits, *told, swapped=swapped, squared_mass=squared_mass)
        return (measures or _measures)(logits, *told, swapped=swapped, squared_mass=squared_mass)

    starts = range(0, len(hidden), places)
    if len(starts) <= 1:
        return TokenMeasures(*measure(0))
    if torch.is_grad_enabled():
        parts = [checkpoint(measure, start, use_reentrant=False, preserve_rng_state=False) for start in starts]
    else:
        parts = [measure(start) for start in starts]
    return TokenMeasures(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _measures(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    theirs: Tensor | None = None,
    *,
    swapped: bool = False,
    squared_mass: bool = False,
) -> tuple[Tensor, ...]:
    """`TokenMeasures` of some places, from logits [m, vocabulary]; `theirs` are the other model's."""
    logprobs = (logits.float() / temperature).log_softmax(-1)
    other = None if theirs is None else (theirs.float() / temperature).log_softmax(-1)
    chances = logprobs.exp()
    entropy = -(chances * logprobs).sum(-1)
    divergence = squared = torch.zeros_like(entropy)
    if other is not None and swapped:
        divergence = (other.exp() * (other - logprobs)).sum(-1)
    elif other is not None:
        divergence = (chances * (logprobs - other)).sum(-1)
    if squared_mass:
        squared = chances.detach().square().sum(-1)
    # a tensor of its own: FSDP's hooks warn of views
    return logprobs.gather(-1, targets[:, None]).squeeze(-1).clone(), entropy, divergence, squared


@cache
def compiled_measures() -> Measures:
    """What makes measures of logits, compiled for any number of places."""
    compiled: Measures = torch.compile(_measures, dynamic=True)
    return compiled


class PolicyModule(nn.Module):
    """A policy whose one forward pass measures tokens, head and all: what spreads weights over devices fetches them
    around that pass, also those that embedding and head have in common."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy
        self.keeps_head = True
        """The head's weights stand after the pass; else a view takes a copy of them with it."""
        self.split: TokenSplit | None = None
        """How ranks share the tokens of a pass; None where each pass is one rank's."""
        self.keeping: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around the pass: where what it saves for the backward pass lies."""
        self.measures: Measures | None = None
        """What makes measures of logits; None as they are made without."""

    def forward(
        self,
        packed: Packed,
        temperature: float = 1.0,
        other: View | None = None,
        *,
        swapped: bool = False,
        squared_mass: bool = False,
        view_only: bool = False,
    ) -> TokenMeasures | View:
        """See `token_measures`; with `view_only` what another's measures need of this one."""
        share = self.split.share(packed) if self.split else None
        own = share.packed if share else packed
        if view_only:
            return self._view(own)
        with self.keeping():
            found = token_measures(
                self.policy,
                own,
                temperature,
                other,
                swapped=swapped,
                squared_mass=squared_mass,
                measures=self.measures,
            )
        return share.measures(found) if share else found

    def _view(self, packed: Packed) -> View:
        found = view(self.policy, packed)
        if self.keeps_head:
            return found
        weight = head_weight(self.policy.lm_head)
        if isinstance(weight, DTensor):
            return View(found.hidden, partial(shared_linear, weight=weight))
        return View(found.hidden, partial(F.linear, weight=weight))


class ValueModel(nn.Module):
    """A critic: a decoder's body and a linear head; the estimate before each predicted token."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy.model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.split: TokenSplit | None = None
        """How ranks share the tokens of a pass; None where each pass is one rank's."""
        self.keeping: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around the pass: where what it saves for the backward pass lies."""

    def forward(self, packed: Packed) -> Tensor:
        """[M] values, in units of reward."""
        share = self.split.share(packed) if self.split else None
        own = share.packed if share else packed
        with self.keeping():
            hidden = hidden_states(self.body, own.tokens, own.positions, own.layout)
        values = self.head(hidden.index_select(0, own.sources)).squeeze(-1).float().clone()
        return share.whole(values) if share else values
