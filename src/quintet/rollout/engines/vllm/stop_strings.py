"""Stop strings, matched on token ids as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_TOKENS_PER_CHARACTER = 4
"""A character has at most four bytes, each of which may be a token."""


class StopStringMatcher:
    """Checks whether the newest token completes a stop string, independent of token borders."""

    def __init__(self, texts: Sequence[str], detokenize: Callable[[Sequence[int]], str]) -> None:
        self._texts = texts
        self._detokenize = detokenize
        self._window = MAX_TOKENS_PER_CHARACTER * (max(map(len, texts), default=0) + 1)

    def matches(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of the response `tokens` completes a stop string. Only the last few are decoded."""
        if not self._texts:
            return False
        tail = tokens[-self._window :]
        text = self._detokenize(tail)
        # an incomplete character at the end is replaced once its other bytes follow
        before = self._detokenize(tail[:-1]).rstrip("\ufffd")
        return any(text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in self._texts)
