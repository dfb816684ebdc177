"""Bytes and names of single tokens in log-probs, such that no two tokens of a position share a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte in vocabularies of SentencePiece with byte fallback."""
ANCHOR = "a"
"""Text before a token when the token is decoded, because the first token of a text may lose its space."""
ID_PREFIX, BYTES_PREFIX = "token_id:", "bytes:"


class TokenBytes:
    """The bytes that each token of a tokenizer adds to a text. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added.content) for token, added in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes | None] = {}

    def __call__(self, token: int) -> bytes | None:
        """Return the bytes of a token, also those of a part of a character; None if the tokenizer has no such token or
        does not reveal its bytes."""
        if token not in self._known:
            self._known[token] = self._token_bytes(token)
        return self._known[token]

    def _token_bytes(self, token: int) -> bytes | None:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token) if token < len(self._tokenizer) else None
        if not isinstance(piece, str):
            return None
        if "ByteLevel" in self._decoder:
            letters = self._byte_letters
            return bytes(letters[letter] for letter in piece) if letters.keys() >= set(piece) else piece.encode()
        if "ByteFallback" in self._decoder and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        text = str(self._tokenizer.decode([*self._anchor, token])).removeprefix(self._anchor_text)
        return None if "\ufffd" in text and "\ufffd" not in piece else text.encode()

    @cached_property
    def _decoder(self) -> str:
        """Description of the tokenizer's decoder; empty for tokenizers in Python."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        return "" if decoder is None else decoder.__getstate__().decode()

    @cached_property
    def _byte_letters(self) -> Mapping[str, int]:
        """Bytes by their letters in byte-level vocabularies."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    @cached_property
    def _anchor(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(ANCHOR, add_special_tokens=False))

    @cached_property
    def _anchor_text(self) -> str:
        return str(self._tokenizer.decode(list(self._anchor)))


def escape_bytes(data: bytes) -> str:
    """Return bytes as `\\xe2\\x80`, OpenAI's notation for parts of a character."""
    return "".join(f"\\x{byte:02x}" for byte in data)


def token_names(
    tokens: Iterable[int], token_bytes: Callable[[int], bytes | None], *, bytes_prefix: str = ""
) -> dict[int, str]:
    """Return a name for each of the tokens of a position, all different.

    It is the token's text; of a part of a character its bytes behind `bytes_prefix`; and `token_id:7` if the token has
    no text, or an earlier one has the same.
    """
    names: dict[int, str] = {}
    for token in tokens:
        name = _text_name(token_bytes(token), bytes_prefix)
        if token not in names:
            is_free = name and not name.startswith(ID_PREFIX) and name not in names.values()
            names[token] = name if is_free else f"{ID_PREFIX}{token}"
    return names


def _text_name(data: bytes | None, bytes_prefix: str) -> str:
    try:
        return (data or b"").decode()
    except UnicodeDecodeError:
        return bytes_prefix + escape_bytes(data or b"")
