"""Compilation of grammars by llguidance, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_LEXER_FUEL = 100_000
"""llguidance's limit on the size of regular expressions and patterns: ten times more takes several seconds."""
MAX_LEXER_STATES = 50_000
"""llguidance's limit on the states that a grammar gets while responses are generated, 1 to 2 KB each."""
ANY_OBJECT = '{"type": "object"}'


def compile_grammar(tokenizer: LLTokenizer, kind: str, spec: str) -> LLMatcher:
    """Compile the structured output of a kind, see `StructuredOutput`.

    Raises:
        ValueError: it is invalid, exceeds a limit of llguidance, or no text of the vocabulary conforms.
    """
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    name: Any = kind if kind in ("regex", "choice") else "json_schema"
    limits = LLParserLimits(initial_lexer_fuel=MAX_LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar_from(name, spec or ANY_OBJECT), log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"{kind}: {matcher.get_error().strip()}")
    # the first mask takes the longest, and detects that there is no first token
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"{kind}: {grammar_error(matcher)}")
    return matcher


def grammar_error(matcher: LLMatcher) -> str:
    """Return why no token may follow."""
    error = matcher.get_error().partition("\n")[0]
    return error if error and "NoExtension" not in error else "no text of the tokenizer's vocabulary conforms"
