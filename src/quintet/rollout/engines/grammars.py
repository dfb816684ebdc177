"""Grammars of structured outputs: which tokens may follow in a response. Needs llguidance, imported on first use."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from quintet.rollout.engines.compiled_grammars import compile_grammar, grammar_error
from quintet.rollout.engines.grammar_trials import GrammarTrials
from quintet.sampling import StructuredOutput

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_SPEC_LENGTH = 1 << 16
"""Maximum characters of a schema, regular expression or list of choices; compiling it takes up to about two seconds."""
MAX_REPETITIONS = 1 << 16
"""Maximum value of the keywords `COUNTS` of a schema."""
COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
MAX_BYTES = 512 << 20
"""Maximum memory of the grammars that are cached or used by unfinished requests."""
MIN_GRAMMAR_BYTES, BYTES_PER_CHARACTER = 1 << 14, 8
"""Least memory that is counted for a grammar, and for each character of its text."""
PRINTABLE_ASCII = range(0x20, 0x7F)
WHITE_SPACE = " \t\n\r"
"""White space of JSON."""
MAX_WHITE_SPACE = 32
"""Characters of white space between two parts of JSON after which no token may begin with more: enough for a line break
and an indentation. A small model could otherwise write line breaks until `max_tokens`."""


class GrammarMemoryError(Exception):
    """The grammars of unfinished requests take too much memory for another one."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Grammar:
    """A compiled structured output."""

    matcher: LLMatcher
    num_bytes: int


class GrammarCompiler:
    """Compiles structured outputs for a tokenizer. Thread-safe; each is compiled once while it is cached."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer` is one of transformers; `vocab_size` is that of the model, which may be larger."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cache: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        """The latest used last."""
        self._in_use: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()
        """Grammars in the cache or held by requests."""
        self._lock = threading.Lock()

    def is_cached(self, output: StructuredOutput) -> bool:
        """Return whether `check` takes no time."""
        return output in self._in_use

    def check(self, output: StructuredOutput) -> Grammar:
        """Compile a structured output of a client, first in a process with limits. While the grammar is held, `matcher`
        does not compile it again.

        Raises:
            ValueError: it is invalid, too large, or cannot be expressed with the tokenizer's vocabulary.
            GrammarMemoryError: the grammars of other requests leave no memory for it.
        """
        grammar = self._known(output)
        if grammar is None:
            self._check_size(output)
            num_bytes = self._trials.num_bytes(output.kind, output.spec)
            num_bytes = max(num_bytes, MIN_GRAMMAR_BYTES, BYTES_PER_CHARACTER * len(output.spec))
            self._make_room(num_bytes)
            grammar = self._compile(output, num_bytes)
        return grammar

    def matcher(self, output: StructuredOutput, stop_token_ids: Sequence[int]) -> TokenMatcher:
        """Return a matcher at the start of a response. A grammar that is not known, of a run, is compiled without a
        trial.

        Raises:
            ValueError: see `check`.
        """
        grammar = self._known(output)
        if grammar is None:
            self._check_size(output)
            grammar = self._compile(output, MIN_GRAMMAR_BYTES)
        white_space = None if output.kind in ("regex", "choice") else self._white_space
        return TokenMatcher(grammar, self._ll_tokenizer, stop_token_ids, white_space)

    def _known(self, output: StructuredOutput) -> Grammar | None:
        with self._lock:
            if output in self._cache:
                self._cache.move_to_end(output)
            return self._in_use.get(output)

    def _make_room(self, num_bytes: int) -> None:
        """Drop the grammars of the cache that were not used for longest, until there is memory for another one."""
        with self._lock:
            while sum(grammar.num_bytes for grammar in self._in_use.values()) + num_bytes > MAX_BYTES:
                if not self._cache:
                    raise GrammarMemoryError(f"the grammars of unfinished requests take {MAX_BYTES >> 20} MiB")
                self._cache.popitem(last=False)

    @functools.cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(**self._tokenizer_arguments)
        except ValueError as error:
            raise ValueError(f"the tokenizer does not support structured outputs: {error}") from error

    @functools.cached_property
    def _tokenizer_arguments(self) -> Mapping[str, Any]:
        """Arguments of `LLTokenizer`, as `llguidance.hf.from_tokenizer` passes them."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("the tokenizer does not support structured outputs: it is no fast tokenizer")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        n_vocab = max(self._vocab_size, len(self._tokenizer))
        return {"tokenizer": backend.to_str(), "n_vocab": n_vocab, "eos_token": self._tokenizer.eos_token_id}

    @functools.cached_property
    def _trials(self) -> GrammarTrials:
        return GrammarTrials(self._tokenizer_arguments)

    def _check_size(self, output: StructuredOutput) -> None:
        if len(output.spec) > MAX_SPEC_LENGTH:
            raise ValueError(f"{output.kind}: {len(output.spec)} characters, the maximum is {MAX_SPEC_LENGTH}")
        if output.kind == "json_schema":
            _check_counts(output.spec)
        if output.kind in ("json_schema", "json_object") and self._missing_characters:
            missing = f"it has no tokens for {self._missing_characters!r}"
            raise ValueError(f"the tokenizer's vocabulary cannot express JSON: {missing}")

    def _compile(self, output: StructuredOutput, num_bytes: int) -> Grammar:
        grammar = Grammar(compile_grammar(self._ll_tokenizer, output.kind, output.spec), num_bytes)
        with self._lock:
            self._cache[output] = self._in_use[output] = grammar
        return grammar

    def _texts(self) -> Sequence[bytes]:
        """Return the text of each token."""
        tokenizer = self._ll_tokenizer
        return [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]

    @functools.cached_property
    def _white_space(self) -> WhiteSpaceTokens:
        return WhiteSpaceTokens(self._texts())

    @functools.cached_property
    def _missing_characters(self) -> str:
        """Printable ASCII characters that are no token."""
        characters = {text[0] for text in self._texts() if len(text) == 1}
        return "".join(chr(code) for code in PRINTABLE_ASCII if code not in characters)


