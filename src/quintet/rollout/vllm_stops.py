"""Texts that end an answer, found in tokens as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStops"]

TOKENS_A_CHARACTER = 4
"""Tokens that one character takes at most, where each is a byte of it."""


class TextStops:
    """Whether the newest token of an answer ends one of some texts, wherever the borders of tokens lie."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts = texts
        self._decode = decode
        self._window = TOKENS_A_CHARACTER * max(map(len, texts), default=0) + TOKENS_A_CHARACTER

    def ended_by(self, tokens: Sequence[int]) -> bool:
        """`tokens`: the answer so far. Only its last few are decoded."""
        if not self._texts:
            return False
        tail = tokens[-self._window :]
        text = self._decode(tail)
        # half a character, which its other bytes will replace
        before = self._decode(tail[:-1]).rstrip("\ufffd")
        return any(text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in self._texts)
