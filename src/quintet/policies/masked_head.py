"""Head of a model some of whose tokens are never sampled, such as the placeholders of images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintet.policies.parallel.vocab_parallel import fill_vocab_columns, vocab_parallel_linear

MASKED_LOGIT = -1e4
"""Logit of masked tokens: their probability is exactly 0, and differences and products stay finite in every dtype."""


class MaskedHead(nn.Linear):
    """A linear head without bias whose logits of `masked_tokens` are `MASKED_LOGIT`.

    Engines and learners use the same head, so that log-probs are normalized over the same tokens.
    """

    masked_tokens: Tensor
    """int64 [k]."""

    def __init__(self, weight: nn.Parameter, masked_tokens: Sequence[int]) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.register_buffer("masked_tokens", torch.tensor(sorted(masked_tokens)), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [n, vocabulary] of [n, hidden]."""
        return head_logits(self, self.weight, inputs)


def head_logits(head: nn.Module, weight: Tensor, inputs: Tensor) -> Tensor:
    """Return the logits [n, vocabulary] of `head` for [n, hidden], with a copy of its weight; of a weight that is
    sharded by rows, as a DTensor."""
    if isinstance(weight, DTensor):
        sharded = vocab_parallel_linear(inputs, weight)
        if isinstance(head, MaskedHead):
            return fill_vocab_columns(sharded, head.masked_tokens, MASKED_LOGIT)
        return sharded
    logits = F.linear(inputs, weight)
    return logits.index_fill(-1, head.masked_tokens, MASKED_LOGIT) if isinstance(head, MaskedHead) else logits


def mask_logits_(head: nn.Module, logits: Tensor) -> None:
    """Set the logits [n, vocabulary] of tokens that `head` masks, in place, if it masks any."""
    if isinstance(head, MaskedHead):
        logits.index_fill_(-1, head.masked_tokens, MASKED_LOGIT)
