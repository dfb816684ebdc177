"""Keys and values of what is being decoded, each piece of text in memory once.

A running request sees three pieces: a prefix that all prompts begin with, the rest of its prompt, which the samples of
one prompt share, and its own answer. Each kind lies in a `KeyValueStore` without gaps from slot 0 on, so that a
decoding step reads it as it lies; what several requests see is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quintet.kernels.decoding import Kernels, kernels
from quintet.policies.attention import Layout, Rows, attend_rows
from quintet.rollout.pages import zeros

__all__ = ["CacheShape", "DecodeLayout", "ExtendLayout", "KeyValueStore", "Shared", "SideBySide"]

FEW = 64
"""New tokens of a row up to which they attend one by one; products over all of them are faster beyond."""
GRAIN = 32
"""Tokens by which a store's slots grow longer, at least."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model's keys and values need."""

    layers: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: torch.nn.Module) -> CacheShape:
        """Of a transformers decoder."""
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        weight = next(model.parameters())
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(config.num_hidden_layers, kv_heads, dim, weight.dtype, weight.device)


class KeyValueStore:
    """Keys and values, `[layers][slots, kv_heads, length, dim]` each. Slots and length grow as they are needed."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self.slots = 0
        self.length = 0
        self.keys: list[Tensor] = [self._empty(0, 0) for _ in range(shape.layers)]
        self.values: list[Tensor] = [self._empty(0, 0) for _ in range(shape.layers)]
        self._addresses = self._found()

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens; what is there stays."""
        if slots <= self.slots and length <= self.length:
            return
        if slots > self.slots:
            slots = max(slots, min(2 * self.slots, self.slots + 64))
        if length > self.length:
            length = max(-(-length // GRAIN) * GRAIN, min(2 * self.length, self.length + 8 * GRAIN))
        before = (self.slots, self.length)
        self.slots, self.length = max(slots, self.slots), max(length, self.length)
        for stores in (self.keys, self.values):
            for layer, old in enumerate(stores):
                stores[layer] = new = self._empty(self.slots, self.length)
                new[: before[0], :, : before[1]] = old
        self._addresses = self._found()

    def take(
        self, targets: Sequence[int], other: KeyValueStore, sources: Sequence[int], count: int, *, at: int = 0
    ) -> None:
        """Copy the first `count` tokens of slots of another store, or of this one, behind the first `at` of slots
        here."""
        if not count:
            return
        device = self._shape.device
        target, source = torch.tensor(targets, device=device), torch.tensor(sources, device=device)
        for mine, its in ((self.keys, other.keys), (self.values, other.values)):
            for to, come in zip(mine, its, strict=True):
                to[target, :, at : at + count] = come[source, :, :count]

    def kernels(self) -> Kernels | None:
        """Those that read it, if there are any."""
        return kernels(self._shape.dtype, self._shape.device.type)

    @property
    def scattered(self) -> bool:
        """Whether rows may lie in any of its slots; else row i is read in slot i."""
        return self.kernels() is not None

    def words(self, layer: int, slots: Tensor, seen: Tensor) -> tuple[int, ...]:
        """What it says to `Kernels.attend`: token i sees the first `seen[i]` tokens of slot `slots[i]`, int64 [n]."""
        return (*self._addresses[layer], slots.data_ptr(), seen.data_ptr())

    def _found(self) -> list[tuple[int, ...]]:
        """Where each layer's keys and values lie, and the elements from slot to slot and from head to head."""
        both = zip(self.keys, self.values, strict=True)
        return [(keys.data_ptr(), values.data_ptr(), *keys.stride()[:2]) for keys, values in both]

    def _empty(self, slots: int, length: int) -> Tensor:
        shape = self._shape
        return zeros((slots, shape.kv_heads, length, shape.dim), shape.dtype, shape.device)


