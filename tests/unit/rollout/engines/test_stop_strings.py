"""If these fail, responses end at the wrong place, or long stop strings slow down all requests of a server."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from quintet.rollout.engines.stop_strings import GrowingText, StopPrefix, StopStringMatcher, borders


def characters(tokens: Sequence[int]) -> str:
    """One token per byte."""
    return bytes(tokens).decode(errors="replace")


@given(st.text("ab", min_size=1, max_size=6), st.lists(st.text("ab", max_size=4), max_size=6))
def test_what_may_become_a_stop_string_is_held_back(stop: str, parts: list[str]) -> None:
    prefix, text = StopPrefix(stop, borders(stop)), ""
    for part in parts:
        text += part
        prefix.update(part)
        lengths = [size for size in range(len(stop)) if text.endswith(stop[:size])]
        assert prefix.length == max(lengths)


@given(
    st.text("aébß", min_size=1, max_size=10),
    st.lists(st.text("aébß", min_size=1, max_size=3), min_size=1, max_size=2),
    st.integers(1, 4),
)
def test_a_stop_string_matches_where_it_ends_also_after_skipped_tokens(text: str, stops: list[str], start: int) -> None:
    """`min_tokens` skips the first tokens."""
    tokens, matcher = text.encode(), StopStringMatcher(stops, characters)
    for count in range(start, len(tokens) + 1):
        now, before = characters(tokens[:count]), characters(tokens[: count - 1]).rstrip("\ufffd")
        expected = any(now.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in stops)
        assert matcher.matches(tokens[:count]) == expected


def test_the_work_for_a_token_does_not_depend_on_the_lengths_of_response_and_stop_strings() -> None:
    lengths: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return characters(tokens)

    text, matcher = GrowingText(decode), StopStringMatcher(["x" * 1024] * 64, decode)
    tokens = b"abc" * 400
    for count in range(len(tokens) + 1):
        text.update(tokens[:count])
        assert not matcher.matches(tokens[:count])
    assert text.text == "abc" * 400
    assert max(lengths) <= 2
