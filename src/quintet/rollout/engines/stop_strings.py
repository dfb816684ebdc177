"""Stop strings in the text of tokens that are generated one after another. The work for a token does not depend on the
length of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"
"""Decoded form of a character with missing bytes."""
Decode = Callable[[Sequence[int]], str]


class GrowingText:
    """Text of a response that grows. Only the last tokens are decoded, together with those before them: tokenizers may
    decode the first token of a text differently."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._start = 0
        self.text = ""
        """Text of the first `num_tokens` tokens, which end with a whole character."""
        self.num_tokens = 0

    def update(self, tokens: Sequence[int]) -> str:
        """Take the tokens so far; return the text behind `text`, which ends with an incomplete character."""
        if len(tokens) == self.num_tokens:
            return ""
        decoded = self._decode(tokens[self._start : self.num_tokens])
        text = self._decode(tokens[self._start :])
        new = text[len(decoded) :]
        if not new or text.endswith(REPLACEMENT_CHARACTER):
            return new
        self.text += new
        self._start, self.num_tokens = self.num_tokens, len(tokens)
        return ""


class StopStringMatcher:
    """Checks whether the newest token completes a stop string, independent of token borders."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._growing = GrowingText(decode)
        self._num_tokens = self._num_characters = 0
        """Tokens and complete characters that have been searched."""

    def matches(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of the response `tokens` completes a stop string."""
        if not self._stops:
            return False
        if len(tokens) > self._num_tokens + 1:
            self._update(tokens[:-1])
        before = self._num_characters
        text = self._update(tokens)
        return any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self._stops)

    def _update(self, tokens: Sequence[int]) -> str:
        rest = self._growing.update(tokens)
        text = self._growing.text + rest if rest else self._growing.text
        self._num_tokens = len(tokens)
        # an incomplete character at the end is replaced once its other bytes follow
        self._num_characters = len(self._growing.text) + len(rest.rstrip(REPLACEMENT_CHARACTER))
        return text


class StopPrefix:
    """The longest beginning of a stop string that a growing text ends with, by Knuth, Morris and Pratt."""

    def __init__(self, stop: str, borders: Sequence[int]) -> None:
        """`borders` are those of the stop string."""
        self._stop, self._borders = stop, borders
        self.length = 0
        """Number of characters of the beginning, fewer than those of the stop string."""

    def update(self, text: str) -> None:
        """Take the next part of the text."""
        stop, borders, length = self._stop, self._borders, self.length
        for character in text:
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            if length == len(stop):
                length = borders[-1]
        self.length = length


def borders(stop: str) -> list[int]:
    """Return for each beginning of a text the length of its longest proper beginning that is also its end.

    >>> borders("abab")
    [0, 0, 1, 2]
    """
    lengths = [0]
    for character in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != character:
            length = lengths[length - 1]
        lengths.append(length + (stop[length] == character))
    return lengths
