"""Distribution of the tokens of a forward pass over ranks, for context, Ulysses and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from quintet.policies.attention import MovableAttentionLayout, PackedLayout
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.parallel.collectives import scatter_all_reduce
from quintet.policies.parallel.context_parallel import ContextParallelLayout
from quintet.policies.parallel.ulysses_parallel import PaddedLayout, UlyssesLayout
from quintet.policies.token_statistics import TokenStatistics
from quintet.policies.vision.image_encoder import PackedImages


@dataclass(frozen=True, slots=True)
class TokenShard:
    """Tokens and predictions of a forward pass on one rank."""

    packed: PackedBatch
    """The rank's tokens [p] and predictions [m]."""
    gather: Callable[[Tensor], Tensor]
    """Combine the ranks' results [m, …] to [M, …]. The gradients of parameters must be summed over the ranks."""

    def gather_statistics(self, local: TokenStatistics) -> TokenStatistics:
        """Return the statistics of all ranks' predictions, [M] each."""
        columns = self.gather(torch.stack(local, 1)).unbind(1)
        # clone: FSDP's hooks warn about views
        return TokenStatistics(*(column.clone() for column in columns))


@dataclass(frozen=True, slots=True)
class TokenSharding:
    """Process groups over which tokens are distributed: first over `context`, then each part over `ulysses`.

    Each rank's tokens are padded to a multiple of `pad_multiple`, the number of sequence-parallel ranks (see
    `apply_tensor_parallel`).
    """

    context: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    pad_multiple: int = 1

    def shard(self, packed: PackedBatch) -> TokenShard:
        """Return this rank's share of a pass; padding is token 0 at position 0, to which no token attends."""
        device = packed.tokens.device
        indices, layout = self._select(packed)
        indices, layout = indices.to(device), layout.to(device)
        local_index = torch.full_like(packed.tokens, -1)
        is_local = indices >= 0
        local_index[indices[is_local]] = is_local.nonzero().squeeze(-1)
        prediction_indices = local_index[packed.prediction_indices]
        predicted = (prediction_indices >= 0).nonzero().squeeze(-1)
        tokens, position_ids = (
            torch.where(is_local.view(-1, *(1,) * (x.dim() - 1)), x[indices.clamp(min=0)], 0)
            for x in (packed.tokens, packed.position_ids)
        )
        local = replace(
            packed,
            tokens=tokens,
            position_ids=position_ids,
            layout=layout,
            prediction_indices=prediction_indices[predicted],
            targets=packed.targets[predicted],
            images=packed.images and _select_images(packed.images, local_index),
        )
        groups = tuple(group for group in (self.ulysses, self.context) if group is not None and group.size() > 1)
        if not groups:
            return TokenShard(local, lambda values: values)
        return TokenShard(
            local, partial(scatter_all_reduce, indices=predicted, size=len(packed.prediction_indices), groups=groups)
        )

    def _select(self, packed: PackedBatch) -> tuple[Tensor, MovableAttentionLayout]:
        """Return the indices of the rank's tokens, -1 for padding, and their layout."""
        layout: MovableAttentionLayout = packed.layout
        indices = torch.arange(len(packed.tokens))
        if self.context is not None and self.context.size() > 1:
            if not isinstance(packed.layout, PackedLayout):
                raise TypeError(f"{type(packed.layout).__name__} is distributed already")
            layout = ContextParallelLayout(packed.layout.structure, self.context)
            indices = _pad_to(layout.indices, layout.size)
        num_ranks = 1 if self.ulysses is None else self.ulysses.size()
        size, divisor = len(indices), self.pad_multiple * num_ranks
        if size % divisor:
            layout = PaddedLayout(layout, size)
            indices = _pad_to(indices, -(-size // divisor) * divisor)
        if self.ulysses is not None and num_ranks > 1:
            layout = UlyssesLayout(layout, self.ulysses)
            indices = indices.chunk(num_ranks)[self.ulysses.rank()]
        return indices, layout


def _select_images(images: PackedImages, local_index: Tensor) -> PackedImages:
    """Return the images with this rank's image tokens, by each token's index on this rank [P], -1 if it is on another.

    Every rank encodes all images: with sharded weights, all ranks have to run the encoder together.
    """
    indices, order = local_index[images.indices].sort()
    is_local = indices >= 0
    return replace(images, indices=indices[is_local], sources=images.sources[order[is_local]])


def _pad_to(indices: Tensor, size: int) -> Tensor:
    return F.pad(indices, (0, size - len(indices)), value=-1)
