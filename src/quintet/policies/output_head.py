"""Head of a model whose logits are scaled or soft-capped, or some of whose tokens are never sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintet.policies.lora import has_adapters
from quintet.policies.parallel.vocab_parallel import fill_vocab_columns, vocab_parallel_linear

MASKED_LOGIT = -1e4
"""Logit of masked tokens: their probability is exactly 0, and differences and products stay finite in every dtype."""

Logits = TypeVar("Logits", bound=Tensor)


class LogitTransform(NamedTuple):
    """Function from the products of hidden states and head weight to logits: `cap · tanh(scale · product / cap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Logits) -> Logits:
        """Return the transformed logits, of the same shape."""
        scaled: Any = logits if self.scale == 1.0 else logits * self.scale
        return cast(Logits, scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap)

    @classmethod
    def from_config(cls, config: Any) -> LogitTransform:
        """Read the transform from the configuration of a text model of transformers: `logit_scale` (Cohere) is a
        factor, `logits_scaling` (Granite) a divisor, `final_logit_softcapping` (Gemma) a soft cap."""
        factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        scale = float(1.0 if factor is None else factor) / float(divisor or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None) or None)


IDENTITY = LogitTransform()


class OutputHead(nn.Linear):
    """A linear head without bias that applies the model's `LogitTransform`. The logits of `masked_tokens` are
    `MASKED_LOGIT`.

    Engines and learners use the same head, so that log-probs are normalized over the same tokens.
    """

    masked_tokens: Tensor
    """int64 [k]."""

    def __init__(
        self, weight: nn.Parameter, masked_tokens: Sequence[int] = (), transform: LogitTransform = IDENTITY
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.transform = transform
        self.register_buffer("masked_tokens", torch.tensor(sorted(masked_tokens), dtype=torch.long), persistent=False)

    @property
    def is_plain(self) -> bool:
        """Whether logits are the products of hidden states and weight."""
        return self.transform == IDENTITY

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [n, vocabulary] of [n, hidden]."""
        return head_logits(self, self.weight, inputs)


def install_output_head(model: Any, masked_tokens: Sequence[int] = ()) -> None:
    """Replace the head of a transformers model by one that applies the model's logit transform, which transformers
    applies behind the head, and masks tokens. A model that needs neither keeps its head."""
    transform = LogitTransform.from_config(model.config.get_text_config())
    if masked_tokens or transform != IDENTITY:
        model.lm_head = OutputHead(model.lm_head.weight, masked_tokens, transform)


@contextmanager
def untransformed_logits(head: nn.Module) -> Iterator[None]:
    """Compute the plain products inside the `with` block: the forward pass of transformers applies the transform."""
    if not isinstance(head, OutputHead):
        yield
        return
    transform, head.transform = head.transform, IDENTITY
    try:
        yield
    finally:
        head.transform = transform


def head_logits(head: nn.Module, weight: Tensor, inputs: Tensor) -> Tensor:
    """Return the logits [n, vocabulary] of `head` for [n, hidden], with a copy of its weight, into which its adapters
    are merged; of a weight that is sharded by rows, as a DTensor."""
    head = head.get_submodule("base_layer") if has_adapters(head) else head
    if isinstance(weight, DTensor):
        sharded = vocab_parallel_linear(inputs, weight)
        if not isinstance(head, OutputHead):
            return sharded
        sharded = head.transform.apply(sharded)
        return fill_vocab_columns(sharded, head.masked_tokens, MASKED_LOGIT) if len(head.masked_tokens) else sharded
    logits = F.linear(inputs, weight)
    if not isinstance(head, OutputHead):
        return logits
    logits = head.transform.apply(logits)
    return logits.index_fill(-1, head.masked_tokens, MASKED_LOGIT) if len(head.masked_tokens) else logits


def mask_logits_(head: nn.Module, logits: Tensor) -> None:
    """Set the logits [n, vocabulary] of tokens that `head` masks, in place, if it masks any."""
    if isinstance(head, OutputHead) and len(head.masked_tokens):
        logits.index_fill_(-1, head.masked_tokens, MASKED_LOGIT)
