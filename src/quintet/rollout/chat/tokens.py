"""Tokenization between the control tokens of a chat template, such that no message can become a control token.

A tokenizer splits text at its special tokens and encodes each stretch separately. This module does the same: template
literals and messages between two control tokens are encoded together, with all merges across their borders, and result
in the tokens that the tokenizer returns for the whole text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quintet.rollout.chat.image_prompts import ImagePrompts, is_marker, split_at_markers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHE_SIZE = 65536


class TextEncoder:
    """Encodes text as it would be encoded in the middle of a sequence."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, control: Collection[str], images: ImagePrompts | None = None
    ) -> None:
        """`control` are the tokens that no text may become, at least one; `images` allows markers of images in
        messages."""
        self._tokenizer = tokenizer
        self.images = images
        control_tokens = sorted(control, key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(re.escape(token) for token in control_tokens))
        self._control_ids = frozenset(tokenizer.convert_tokens_to_ids(control_tokens))
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        self._strips_before = {token for token in control_tokens if token in added and added[token].lstrip}
        self._strips_after = {token for token in control_tokens if token in added and added[token].rstrip}
        not_stripping = [t for t in control_tokens if t not in self._strips_before | self._strips_after]
        self._anchor = (not_stripping or control_tokens)[0]
        inside = self.encode_with_control(f"{self._anchor}a")[1:]
        self._depends_on_position = inside != self.encode_with_control("a")
        self._encode_text = _text_encoder(tokenizer)
        self.encode = lru_cache(maxsize=CACHE_SIZE)(self._encode)

    def encode_with_control(self, text: str) -> tuple[int, ...]:
        """Encode text in which control tokens are meant as such."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens from the middle of a sequence; at the start, some tokenizers drop a space."""
        anchored = (*self.encode_with_control(self._anchor), *tokens)
        text = str(self._tokenizer.decode(anchored, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return text.removeprefix(self._anchor)

    def contains_control_token(self, text: str) -> bool:
        """Return whether the text spells a control token."""
        return self._pattern.search(text) is not None

    def _encode(self, text: str, first: bool = False) -> tuple[int, ...]:
        """Encode text without producing control tokens; `first` says that the text starts the sequence.

        If the tokenizer cannot avoid a control token, the text is split inside it and encoded in pieces.
        """
        tokens = self._encode_once(text, first=first)
        if self._control_ids.isdisjoint(tokens) or len(text) < 2:
            return tokens
        match = self._pattern.search(text)
        at = match.start() + 1 if match else len(text) // 2
        return self._encode(text[:at], first) + self._encode(text[at:])

    def _encode_once(self, text: str, *, first: bool) -> tuple[int, ...]:
        if not text:
            return ()
        if not self._depends_on_position:
            return tuple(self._encode_text(text))
        return self.encode_with_control(text) if first else self.encode_with_control(self._anchor + text)[1:]

    def encode_literal(self, literal: str) -> EncodedLiteral:
        """Encode a template literal from its first to its last control token."""
        matches = list(self._pattern.finditer(literal))
        if not matches:
            return EncodedLiteral(before=literal)
        begin, end = matches[0].start(), matches[-1].end()
        return EncodedLiteral(
            before=literal[:begin],
            tokens=self.encode_with_control(literal[begin:end]),
            after=literal[end:],
            strips_before=matches[0].group() in self._strips_before,
            strips_after=matches[-1].group() in self._strips_after,
        )


@dataclass(frozen=True, slots=True)
class EncodedLiteral:
    """Template literal: text before its first control token, fixed tokens, and text after its last control token.
    Without control tokens (`tokens` empty) its text is encoded together with the messages around it."""

    before: str
    tokens: tuple[int, ...] = ()
    after: str = ""
    strips_before: bool = False
    """Whether the first control token swallows the whitespace before it (`lstrip` of the added token)."""
    strips_after: bool = False
    """Whether the last control token swallows the whitespace after it (`rstrip`)."""


class MessageFrame:
    """Template literals around messages: `literal message literal message … literal`."""

    def __init__(self, encoder: TextEncoder, literals: Sequence[str], *, first: bool = False) -> None:
        """`first` says that the frame starts the sequence."""
        self._encoder = encoder
        self._literals = [encoder.encode_literal(literal) for literal in literals]
        self._first = first

    def encode(self, *messages: str) -> tuple[int, ...]:
        """Encode the literals with messages between them."""
        tokens: list[int] = []
        pending, strip_start = "", False
        for literal, message in zip(self._literals, (*messages, ""), strict=True):
            pending += literal.before
            if literal.tokens:
                first = self._first and not tokens
                tokens += self._encode_text(pending, strip_start, literal.strips_before, first=first)
                tokens += literal.tokens
                pending, strip_start = literal.after, literal.strips_after
            for part in split_at_markers(message) if self._encoder.images else (message,):
                if self._encoder.images and is_marker(part):
                    first = self._first and not tokens
                    tokens += self._encode_text(pending, strip_start, False, first=first)
                    tokens += self._encoder.images.tokens(part)
                    pending, strip_start = "", False
                else:
                    pending += part
        tokens += self._encode_text(pending, strip_start, False, first=self._first and not tokens)
        return tuple(tokens)

    def _encode_text(self, text: str, strip_start: bool, strip_end: bool, *, first: bool) -> tuple[int, ...]:
        text = text.lstrip() if strip_start else text
        return self._encoder.encode(text.rstrip() if strip_end else text, first)


def _text_encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """A function that encodes text in which special tokens are plain characters."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _slow_text_encoder(tokenizer)
    # a copy, because the setting applies to the whole tokenizer, which others use
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def _slow_text_encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Return the text encoder of a Python tokenizer. Tokenizers without the argument do not read special tokens in
    text, or their text is split by `TextEncoder`."""
    try:
        tokenizer.encode("a", add_special_tokens=False, split_special_tokens=True)
    except (NotImplementedError, TypeError, ValueError):
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    return lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