def _check_counts(spec: str) -> None:
    """
    Raises:
        ValueError: a schema asks for more repetitions than `MAX_REPETITIONS`, or is no JSON.
    """
    try:
        schemas = [json.loads(spec)]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: {error}") from None
    while schemas:
        schema = schemas.pop()
        items = schema.items() if isinstance(schema, dict) else enumerate(schema)
        for key, value in items:
            if key in COUNTS and isinstance(value, int | float) and value > MAX_REPETITIONS:
                raise ValueError(f"json_schema: {key} = {value} is more than {MAX_REPETITIONS}")
            if isinstance(value, dict | list) and key not in VALUES:
                schemas.append(value)


class WhiteSpaceTokens:
    """White space at the beginnings and ends of the tokens of a vocabulary."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts` are those of all tokens."""
        characters = WHITE_SPACE.encode()
        self.is_leading = np.array([text != b"" and text[0] in characters for text in texts])
        """bool [vocab], whether the token begins with white space."""
        self._lengths = np.array([len(text) for text in texts])
        self._trailing = np.array([len(text) - len(text.rstrip(characters)) for text in texts])
        self.line_break = next((token for token, text in enumerate(texts) if text == b"\n"), None)

    def length_after(self, length: int, token: int) -> int:
        """Return the characters of white space at the end of a text that ended with `length` of them before a token."""
        trailing = int(self._trailing[token])
        return length + trailing if trailing == self._lengths[token] else trailing


class TokenMatcher:
    """State of the grammar of one response, after the tokens so far."""

    def __init__(
        self,
        grammar: Grammar,
        tokenizer: LLTokenizer,
        stop_token_ids: Sequence[int],
        white_space: WhiteSpaceTokens | None,
    ) -> None:
        """`white_space` limits the white space between the parts of JSON."""
        self._grammar = grammar
        """Held as long as its memory is used."""
        self._white_space = white_space
        self._white_space_length = 0
        """Characters of white space at the end of the response."""
        self.matcher = grammar.matcher.deep_copy()
        self.vocab_size = tokenizer.vocab_size
        """That of `matcher`, at least that of the model."""
        self._eos_tokens = tokenizer.eos_tokens
        self._stop_token_ids = list(stop_token_ids)
        self.error = ""
        """Why no token may follow, if so."""

    def accept_token(self, token: int) -> None:
        """Advance by a sampled token. A stop token ends the response."""
        if token not in self._stop_token_ids:
            self.matcher.consume_token(token)
            if self._white_space is not None:
                self._white_space_length = self._white_space.length_after(self._white_space_length, token)

    def limit_white_space(self, allowed: npt.NDArray[np.bool_]) -> None:
        """Exclude tokens that begin with white space from a mask, [vocab], after `MAX_WHITE_SPACE` characters of it. In
        a string, which has no line breaks, white space is not limited."""
        tokens = self._white_space
        if tokens is None or tokens.line_break is None or self._white_space_length < MAX_WHITE_SPACE:
            return
        if allowed[tokens.line_break]:
            allowed &= ~tokens.is_leading[: len(allowed)]

    def set_stop_tokens(self, allowed: npt.NDArray[np.bool_]) -> None:
        """Allow the stop tokens in a mask, [vocab], exactly if the text is complete, and everything after an error."""
        allowed[[token for token in self._eos_tokens if token < len(allowed)]] = False
        allowed[[token for token in self._stop_token_ids if token < len(allowed)]] = self.matcher.is_accepting()
        if self.matcher.is_error() or not allowed.any():
            self.error = grammar_error(self.matcher)
            allowed[:] = True


def allowed_tokens(matchers: Sequence[TokenMatcher], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return which tokens may follow in each response, bool [n, vocab]."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    bitmask = allocate_token_bitmask(len(matchers), matchers[0].vocab_size)
    fill_next_token_bitmask_par(
        _executor(), [(constrained.matcher, row) for row, constrained in enumerate(matchers)], bitmask
    )
    allowed = np.unpackbits(bitmask.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    for constrained, row in zip(matchers, allowed, strict=True):
        constrained.limit_white_space(row)
        constrained.set_stop_tokens(row)
    return allowed


@functools.cache
def _executor() -> LLExecutor:
    """Threads that compute masks."""
    from llguidance import LLExecutor

    return LLExecutor()
