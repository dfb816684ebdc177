"""Attention function for all `transformers` decoders, so that their modeling code is used unchanged.

A model loaded with `attn_implementation=ATTENTION_IMPLEMENTATION` passes its queries, keys and values to the `layout`
argument of its forward pass. The layout defines which tokens attend to which: packed sequences in training, slots of a
KV cache in generation. The model itself builds no attention mask.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.errors import MachineError
from quintet.policies.attention_backends import (
    attention_backend,
    is_flash_allowed,
    scaled_dot_product_attention,
    use_attention_backend,
)
from quintet.policies.flash_varlen import FlashVarlenInputs, supports_flash_varlen

ATTENTION_IMPLEMENTATION = "quintet"


class AttentionLayout(Protocol):
    """Attention over the tokens of one forward pass."""

    @property
    def max_length(self) -> int:
        """Length of the longest sequence in tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return [N, heads, dim] for query [N, heads, dim] and key and value [N, kv_heads, dim]."""


class MovableAttentionLayout(AttentionLayout, Protocol):
    """A layout that can be moved to a device."""

    def to(self, device: torch.device) -> Self:
        """Return this layout with its tensors on `device`."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: AttentionLayout,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if sliding_window is not None and layout.max_length > sliding_window:
        raise MachineError(
            f"the model has a sliding window of {sliding_window} tokens, but a sequence has {layout.max_length}",
            f"limit rollout.max_prompt_tokens + rollout.max_response_tokens, and sft.max_tokens, to {sliding_window}",
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    with use_attention_backend(attention_backend(module)):
        return layout.attend(layer, q, k, v, scaling)[None], None


def register_attention() -> str:
    """Register `ATTENTION_IMPLEMENTATION` with transformers and return the name to pass as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_IMPLEMENTATION, _attention)
    return ATTENTION_IMPLEMENTATION


class PaddedRows:
    """Conversion between packed sequences and rows padded to the longest of them."""

    def __init__(self, lengths: Tensor) -> None:
        """`lengths`: int64 [B], each at least 1."""
        self.width = int(lengths.max())
        columns = torch.arange(self.width, device=lengths.device)
        self.valid = columns < lengths[:, None]
        self.ragged = not bool(self.valid.all())
        self._shape = (len(lengths), self.width)
        starts = lengths.cumsum(0) - lengths
        self._pad_index = (starts[:, None] + columns).masked_fill(~self.valid, 0).flatten()
        self._unpad_index = self.valid.flatten().nonzero().squeeze(-1)

    def to(self, device: torch.device) -> Self:
        """Return a copy with its tensors on `device`."""
        moved = copy.copy(self)
        moved.valid, moved._pad_index, moved._unpad_index = (
            x.to(device) for x in (self.valid, self._pad_index, self._unpad_index)
        )
        return moved

    def pad(self, packed: Tensor) -> Tensor:
        """Convert [N, heads, dim] to [B, heads, width, dim]."""
        rows = packed.index_select(0, self._pad_index) if self.ragged else packed
        return rows.view(*self._shape, *packed.shape[1:]).transpose(1, 2)

    def unpad(self, rows: Tensor) -> Tensor:
        """Convert [B, heads, width, dim] to [N, heads, dim]."""
        packed = rows.transpose(1, 2).reshape(-1, rows.shape[1], rows.shape[3])
        return packed.index_select(0, self._unpad_index) if self.ragged else packed


@dataclass(frozen=True, slots=True)
class PackedStructure:
    """Lengths of the shared and the separate parts of packed sequences, see `PackedLayout`.

    `prefix` in tokens, `stems` int64 [S] and `branches` int64 [B] in tokens each, `parents` int64 [B] the stem of each
    branch.
    """

    branches: Tensor
    prefix: int = 0
    stems: Tensor | None = None
    parents: Tensor | None = None

    @property
    def max_length(self) -> int:
        """Upper bound of the length of the longest sequence in tokens."""
        return self.prefix + sum(
            int(lengths.max()) for lengths in (self.stems, self.branches) if lengths is not None and len(lengths)
        )


class PackedLayout:
    """Packed sequences in which shared beginnings are computed once.

    The tokens are `[prefix][stem 1]…[stem S][branch 1]…[branch B]`: every sequence starts with the prefix, continues
    with one of the stems (the samples of a prompt share one) and ends with one branch. Attention is causal within each
    sequence. Linear layers therefore compute neither padding nor a prompt twice; only the attention product is padded,
    to the longest row.
    """

    def __init__(
        self, branches: Tensor, prefix: int = 0, stems: Tensor | None = None, parents: Tensor | None = None
    ) -> None:
        """`branches` int64 [B] and `stems` int64 [S] in tokens each; `prefix` in tokens; `parents` int64 [B], the stem
        of each branch. Without stems, branches follow the prefix.
        """
        self.structure = PackedStructure(branches, prefix, stems, parents)
        self._sizes = [prefix, 0 if stems is None else int(stems.sum()), int(branches.sum())]
        self._prefix = PaddedRows(torch.tensor([prefix])) if prefix else None
        self._stems = None if stems is None else PaddedRows(stems)
        self._branches = PaddedRows(branches) if len(branches) else None
        self._parents = parents
        self._flash_inputs: FlashVarlenInputs | None = None
        self._stem_mask = causal_mask(self._stems.width, prefix) if self._stems else None
        self._branch_mask = self._build_branch_mask(self._branches.width, prefix) if self._branches else None
        self.max_length = self.structure.max_length

    def to(self, device: torch.device) -> Self:
        """Return a copy with its tensors on `device`."""
        moved = copy.copy(self)
        moved._prefix, moved._stems, moved._branches = (
            rows and rows.to(device) for rows in (self._prefix, self._stems, self._branches)
        )
        moved._parents, moved._stem_mask, moved._branch_mask = (
            None if x is None else x.to(device) for x in (self._parents, self._stem_mask, self._branch_mask)
        )
        return moved

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionLayout.attend`.

        Uses flash-attn on a GPU if it is installed, else torch's attention on padded rows.
        """
        if supports_flash_varlen(query) and is_flash_allowed():
            return self._flash_inputs_on(query.device).attend(query, key, value, scale)
        prefix_qkv, stems, branches = zip(*(torch.split(x, self._sizes) for x in (query, key, value)), strict=True)
        out: list[Tensor] = []
        context: list[tuple[Tensor, Tensor]] = []
        if self._prefix:
            out.append(attend_padded_rows(self._prefix, prefix_qkv, context, None, scale))
            context.append((self._prefix.pad(prefix_qkv[1]), self._prefix.pad(prefix_qkv[2])))
        if self._stems:
            out.append(attend_padded_rows(self._stems, stems, context, self._stem_mask, scale))
            if self._parents is not None:
                key, value = (self._stems.pad(x).index_select(0, self._parents) for x in stems[1:])
                context.append((key, value))
        if self._branches:
            out.append(attend_padded_rows(self._branches, branches, context, self._branch_mask, scale))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _flash_inputs_on(self, device: torch.device) -> FlashVarlenInputs:
        """Return flash-attn's inputs, built by the first layer and reused by the others."""
        if self._flash_inputs is None or self._flash_inputs.cu_seqlens_q.device != device:
            parts = self.structure
            inputs = FlashVarlenInputs.from_lengths(parts.prefix, parts.stems, parts.parents, parts.branches)
            self._flash_inputs = inputs.to(device)
        return self._flash_inputs

    def kernel_descriptor(self, heads: int, kv_heads: int, dim: int) -> Tensor:
        """Return the layout as the training kernels read it, int64.

        Six numbers `heads, kv_heads, dim, prefix, num_clusters, 0`; per cluster the start and length of its stem and
        the half-open range of its branches; per branch its start and length. The prefix is the first cluster.
        """
        prefix, stems, branches = self.structure.prefix, self.structure.stems, self.structure.branches
        starts = prefix + (0 if stems is None else int(stems.sum())) + branches.cumsum(0) - branches
        spans = torch.stack([starts, branches], 1)
        ends = torch.arange(1, len(branches) + 1)
        clusters = torch.stack([torch.zeros_like(ends), torch.zeros_like(ends), ends - 1, ends], 1)
        if stems is not None and (parents := self.structure.parents) is not None:
            spans = spans[torch.argsort(parents, stable=True)]
            counts = torch.bincount(parents, minlength=len(stems))
            ends = counts.cumsum(0)
            clusters = torch.stack([prefix + stems.cumsum(0) - stems, stems, ends - counts, ends], 1)
        if prefix:
            clusters = torch.cat([torch.tensor([[0, prefix, 0, 0]]), clusters])
        head = torch.tensor([heads, kv_heads, dim, prefix, len(clusters), 0])
        return torch.cat([head, clusters.flatten(), spans.flatten()])

    def _build_branch_mask(self, width: int, prefix: int) -> Tensor | None:
        """Return the branches' mask, bool [width, keys] or [B, 1, width, keys]; None if it is causal among branches."""
        if self._stems is None or self._parents is None:
            return causal_mask(width, prefix) if prefix else None
        mask = causal_mask(width, prefix + self._stems.width)
        if not self._stems.ragged:
            return mask
        visible = F.pad(self._stems.valid[self._parents], (prefix, width), value=True)
        return mask & visible[:, None, None]


def causal_mask(width: int, num_context: int) -> Tensor:
    """Return a bool mask [width, num_context + width]: all context tokens, and causal among the `width` tokens."""
    return torch.ones(width, num_context + width, dtype=torch.bool).tril(num_context)


def attend_padded_rows(
    rows: PaddedRows,
    packed: tuple[Tensor, ...],
    context: list[tuple[Tensor, Tensor]],
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the attention [N, heads, dim] of rows over their context and their own tokens.

    `packed` holds query, key and value, [N, heads, dim] each; `context` the keys and values of earlier parts,
    [B or 1, heads, length, dim]; `mask` is bool [width, keys] or [B, 1, width, keys], None for causal attention among
    the rows' own tokens.
    """
    q, k, v = (rows.pad(x) for x in packed)
    if context:
        count = len(q)
        k = torch.cat([*(x.expand(count, -1, -1, -1) for x, _ in context), k], dim=2)
        v = torch.cat([*(x.expand(count, -1, -1, -1) for _, x in context), v], dim=2)
    return rows.unpad(scaled_dot_product_attention(q, k, v, mask, scale))
