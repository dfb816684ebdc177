"""Text to tokens between the control tokens of a chat template, so that no text can become one.

A tokenizer takes text apart at its special tokens and encodes each stretch between them by itself. So does this: what
the template writes and what a world says between two control tokens is encoded in one piece, with every merge across
their border, and gives the tokens that the tokenizer would have given within the whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Frame", "TextEncoder"]

KEPT = 65536
"""Stretches of text whose tokens are remembered."""


class TextEncoder:
    """Encodes stretches of text as they stand in the midst of a sequence."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, control: Collection[str]) -> None:
        """`control` are the tokens that no text may become, at least one of them."""
        self._tokenizer = tokenizer
        words = sorted(control, key=lambda word: (-len(word), word))
        self._pattern = re.compile("|".join(re.escape(word) for word in words))
        self._control = frozenset(tokenizer.convert_tokens_to_ids(words))
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        self._swallows_before = {word for word in words if word in added and added[word].lstrip}
        self._swallows_after = {word for word in words if word in added and added[word].rstrip}
        quiet = [word for word in words if word not in self._swallows_before | self._swallows_after]
        self._anchor = (quiet or words)[0]
        inside = self.marked(f"{self._anchor}a")[1:]
        self._depends_on_place = inside != self.marked("a")
        self._split = _splitting(tokenizer)
        self.plain = lru_cache(maxsize=KEPT)(self._plain)

    def marked(self, text: str) -> tuple[int, ...]:
        """Tokens of text in which control tokens are meant."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens in the midst of a sequence say; at the beginning, some tokenizers leave out a blank."""
        behind = (*self.marked(self._anchor), *tokens)
        text = str(self._tokenizer.decode(behind, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return text.removeprefix(self._anchor)

    def holds_control(self, text: str) -> bool:
        """Whether the text spells a control token."""
        return self._pattern.search(text) is not None

    def _plain(self, text: str, first: bool = False) -> tuple[int, ...]:
        """Tokens of text in which no control token is meant, none of which is one; `first` says that nothing stands
        before it.

        Where a tokenizer can't but read a control token, the words are encoded in pieces that don't spell it.
        """
        tokens = self._natural(text, first=first)
        if self._control.isdisjoint(tokens) or len(text) < 2:
            return tokens
        found = self._pattern.search(text)
        at = found.start() + 1 if found else len(text) // 2
        return self._plain(text[:at], first) + self._plain(text[at:])

    def _natural(self, text: str, *, first: bool) -> tuple[int, ...]:
        if not text:
            return ()
        if not self._depends_on_place:
            return tuple(self._split(text))
        return self.marked(text) if first else self.marked(self._anchor + text)[1:]

    def joint(self, literal: str) -> Joint:
        """What a template writes between two messages' words, encoded as far as control tokens stand around it."""
        found = list(self._pattern.finditer(literal))
        if not found:
            return Joint(before=literal)
        begin, end = found[0].start(), found[-1].end()
        return Joint(
            before=literal[:begin],
            fixed=self.marked(literal[begin:end]),
            after=literal[end:],
            swallows_before=found[0].group() in self._swallows_before,
            swallows_after=found[-1].group() in self._swallows_after,
        )


@dataclass(frozen=True, slots=True)
class Joint:
    """Text that ends a stretch, tokens that never change, text that begins the next stretch. Without such tokens
    (`fixed` empty) it is all one stretch with what stands around it."""

    before: str
    fixed: tuple[int, ...] = ()
    after: str = ""
    swallows_before: bool = False
    """The first of the tokens takes the blanks before it, as some tokenizers have it."""
    swallows_after: bool = False
    """The last takes those behind it."""


class Frame:
    """What a template writes around messages: `literal words literal words … literal`."""

    def __init__(self, encoder: TextEncoder, literals: Sequence[str], *, first: bool = False) -> None:
        """`first` says that nothing stands before it."""
        self._encoder = encoder
        self._joints = [encoder.joint(literal) for literal in literals]
        self._first = first

    def encode(self, *words: str) -> tuple[int, ...]:
        """Tokens of the whole, the words of each message between two literals."""
        tokens: list[int] = []
        stretch, swallowed = "", False
        for joint, said in zip(self._joints, (*words, ""), strict=True):
            stretch += joint.before
            if joint.fixed:
                tokens += self._stretch(stretch, swallowed, joint.swallows_before, first=self._first and not tokens)
                tokens += joint.fixed
                stretch, swallowed = joint.after, joint.swallows_after
            stretch += said
        tokens += self._stretch(stretch, swallowed, False, first=self._first and not tokens)
        return tuple(tokens)

    def _stretch(self, text: str, begin: bool, end: bool, *, first: bool) -> tuple[int, ...]:
        """Tokens of a stretch whose blanks at the `begin` or the `end` belong to the token there."""
        text = text.lstrip() if begin else text
        return self._encoder.plain(text.rstrip() if end else text, first)


def _splitting(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Encodes text in which special tokens are no more than their letters."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _splitting_slowly(tokenizer)
    # one of our own: the switch belongs to the whole tokenizer, which others use
    own = copy.deepcopy(backend)
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True
    return lambda text: own.encode(text, add_special_tokens=False).ids


def _splitting_slowly(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """The same by a tokenizer in Python. Those that don't know the switch read no special tokens in text, or their
    words are taken apart one by one."""
    try:
        tokenizer.encode("a", add_special_tokens=False, split_special_tokens=True)
    except (NotImplementedError, TypeError, ValueError):
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    return lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
