"""Attention function for all `transformers` decoders, so that their modeling code is used unchanged.

A model loaded with `attn_implementation=ATTENTION_IMPLEMENTATION` passes its queries, keys and values to the `layout`
argument of its forward pass. The layout defines which tokens attend to which: packed sequences in training, slots of a
KV cache in generation. The model itself builds no attention mask.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.errors import MachineError
from quintet.policies.attention_backends import (
    AttentionOptions,
    attention_backend,
    is_flash_allowed,
    scaled_dot_product_attention,
    use_attention_options,
)
from quintet.policies.flash_varlen import FlashVarlenInputs, supports_flash_varlen

ATTENTION_IMPLEMENTATION = "quintet"
MODELS_HINT = "docs/models.md lists the supported model families"
UNSUPPORTED_OPTIONS = {
    "position_bias": "a position bias",
    "indices": "an index of selected tokens (sparse attention)",
    "block_indices": "an index of selected blocks (sparse attention)",
}
"""Arguments of attention functions in transformers that change the result, and what they ask for."""


class AttentionLayout(Protocol):
    """Attention over the tokens of one forward pass."""

    @property
    def max_length(self) -> int:
        """Length of the longest sequence in tokens."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Return [N, heads, dim] for query [N, heads, dim] and key and value [N, kv_heads, dim].

        With a `window`, a token attends to the last `window` tokens of its sequence, itself included.
        """


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
    layout: AttentionLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    if attention_mask is not None or options.keys() & UNSUPPORTED_OPTIONS.keys():
        _refuse_options(module, attention_mask, options)
    if layout is None:
        raise MachineError(
            f"{type(module).__name__} is not supported: its layers do not pass the arguments of a forward pass on to"
            " attention",
            MODELS_HINT,
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    window = sliding_window if sliding_window is not None and layout.max_length > sliding_window else None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    if width < k.shape[-1]:
        # latent attention: caches and kernels have one width for keys and values
        v = F.pad(v, (0, k.shape[-1] - width))
    with use_attention_options(AttentionOptions(attention_backend(module), softcap or None, s_aux)):
        return layout.attend(layer, q, k, v, scaling, window)[None, ..., :width], None


def _refuse_options(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, object]) -> None:
    """Raise if a layer asks for attention of another kind."""
    asked = [text for name, text in UNSUPPORTED_OPTIONS.items() if options.get(name) is not None]
    if attention_mask is not None:
        asked.append("an attention mask of the model's own")
    if asked:
        raise MachineError(
            f"{type(module).__name__} is not supported: it computes attention with {' and '.join(asked)}", MODELS_HINT
        )


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


class _Masks(NamedTuple):
    """Masks of the parts of a `PackedLayout`, None for causal attention."""

    prefix: Tensor | None
    stems: Tensor | None
    branches: Tensor | None


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
        self._window_masks: dict[int, _Masks] = {}
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
        moved._window_masks = {}
        return moved

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """See `AttentionLayout.attend`.

        Uses flash-attn on a GPU if it is installed, else torch's attention on padded rows.
        """
        if supports_flash_varlen(query) and is_flash_allowed():
            return self._flash_inputs_on(query.device).attend(query, key, value, scale, window)
        masks = self._masks(window)
        prefix_qkv, stems, branches = zip(*(torch.split(x, self._sizes) for x in (query, key, value)), strict=True)
        out: list[Tensor] = []
        context: list[tuple[Tensor, Tensor]] = []
        if self._prefix:
            out.append(attend_padded_rows(self._prefix, prefix_qkv, context, masks.prefix, scale))
            context.append((self._prefix.pad(prefix_qkv[1]), self._prefix.pad(prefix_qkv[2])))
        if self._stems:
            out.append(attend_padded_rows(self._stems, stems, context, masks.stems, scale))
            if self._parents is not None:
                key, value = (self._stems.pad(x).index_select(0, self._parents) for x in stems[1:])
                context.append((key, value))
        if self._branches:
            out.append(attend_padded_rows(self._branches, branches, context, masks.branches, scale))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _masks(self, window: int | None) -> _Masks:
        """Return the masks for a window, built by the first layer and reused by the others."""
        if window is None:
            return _Masks(None, self._stem_mask, self._branch_mask)
        if window not in self._window_masks:
            self._window_masks[window] = self._build_window_masks(window)
        return self._window_masks[window]

    def _build_window_masks(self, window: int) -> _Masks:
        """Return the masks of attention within a window. The keys of a row are at consecutive positions, except for the
        padding of its stem."""
        prefix = self.structure.prefix
        stems = self._stems
        branches = self._branches
        prefix_mask = causal_mask(prefix, 0) & within_window(torch.arange(prefix), torch.arange(prefix), window)
        stem_mask = branch_mask = None
        if stems:
            positions = torch.arange(prefix + stems.width)
            stem_mask = causal_mask(stems.width, prefix) & within_window(positions[prefix:], positions, window)
        if branches:
            start, context = torch.full((1, 1), prefix), prefix
            if self.structure.stems is not None and self.structure.parents is not None and stems:
                start, context = prefix + self.structure.stems[self.structure.parents, None], prefix + stems.width
            own = start + torch.arange(branches.width)
            keys = torch.cat([torch.arange(context).expand(len(own), -1), own], 1)
            mask = causal_mask(branches.width, context) if self._branch_mask is None else self._branch_mask.cpu()
            branch_mask = mask & within_window(own, keys, window)[:, None]
        device = self._window_device
        masks = (x if x is None else x.to(device) for x in (prefix_mask, stem_mask, branch_mask))
        return _Masks(*masks)

    @property
    def _window_device(self) -> torch.device:
        rows = self._branches or self._stems or self._prefix
        return rows.valid.device if rows else torch.device("cpu")

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


def within_window(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return bool [..., q, k]: whether keys at positions [..., k] are in the windows of queries at [..., q]."""
    return queries[..., :, None] - keys[..., None, :] < window


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
