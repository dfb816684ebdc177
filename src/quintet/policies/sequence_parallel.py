"""Ulysses (arXiv:2309.14509): the tokens of a pass are shared out among ranks, attention's heads while it computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from quintet.errors import ConfigError
from quintet.policies.attention import MovableLayout
from quintet.policies.collectives import exchange

__all__ = ["HeadsLayout", "PaddedLayout", "refuse_ulysses"]


def refuse_ulysses(heads: int, kv_heads: int, ranks: int, component: str = "actor") -> None:
    """Hold the attention heads of a device against the ranks that are to share them.

    Raises:
        ConfigError: they can't all have as many.
    """

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(ranks):
        key = f"{component}.parallel.ulysses"
        near = min(filter(fits, range(1, heads + 1)), key=lambda size: abs(size - ranks))
        raise ConfigError(
            f"{key} = {ranks}: {heads} attention heads over {kv_heads} key-value heads can't be shared out so",
            key=key,
            value=ranks,
            hint=f"nearest: {key}={near}",
        )


class PaddedLayout:
    """An inner layout behind whose tokens stand some that nobody looks at, so that their number divides."""

    def __init__(self, inner: MovableLayout, size: int) -> None:
        """`size` is the number of tokens that `inner` knows."""
        self._inner, self._size = inner, size
        self.longest = inner.longest

    def to(self, device: torch.device) -> PaddedLayout:
        """See `MovableLayout.to`."""
        return PaddedLayout(self._inner.to(device), self._size)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`; what stands behind comes out as 0."""
        padding = len(query) - self._size
        query, key, value = (x[: self._size] for x in (query, key, value))
        return F.pad(self._inner.attend(layer, query, key, value, scale), (0, 0, 0, 0, 0, padding))


class HeadsLayout:
    """Each rank holds as many tokens as the others, in the order of ranks, and attends over all of them for its share
    of heads. Key-value heads fewer than ranks are repeated."""

    def __init__(self, inner: MovableLayout, group: ProcessGroup) -> None:
        """`inner` knows the tokens of all ranks together."""
        self._inner, self._group = inner, group
        self.longest = inner.longest

    def to(self, device: torch.device) -> HeadsLayout:
        """See `MovableLayout.to`."""
        return HeadsLayout(self._inner.to(device), self._group)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`.

        Raises:
            ConfigError: heads can't be shared out among so many ranks.
        """
        ranks = self._group.size()
        key, value = (_repeated(x, query.shape[1], ranks) for x in (key, value))
        parts = [_by_rank(x, ranks) for x in (query, key, value)]
        query, key, value = _received(parts, self._group)
        out = self._inner.attend(layer, query, key, value, scale)
        back = exchange(out.view(ranks, -1, *out.shape[1:]), self._group)
        return back.transpose(0, 1).flatten(1, 2)


def _repeated(heads: Tensor, queries: int, ranks: int) -> Tensor:
    """Keys or values [n, kv_heads, dim] such that each rank gets those of its queries."""
    count = heads.shape[1]
    refuse_ulysses(queries, count, ranks)
    return heads if count >= ranks else heads.repeat_interleave(ranks // count, 1)


def _by_rank(heads: Tensor, ranks: int) -> Tensor:
    """[n, heads, dim] to [n, ranks, heads of each, dim]."""
    return heads.view(len(heads), ranks, -1, heads.shape[2])


def _received(parts: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Queries, keys and values [n, ranks, own heads, dim] to those of all ranks' tokens, [N, own heads, dim]."""
    widths = [part.shape[2] for part in parts]
    sent = torch.cat(parts, 2).transpose(0, 1)
    return list(torch.split(exchange(sent, group).flatten(0, 1), widths, 1))
