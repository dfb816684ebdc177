"""Ulysses sequence parallelism (arXiv:2309.14509): ranks hold tokens, and during attention heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from quintet.errors import ConfigError
from quintet.policies.attention import MovableAttentionLayout
from quintet.policies.attention_backends import (
    AttentionOptions,
    active_attention_options,
    use_attention_options,
)
from quintet.policies.parallel.collectives import all_to_all


def check_ulysses(heads: int, kv_heads: int, num_ranks: int, component: str = "actor") -> None:
    """Check that the attention heads of a device can be distributed over `num_ranks`.

    Raises:
        ConfigError: the heads cannot be distributed evenly.
    """

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(num_ranks):
        key = f"{component}.parallel.ulysses"
        nearest = min(filter(fits, range(1, heads + 1)), key=lambda size: abs(size - num_ranks))
        raise ConfigError(
            f"{key} = {num_ranks}: {heads} attention heads and {kv_heads} key-value heads cannot be distributed evenly",
            key=key,
            value=num_ranks,
            hint=f"nearest valid value: {key}={nearest}",
        )


class PaddedLayout:
    """`MovableAttentionLayout` followed by padding tokens, so that the number of tokens is divisible."""

    def __init__(self, inner: MovableAttentionLayout, size: int) -> None:
        """`size` is the number of tokens of `inner`."""
        self._inner, self._size = inner, size
        self.max_length = inner.max_length

    def to(self, device: torch.device) -> PaddedLayout:
        return PaddedLayout(self._inner.to(device), self._size)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """See `AttentionLayout.attend`; the output of padding tokens is 0."""
        padding = len(query) - self._size
        query, key, value = (x[: self._size] for x in (query, key, value))
        return F.pad(self._inner.attend(layer, query, key, value, scale, window), (0, 0, 0, 0, 0, padding))


class UlyssesLayout:
    """`MovableAttentionLayout` of the tokens of all ranks, each for its share of heads.

    Ranks hold equally many tokens, in the order of ranks. If there are fewer key-value heads than ranks, they are
    repeated.
    """

    def __init__(self, inner: MovableAttentionLayout, group: ProcessGroup) -> None:
        """`inner` is the layout of the tokens of all ranks."""
        self._inner, self._group = inner, group
        self.max_length = inner.max_length

    def to(self, device: torch.device) -> UlyssesLayout:
        return UlyssesLayout(self._inner.to(device), self._group)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """See `AttentionLayout.attend`.

        Raises:
            ConfigError: the heads cannot be distributed over the ranks.
        """
        num_ranks = self._group.size()
        key, value = (_repeat_kv_heads(x, query.shape[1], num_ranks) for x in (key, value))
        # [n, heads, dim] to [n, ranks, heads per rank, dim].
        chunks = [x.view(len(x), num_ranks, -1, x.shape[2]) for x in (query, key, value)]
        query, key, value = _exchange_heads(chunks, self._group)
        with use_attention_options(self._options_of_rank()):
            out = self._inner.attend(layer, query, key, value, scale, window)
        back = all_to_all(out.view(num_ranks, -1, *out.shape[1:]), self._group)
        return back.transpose(0, 1).flatten(1, 2)

    def _options_of_rank(self) -> AttentionOptions:
        """Return the active options with the sinks of this rank's heads."""
        options = active_attention_options()
        if options.sinks is None:
            return options
        return options._replace(sinks=options.sinks.chunk(self._group.size())[self._group.rank()])


def _repeat_kv_heads(heads: Tensor, queries: int, num_ranks: int) -> Tensor:
    """Repeat keys or values [n, kv_heads, dim] so that each rank gets the ones of its query heads."""
    count = heads.shape[1]
    check_ulysses(queries, count, num_ranks)
    return heads if count >= num_ranks else heads.repeat_interleave(num_ranks // count, 1)


def _exchange_heads(chunks: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Exchange queries, keys and values [n, ranks, local heads, dim] for those of all tokens, [N, local heads, dim]."""
    widths = [part.shape[2] for part in chunks]
    outgoing = torch.cat(chunks, 2).transpose(0, 1)
    return list(torch.split(all_to_all(outgoing, group).flatten(0, 1), widths, 1))
