"""Reading prompts: what of them is known, and which of their tokens are computed next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quintet.rollout.cache import CacheShape, ExtendLayout
from quintet.rollout.computed import SHORTEST_PREFIX, ComputedPrompts, Piece, Prefix, common_prefix
from quintet.rollout.passes import Passes, Work

__all__ = ["PromptReader"]


class PromptReader:
    """Prompts of an engine. Each is computed once, and what several have in common only once."""

    def __init__(self, shape: CacheShape, passes: Passes, keep: int, tokens: int, *, whole: bool) -> None:
        """So many prompts are kept for later. They are read in passes of so many tokens, a longer one in pieces unless
        it must be read `whole`."""
        self.prompts = ComputedPrompts(shape, keep)
        self._device = shape.device
        self._passes = passes
        self._most = tokens
        self._whole = whole
        self._chosen: list[tuple[Piece, int]] = []

    def pieces_for(self, asked: Sequence[tuple[int, tuple[int, ...]]]) -> list[Piece]:
        """Pieces for requests, by their numbers and prompts: known ones, dialogues that go on, or new ones behind the
        longest prefix that there is. They are in use from now on."""
        prompts = self.prompts
        found = [prompts.find(tokens) or prompts.go_on(number, tokens) for number, tokens in asked]
        fresh = list(dict.fromkeys(tokens for piece, (_, tokens) in zip(found, asked, strict=True) if piece is None))
        begun = {tokens: prompts.start(tokens, self._prefix_of(tokens, fresh)) for tokens in fresh}
        pieces = [piece or begun[tokens] for piece, (_, tokens) in zip(found, asked, strict=True)]
        prompts.use(pieces)
        return pieces

    def next(self, wanted: Iterable[Piece]) -> Work | None:
        """The next tokens of these pieces, of those behind one prefix; None where all is known."""
        self._chosen = chosen = self._choose(dict.fromkeys(piece for piece in wanted if piece.hidden is None))
        if not chosen:
            return None
        prompts, prefix = self.prompts, chosen[0][0].prefix
        lengths = [count for _, count in chosen]
        slots, past = [piece.slot for piece, _ in chosen], [piece.own for piece, _ in chosen]
        before = (prompts.prefix_store, prefix.slot, len(prefix.tokens)) if prefix.tokens else None
        return Work(
            self._tensor([x for piece, count in chosen for x in piece.tokens[piece.known : piece.known + count]]),
            self._tensor([place for piece, count in chosen for place in range(piece.known, piece.known + count)]),
            ExtendLayout(prompts.store, slots, past, lengths, before),
        )

    def have_read(self, states: Tensor) -> None:
        """Note what is known now; `states` [tokens, hidden] of the tokens given last."""
        last = states[self._tensor([count for _, count in self._chosen]).cumsum(0) - 1]
        for (piece, count), state in zip(self._chosen, last, strict=True):
            piece.known += count
            if piece.known == len(piece.tokens):
                piece.hidden = state

    def _choose(self, pieces: Iterable[Piece]) -> list[tuple[Piece, int]]:
        """Pieces behind one prefix and how many of their tokens come next, so many in all at most."""
        chosen: list[tuple[Piece, int]] = []
        room = self._most
        for piece in pieces:
            left = len(piece.tokens) - piece.known
            if room <= 0 or (chosen and piece.prefix is not chosen[0][0].prefix):
                continue
            if self._whole and left > room and chosen:
                break
            count = left if self._whole else min(left, room)
            chosen.append((piece, count))
            room -= count
        return chosen

    def _prefix_of(self, tokens: tuple[int, ...], fresh: Sequence[tuple[int, ...]]) -> Prefix:
        """The longest known prefix of a prompt; a new one where that pays."""
        prompts = self.prompts
        known = [p for p in prompts.prefixes if len(p.tokens) < len(tokens) and tokens[: len(p.tokens)] == p.tokens]
        best = max(known, key=lambda prefix: len(prefix.tokens))
        if best.tokens or len(fresh) < 2:
            return best
        common = min(common_prefix(fresh), min(map(len, fresh)) - 1)
        if common < SHORTEST_PREFIX or (new := prompts.add_prefix(tokens[:common])) is None:
            return best
        layout = ExtendLayout(prompts.prefix_store, [new.slot], [0], [common])
        self._passes([Work(self._tensor(new.tokens), torch.arange(common, device=self._device), layout)])
        return new

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._device)