class ExtendLayout:
    """New tokens of several slots, packed end to end, each row behind what its slot and its prefix already hold."""

    def __init__(
        self,
        store: KeyValueStore,
        slots: Sequence[int],
        past: Sequence[int],
        lengths: Sequence[int],
        prefix: tuple[KeyValueStore, int, int] | None = None,
    ) -> None:
        """Row i brings `lengths[i]` tokens behind the first `past[i]` of slot `slots[i]`. `prefix` is a store, the slot
        in it and the tokens there that all rows see first."""
        device = store.keys[0].device
        self._store = store
        self._slots = torch.tensor(slots, device=device)
        self._rows = Rows(torch.tensor(lengths, device=device))
        self._prefix = prefix
        self._past = max(past)
        self.longest = self._past + self._rows.width + (prefix[2] if prefix else 0)
        rows = torch.arange(len(slots), device=device).repeat_interleave(torch.tensor(lengths, device=device))
        counts, begun = torch.tensor(lengths, device=device), torch.tensor(past, device=device)
        inside = torch.arange(len(rows), device=device) - (counts.cumsum(0) - counts - begun)[rows]
        self._targets = (self._slots[rows], inside)
        self._past_of = begun
        self._kernels = store.kernels() if self._rows.width <= FEW else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`."""
        slots, inside = self._targets
        if self._kernels:
            words = [*self._words_of_prefix(layer), *self._store.words(layer, slots, self._seen)]
            return self._kernels.attend(query, key, value, scale, words)
        keys, values = self._store.keys[layer], self._store.values[layer]
        keys[slots, :, inside], values[slots, :, inside] = key, value
        before = []
        if self._prefix is not None:
            store, slot, length = self._prefix
            before.append(tuple(x[layer][slot, None, :, :length] for x in (store.keys, store.values)))
        if self._past:
            before.append((keys[self._slots, :, : self._past], values[self._slots, :, : self._past]))
        return attend_rows(self._rows, (query, key, value), before, self._mask, scale)  # type: ignore[arg-type]

    @cached_property
    def _seen(self) -> Tensor:
        """int64 [N], tokens of its slot that each new token sees."""
        return self._targets[1] + 1

    @cached_property
    def _all_of_prefix(self) -> tuple[Tensor, Tensor]:
        """int64 [N] each: the prefix's slot and length for each new token."""
        _, slot, length = self._prefix or (None, 0, 0)
        seen = self._seen
        return torch.full_like(seen, slot), torch.full_like(seen, length)

    def _words_of_prefix(self, layer: int) -> tuple[int, ...]:
        return self._prefix[0].words(layer, *self._all_of_prefix) if self._prefix else ()

    @cached_property
    def _mask(self) -> Tensor | None:
        """What new tokens see, bool [1 or b, 1, width, keys]; None where it is plainly what comes before them."""
        past = self._past_of
        width, prefix = self._rows.width, 0 if self._prefix is None else self._prefix[2]
        if not prefix and not self._past:
            return None
        device = past.device
        own = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        seen = torch.arange(self._past, device=device) < past[:, None]
        parts = [
            torch.ones(len(past), width, prefix, dtype=torch.bool, device=device),
            seen[:, None].expand(-1, width, -1),
            own.expand(len(past), -1, -1),
        ]
        return torch.cat(parts, -1)[:, None]


class Shared:
    """A piece of text that several rows see: which row sees which slot of a store."""

    def __init__(self, store: KeyValueStore, slot_of: Sequence[int], lengths: Sequence[int]) -> None:
        """`slot_of` names each row's slot, `lengths` the tokens in each of the slots 0 … ."""
        device = store.keys[0].device
        self.store = store
        self.width = max(lengths)
        self.slots = len(lengths)
        self.of = torch.tensor(slot_of, device=device)
        """int64 [n], each row's slot."""
        self._ends = torch.tensor(lengths, device=device)
        self.seen = self._ends[self.of]
        """int64 [n], tokens that each row sees."""

    @cached_property
    def order(self) -> Tensor:
        """int64 [n], the rows such that those which see the same slot are neighbours."""
        return self.of.argsort(stable=True)

    @cached_property
    def beyond(self) -> Tensor | None:
        """bool [n, width], places that hold nothing for the row; None where all do."""
        beyond = torch.arange(self.width, device=self.of.device) >= self._ends[:, None]
        return beyond[self.of] if bool(beyond.any()) else None

    @cached_property
    def side_by_side(self) -> int:
        """Most rows that see one slot."""
        return int(torch.bincount(self.of, minlength=self.slots).max())

    @cached_property
    def back(self) -> Tensor:
        """int64 [n], where each row's queries stand among `slots` × `side_by_side`."""
        of, counts = self.of, torch.bincount(self.of, minlength=self.slots)
        order = self.order
        place = torch.empty_like(of)
        place[order] = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts)[of[order]]
        return of * self.side_by_side + place

    @cached_property
    def members(self) -> Tensor:
        """int64 [slots · side_by_side], the way there: the row of each place, 0 where there is none."""
        members = torch.zeros(self.slots * self.side_by_side, dtype=torch.long, device=self.of.device)
        members[self.back] = torch.arange(len(self.of), device=self.of.device)
        return members

    @cached_property
    def plain(self) -> bool:
        """Whether the rows already lie slot by slot, as many for each."""
        n = len(self.of)
        return len(self.members) == n and bool((self.back == torch.arange(n, device=self.of.device)).all())

    def rows(self, store: Tensor) -> Tensor:
        """Its keys or values as they lie, [slots · kv_heads, width, dim]."""
        return store[: self.slots, :, : self.width].flatten(0, 1)

    def spread(self, rows: Tensor, kv_heads: int) -> Tensor:
        """[n, heads, d] to [slots · kv_heads, side_by_side · group, d]."""
        if not self.plain:
            rows = rows.index_select(0, self.members)
        heads, dim = rows.shape[1:]
        split = rows.view(self.slots, self.side_by_side, kv_heads, heads // kv_heads, dim)
        return split.transpose(1, 2).reshape(self.slots * kv_heads, -1, dim)

    def gather(self, spread: Tensor, kv_heads: int) -> Tensor:
        """The way back, to [n, heads, d]."""
        split = spread.view(self.slots, kv_heads, self.side_by_side, -1, spread.shape[-1])
        rows = split.transpose(1, 2).reshape(self.slots * self.side_by_side, -1, spread.shape[-1])
        return rows if self.plain else rows.index_select(0, self.back)


def _rounded(tokens: int, dtype: torch.dtype) -> int:
    """Products of other types than float32 are compiled by oneDNN for each shape that comes: few shapes may come."""
    return tokens if dtype is torch.float32 else -(-tokens // GRAIN) * GRAIN


class DecodeLayout:
    """One new token for each of n rows of the answers, which see shared pieces before their own."""

    def __init__(self, answers: KeyValueStore, shared: Sequence[Shared], slots: Tensor, places: Tensor) -> None:
        """int64 [n] each: where each row lies, and where its token goes there. Unless the store is `scattered`, row i
        lies in slot i."""
        self._answers = answers
        self._shared = shared
        self._rows = slots
        self._places = places
        self._seen = places + 1
        self._used = min(_rounded(int(self._seen.max()), answers.keys[0].dtype), answers.length)
        self._widths = [*(piece.width for piece in shared), self._used]
        self.longest = sum(self._widths)
        self._kernels = answers.kernels()

    @cached_property
    def _beyond(self) -> Tensor | None:
        """bool [n, 1, keys], places that hold nothing for a row; None where all do."""
        at = self._places
        even = int(self._seen.min()) == self._used
        if even and all(piece.beyond is None for piece in self._shared):
            return None
        parts = [
            at.new_zeros(len(at), piece.width, dtype=torch.bool) if piece.beyond is None else piece.beyond
            for piece in self._shared
        ]
        return torch.cat([*parts, torch.arange(self._used, device=at.device) > at[:, None]], -1)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`."""
        if self._kernels is None:
            return self._attend(layer, query, key, value, scale)
        words = [piece.store.words(layer, piece.of, piece.seen) for piece in self._shared]
        words.append(self._answers.words(layer, self._rows, self._seen))
        flat = [word for piece in words for word in piece]
        return self._kernels.attend(query, key, value, scale, flat, self._shared[0].order)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """By products over all rows that see a piece."""
        n, heads, dim = query.shape
        kv_heads = key.shape[1]
        keys, values = self._answers.keys[layer], self._answers.values[layer]
        rows, places = self._rows, self._places
        keys[rows, :, places], values[rows, :, places] = key, value
        query = query * scale
        own = query.reshape(n * kv_heads, heads // kv_heads, dim)
        scores = [
            piece.gather(piece.spread(query, kv_heads) @ piece.rows(piece.store.keys[layer]).transpose(1, 2), kv_heads)
            for piece in self._shared
        ]
        scores.append((own @ keys[:n, :, : self._used].flatten(0, 1).transpose(1, 2)).view(n, heads, -1))
        seen = torch.cat(scores, -1).float()
        if self._beyond is not None:
            seen.masked_fill_(self._beyond, -torch.inf)
        *shares, last = torch.split(seen.softmax(-1).to(query.dtype), self._widths, -1)
        out = last.reshape(n * kv_heads, heads // kv_heads, -1) @ values[:n, :, : self._used].flatten(0, 1)
        total: Tensor = out.view(n, heads, dim)
        for piece, share in zip(self._shared, shares, strict=True):
            total = total + piece.gather(
                piece.spread(share, kv_heads) @ piece.rows(piece.store.values[layer]), kv_heads
            )
        return total


class SideBySide:
    """Tokens of several layouts end to end: linear layers see them all at once, each attends as its layout says."""

    def __init__(self, layouts: Sequence[Layout], sizes: Sequence[int]) -> None:
        """`sizes` are the tokens of each."""
        self._layouts = layouts
        self._sizes = list(sizes)
        self.longest = max(layout.longest for layout in layouts)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`."""
        parts = zip(*(torch.split(x, self._sizes) for x in (query, key, value)), strict=True)
        both = zip(self._layouts, parts, strict=True)
        return torch.cat([layout.attend(layer, q, k, v, scale) for layout, (q, k, v) in both])
