"""Hidden states of a decoder without its head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quintet.policies.attention import AttentionLayout
from quintet.policies.training_decoder import batched_positions, training_hidden_states
from quintet.policies.vision.image_encoder import (
    PackedImages,
    deepstack_inputs,
    embed_with_images,
    encode_images,
    text_decoder,
)


def compute_hidden_states(
    body: nn.Module,
    tokens: Tensor,
    position_ids: Tensor,
    layout: AttentionLayout,
    images: PackedImages | None = None,
) -> Tensor:
    """Return the last hidden states [P, hidden] of `tokens` [P], by the CPU kernels if they support the model.

    `position_ids` is [P], or [P, 3] with images, see `mrope_positions`.
    """
    decoder = text_decoder(body)
    if images is not None:
        features = encode_images(body, images.patches, images.grids).index_select(0, images.sources)
        return image_hidden_states(decoder, tokens, position_ids, layout, images.indices, features)
    if (states := training_hidden_states(decoder, tokens, position_ids, layout)) is not None:
        return states
    return _modules_hidden_states(decoder, position_ids, layout, input_ids=tokens[None])


def image_hidden_states(
    decoder: nn.Module,
    tokens: Tensor,
    position_ids: Tensor,
    layout: AttentionLayout,
    indices: Tensor,
    features: Tensor,
) -> Tensor:
    """Return the last hidden states [P, hidden] of `tokens` [P] with the features of images, see `encode_images`, at
    `indices` [k]."""
    embeddings = embed_with_images(decoder, tokens, indices, features)
    deepstack = deepstack_inputs(tokens, features, embeddings.shape[1])
    if not deepstack:
        states = training_hidden_states(decoder, tokens, position_ids, layout, embeddings)
        if states is not None:
            return states
    return _modules_hidden_states(decoder, position_ids, layout, inputs_embeds=embeddings[None], **deepstack)


def _modules_hidden_states(decoder: nn.Module, position_ids: Tensor, layout: AttentionLayout, **inputs: Any) -> Tensor:
    out = decoder(
        **inputs, position_ids=batched_positions(position_ids), attention_mask=None, use_cache=False, layout=layout
    )
    last: Tensor = out.last_hidden_state[0]
    return last
