"""Grammars of structured outputs: which tokens may follow in a response. Needs llguidance, imported on first use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quintet.records import StructuredOutput

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_SPEC_LENGTH = 1 << 16
"""Maximum characters of a schema, regular expression or list of choices; compiling it takes up to about two seconds."""
MAX_LEXER_FUEL = 100_000
"""llguidance's limit on the size of regular expressions and patterns: ten times more takes several seconds."""
MAX_CACHED_GRAMMARS = 256
ANY_OBJECT = '{"type": "object"}'
PRINTABLE_ASCII = range(0x20, 0x7F)


class GrammarCompiler:
    """Compiles structured outputs for a tokenizer. Thread-safe; each is compiled once while it is cached."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer` is one of transformers; `vocab_size` is that of the model, which may be larger."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compile_cached = functools.lru_cache(MAX_CACHED_GRAMMARS)(self._compile)

    def check(self, output: StructuredOutput) -> None:
        """Compile a structured output, so that a later `matcher` finds it in the cache.

        Raises:
            ValueError: it is invalid, too large, or cannot be expressed with the tokenizer's vocabulary.
        """
        self._compile_cached(output)

    def matcher(self, output: StructuredOutput, stop_token_ids: Sequence[int]) -> TokenMatcher:
        """Return a matcher at the start of a response.

        Raises:
            ValueError: see `check`.
        """
        return TokenMatcher(self._compile_cached(output).deep_copy(), self._ll_tokenizer, stop_token_ids)

    @functools.cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=max(self._vocab_size, len(self._tokenizer)))
        except ValueError as error:
            raise ValueError(f"the tokenizer does not support structured outputs: {error}") from error

    def _compile(self, output: StructuredOutput) -> LLMatcher:
        from llguidance import grammar_from

        if len(output.spec) > MAX_SPEC_LENGTH:
            raise ValueError(f"{output.kind}: {len(output.spec)} characters, the maximum is {MAX_SPEC_LENGTH}")
        if output.kind in ("regex", "choice"):
            return self._build(output.kind, grammar_from(output.kind, output.spec))
        if self._missing_characters:
            missing = f"it has no tokens for {self._missing_characters!r}"
            raise ValueError(f"the tokenizer's vocabulary cannot express JSON: {missing}")
        return self._build(output.kind, grammar_from("json_schema", output.spec or ANY_OBJECT))

    def _build(self, kind: str, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=MAX_LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"{kind}: {matcher.get_error().strip()}")
        # the first mask takes the longest, and detects that there is no first token
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"{kind}: {_cause(matcher)}")
        return matcher

    @functools.cached_property
    def _missing_characters(self) -> str:
        """Printable ASCII characters that are no token."""
        tokenizer = self._ll_tokenizer
        texts = (tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size))
        characters = {text[0] for text in texts if len(text) == 1}
        return "".join(chr(code) for code in PRINTABLE_ASCII if code not in characters)


class TokenMatcher:
    """State of the grammar of one response, after the tokens so far."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stop_token_ids: Sequence[int]) -> None:
        self.matcher = matcher
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

    def set_stop_tokens(self, allowed: npt.NDArray[np.bool_]) -> None:
        """Allow the stop tokens in a mask, [vocab], exactly if the text is complete, and everything after an error."""
        allowed[[token for token in self._eos_tokens if token < len(allowed)]] = False
        allowed[[token for token in self._stop_token_ids if token < len(allowed)]] = self.matcher.is_accepting()
        if self.matcher.is_error() or not allowed.any():
            self.error = _cause(self.matcher)
            allowed[:] = True


def _cause(matcher: LLMatcher) -> str:
    """Why no token may follow."""
    error = matcher.get_error().partition("\n")[0]
    return error if error and "NoExtension" not in error else "no text of the tokenizer's vocabulary conforms"


def allowed_tokens(matchers: Sequence[TokenMatcher], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return which tokens may follow in each response, bool [n, vocab]."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    bitmask = allocate_token_bitmask(len(matchers), matchers[0].vocab_size)
    fill_next_token_bitmask_par(
        _executor(), [(constrained.matcher, row) for row, constrained in enumerate(matchers)], bitmask
    )
    allowed = np.unpackbits(bitmask.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    for constrained, row in zip(matchers, allowed, strict=True):
        constrained.set_stop_tokens(row)
    return allowed


@functools.cache
def _executor() -> LLExecutor:
    """Threads that compute masks."""
    from llguidance import LLExecutor

    return LLExecutor()
