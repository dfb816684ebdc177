"""Prompts whose keys and values are known: those in use without gaps from slot 0 on, others laid aside for later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quintet.rollout.cache import CacheShape, KeyValueStore

__all__ = ["ComputedPrompts", "Piece", "Prefix", "common_prefix"]

SHORTEST_PREFIX = 8
"""Tokens that several prompts must have in common before these are computed once for all."""
MOST_PREFIXES = 4


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """Tokens that prompts begin with, in a slot of their own."""

    tokens: tuple[int, ...]
    slot: int


@dataclass(eq=False, slots=True)
class Piece:
    """A prompt, or a dialogue so far. Its slot holds the tokens behind its prefix."""

    tokens: tuple[int, ...]
    prefix: Prefix
    known: int
    """Tokens of it that are computed, the prefix's included."""
    slot: int = -1
    """Where it lies: among the active ones while it has users, else on the shelf; -1 is nowhere yet."""
    users: int = 0
    hidden: Tensor | None = None
    """State of the last token, [hidden]; None while not all is computed."""

    @property
    def own(self) -> int:
        """Tokens that its slot holds."""
        return self.known - len(self.prefix.tokens)


class ComputedPrompts:
    """What is known of prompts under the present weights."""

    def __init__(self, shape: CacheShape, keep: int) -> None:
        """So many prompts that nobody uses at the moment are kept; those not used for longest make room."""
        self._keep = keep
        self.active: list[Piece] = []
        """In use; each lies in the slot of its place here."""
        self.store = KeyValueStore(shape)
        self.prefixes: list[Prefix] = []
        self.prefix_store = KeyValueStore(shape)
        self.prefix_store.reserve(1, 1)
        self._aside: OrderedDict[Piece, None] = OrderedDict()
        self._shelf = KeyValueStore(shape)
        self._free: list[int] = []
        self._known: dict[tuple[int, ...], Piece] = {}
        self._dialogues: dict[int, Piece] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all of it; the memory stays."""
        self.active.clear()
        self.prefixes[:] = [Prefix((), 0)]
        self._aside.clear()
        self._known.clear()
        self._dialogues.clear()
        self._free = list(range(self._keep))[::-1]

    def find(self, tokens: tuple[int, ...]) -> Piece | None:
        """The prompt, where it is computed or about to be."""
        return self._known.get(tokens)

    def go_on(self, number: int, tokens: tuple[int, ...]) -> Piece | None:
        """What is kept of a dialogue, as far as this prompt goes on from it; from now on it is that prompt's."""
        piece = self._dialogues.pop(number, None)
        if piece is None or piece not in self._aside:
            return None
        known = min(common_prefix([piece.tokens, tokens]), len(tokens) - 1)
        if tokens in self._known or known <= len(piece.prefix.tokens):
            return None
        piece.tokens, piece.known, piece.hidden = tokens, known, None
        self._known[tokens] = piece
        return piece

    def start(self, tokens: tuple[int, ...], prefix: Prefix) -> Piece:
        """A prompt of which nothing but its prefix is known."""
        piece = self._known[tokens] = Piece(tokens, prefix, len(prefix.tokens))
        return piece

    def add_prefix(self, tokens: tuple[int, ...]) -> Prefix | None:
        """A new prefix, to be computed by the caller; None where there are enough of them."""
        if len(self.prefixes) > MOST_PREFIXES:
            return None
        prefix = Prefix(tokens, len(self.prefixes))
        self.prefixes.append(prefix)
        self.prefix_store.reserve(len(self.prefixes), len(tokens))
        return prefix

    def use(self, pieces: Sequence[Piece]) -> None:
        """One more user for each; those that nobody used come into slots behind the active ones."""
        arriving = [piece for piece in dict.fromkeys(pieces) if not piece.users]
        for piece in pieces:
            piece.users += 1
        longest = max((len(piece.tokens) - len(piece.prefix.tokens) for piece in arriving), default=0)
        self.store.reserve(len(self.active) + len(arriving), longest)
        shelved = [piece for piece in arriving if piece in self._aside]
        sources = [piece.slot for piece in shelved]
        for piece in arriving:
            piece.slot = len(self.active)
            self.active.append(piece)
        if shelved:
            self.store.take([p.slot for p in shelved], self._shelf, sources, max(p.own for p in shelved))
            for piece in shelved:
                del self._aside[piece]
            self._free += sources

    def release(self, pieces: Iterable[Piece], *, keep: bool = True) -> None:
        """One user less for each; what nobody uses then is laid aside, or forgotten without `keep`."""
        leaving: list[Piece] = []
        for piece in pieces:
            piece.users -= 1
            if not piece.users:
                leaving.append(piece)
        if not leaving:
            return
        gaps = [piece.slot for piece in leaving]
        kept = leaving[-self._keep :] if keep and self._keep else []
        for piece in leaving[: len(leaving) - len(kept)]:
            self._forget(piece)
        if kept:
            self._lay_aside(kept)
        self._close(gaps)

    def keep_dialogue(self, number: int, piece: Piece, answer: Sequence[int], answers: KeyValueStore, row: int) -> None:
        """Lay a dialogue aside: its prompt, and the tokens of the answer that lie in a row of `answers`."""
        if not self._keep:
            return
        whole = piece.tokens + tuple(answer)
        kept = Piece(whole, piece.prefix, len(whole), self._room())
        self._shelf.reserve(kept.slot + 1, kept.own)
        self._shelf.take([kept.slot], self.store, [piece.slot], piece.own)
        self._shelf.take([kept.slot], answers, [row], len(answer), at=piece.own)
        self._aside[kept] = None
        self._dialogues[number] = kept

    def _lay_aside(self, pieces: Sequence[Piece]) -> None:
        sources = [piece.slot for piece in pieces]
        for piece in pieces:
            piece.slot = self._room()
            self._aside[piece] = None
        used = max(piece.own for piece in pieces)
        self._shelf.reserve(max(piece.slot for piece in pieces) + 1, used)
        self._shelf.take([piece.slot for piece in pieces], self.store, sources, used)

    def _room(self) -> int:
        """A free slot of the shelf."""
        if not self._free:
            oldest, _ = self._aside.popitem(last=False)
            self._forget(oldest)
            return oldest.slot
        return self._free.pop()

    def _forget(self, piece: Piece) -> None:
        if self._known.get(piece.tokens) is piece:
            del self._known[piece.tokens]

    def _close(self, gaps: list[int]) -> None:
        """Move the last active pieces into slots that were left."""
        count = len(self.active) - len(gaps)
        left = set(gaps)
        movers = [piece for slot, piece in enumerate(self.active[count:], count) if slot not in left]
        targets = sorted(slot for slot in gaps if slot < count)
        if movers:
            self.store.take(targets, self.store, [piece.slot for piece in movers], max(piece.own for piece in movers))
        for piece, slot in zip(movers, targets, strict=True):
            piece.slot = slot
            self.active[slot] = piece
        del self.active[count:]


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest common prefix."""
    low, high = min(sequences), max(sequences)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
