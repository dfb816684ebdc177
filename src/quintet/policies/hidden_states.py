"""Hidden states of a decoder without its head."""

from __future__ import annotations

from torch import Tensor, nn

from quintet.policies.attention import AttentionLayout
from quintet.policies.training_decoder import training_hidden_states


def compute_hidden_states(body: nn.Module, tokens: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
    """Return the last hidden states [P, hidden] of `tokens` [P], by the CPU kernels if they support the model."""
    if (states := training_hidden_states(body, tokens, position_ids, layout)) is not None:
        return states
    out = body(
        input_ids=tokens[None], position_ids=position_ids[None], attention_mask=None, use_cache=False, layout=layout
    )
    last: Tensor = out.last_hidden_state[0]
    return last
