"""The tokens of one pass shared out among ranks, and what is measured at them put together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from quintet.policies.attention import MovableLayout, PackedLayout
from quintet.policies.causal_lm import Packed, TokenMeasures
from quintet.policies.collectives import collect
from quintet.policies.context_parallel import ContextLayout
from quintet.policies.sequence_parallel import HeadsLayout, PaddedLayout

__all__ = ["TokenShare", "TokenSplit"]


@dataclass(frozen=True, slots=True)
class TokenShare:
    """What one rank computes of a pass."""

    packed: Packed
    """The rank's tokens, and the predictions made there: [p] and [m] instead of [P] and [M]."""
    whole: Callable[[Tensor], Tensor]
    """[m, …] measured here to [M, …] of all ranks. Gradients of parameters are to be summed over the ranks."""

    def measures(self, own: TokenMeasures) -> TokenMeasures:
        """Those of all ranks' places, [M] each."""
        columns = self.whole(torch.stack(own, 1)).unbind(1)
        # FSDP's hooks want tensors of their own rather than views
        return TokenMeasures(*(column.clone() for column in columns))


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """How ranks share the tokens of a pass: first among those of `context`, then each part among those of `ulysses`,
    in numbers of which `multiple` is a divisor (the ranks among which norms share them, see `split_layers`)."""

    context: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    multiple: int = 1

    def share(self, packed: Packed) -> TokenShare:
        """This rank's part of a pass that all ranks know; padding is token 0 at position 0, which nothing sees."""
        device = packed.tokens.device
        places, layout = self._own(packed)
        places, layout = places.to(device), layout.to(device)
        inverse = torch.full_like(packed.tokens, -1)
        held = places >= 0
        inverse[places[held]] = held.nonzero().squeeze(-1)
        sources = inverse[packed.sources]
        predicted = (sources >= 0).nonzero().squeeze(-1)
        tokens, positions = (torch.where(held, x[places.clamp(min=0)], 0) for x in (packed.tokens, packed.positions))
        own = replace(
            packed,
            tokens=tokens,
            positions=positions,
            layout=layout,
            sources=sources[predicted],
            targets=packed.targets[predicted],
        )
        groups = tuple(group for group in (self.ulysses, self.context) if group is not None and group.size() > 1)
        if not groups:
            return TokenShare(own, lambda values: values)
        return TokenShare(own, partial(collect, places=predicted, size=len(packed.sources), groups=groups))

    def _own(self, packed: Packed) -> tuple[Tensor, MovableLayout]:
        """The rank's tokens by their place, -1 for padding, and their layout."""
        layout: MovableLayout = packed.layout
        places = torch.arange(len(packed.tokens))
        if self.context is not None and self.context.size() > 1:
            if not isinstance(packed.layout, PackedLayout):
                raise TypeError(f"{type(packed.layout).__name__} is shared out already")
            layout = ContextLayout(packed.layout.structure, self.context)
            places = _filled(layout.places, layout.size)
        ranks = 1 if self.ulysses is None else self.ulysses.size()
        size, each = len(places), self.multiple * ranks
        if size % each:
            layout = PaddedLayout(layout, size)
            places = _filled(places, -(-size // each) * each)
        if self.ulysses is not None and ranks > 1:
            layout = HeadsLayout(layout, self.ulysses)
            places = places.chunk(ranks)[self.ulysses.rank()]
        return places, layout


def _filled(places: Tensor, size: int) -> Tensor:
    """Up to `size` with -1."""
    return F.pad(places, (0, size - len(places)), value=-1)
