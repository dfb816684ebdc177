"""If these fail, a body that nobody foresaw breaks the server, or a stream shows other words than the answer has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.policies.causal_lm import load_tokenizer
from quintet.records import Generation, Request, StopReason
from quintet.runtime.serving.schema import NEUTRAL, ChatBody, CompletionBody, GenerateBody, Refusal, parse
from quintet.runtime.serving.words import Words, Writing

KINDS = (ChatBody, CompletionBody, GenerateBody)
NAMES = sorted({name for kind in KINDS for name in kind.model_fields} | set(NEUTRAL) | {"", "model_", "\ud800"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=4) | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "role", "type"]), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_any_body_is_read_or_refused(kind: Any, body: dict[str, Any]) -> None:
    refusal = None
    try:
        parse(kind, json.dumps(body).encode())
    except Refusal as error:
        refusal = error
    if refusal is not None:
        assert refusal.state == 400
        assert json.loads(json.dumps(refusal.body()))["error"]["message"]


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        parse(GenerateBody, body)


@pytest.fixture(scope="module")
def words(policy_directory: Path) -> Words:
    tokenizer = load_tokenizer(policy_directory)
    return Words(tokenizer, (tokenizer.eos_token_id,))


def streamed(words: Words, tokens: list[int], request: Request, cuts: list[int], *, skip: bool) -> tuple[str, str]:
    """What a stream shows, and what the whole answer does."""
    stop = StopReason.STOP if tokens[-1] in request.stop_ids or request.stop_texts else StopReason.LENGTH
    generation = Generation(0, tuple(tokens), (0.0,) * len(tokens), stop, 0)
    answer = words.answer(request, generation, keep_stop=False, skip_special=skip)
    writing = Writing(words, request.stop_texts, skip_special=skip)
    pieces = [writing.more(tokens[:cut]) for cut in sorted(set(cuts)) if cut < len(tokens)]
    return "".join(pieces) + writing.rest(answer.shown), answer.shown


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=30),
    st.lists(st.integers(1, 30), max_size=12),
    st.booleans(),
)
def test_pieces_come_to_the_whole(words: Words, tokens: list[int], cuts: list[int], skip: bool) -> None:
    """Tokens of a random policy: halves of letters, special ones in the middle."""
    own = [token for token in tokens if token not in words.ends] or [40]
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0, stop_ids=words.ends)
    assert len(set(streamed(words, own, request, cuts, skip=skip))) == 1
    assert len(set(streamed(words, [*own, words.ends[0]], request, cuts, skip=skip))) == 1


@given(st.text("ab", min_size=2, max_size=12), st.text("ab", min_size=1, max_size=3), st.lists(st.integers(1, 12)))
def test_pieces_come_to_the_whole_with_stops(words: Words, text: str, stop: str, cuts: list[int]) -> None:
    """The answer ends where its stop first comes up, as engines end it."""
    if stop not in text:
        return
    text = text[: text.index(stop) + len(stop)]
    tokens = [token for letter in text for token in words.encode(letter)]
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0, stop_texts=("nowhere", stop))
    shown, whole = streamed(words, tokens, request, cuts, skip=False)
    assert shown == whole == text[: -len(stop)]
    for cut in range(len(tokens)):
        writing = Writing(words, request.stop_texts, skip_special=False)
        assert whole.startswith(writing.more(tokens[:cut]))


def test_the_stop_that_ended_an_answer_is_cut_off_and_no_earlier_one(words: Words) -> None:
    """`min_tokens` let the first one pass."""
    tokens = words.encode("ab|cd|")
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0, stop_texts=("|",), min_tokens=4)
    generation = Generation(0, tokens, (0.0,) * len(tokens), StopReason.STOP, 0)
    answer = words.answer(request, generation, keep_stop=False, skip_special=False)
    assert (answer.shown, answer.stopped_by, answer.text) == ("ab|cd", "|", "ab|cd|")
    kept = words.answer(request, generation, keep_stop=True, skip_special=False)
    assert kept.shown == "ab|cd|"


def test_special_tokens_are_shown_unless_they_are_unwanted(words: Words) -> None:
    tokens = (*words.encode("a"), *words.encode("<|im_start|>"), *words.encode("b"))
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0)
    generation = Generation(0, tokens, (0.0,) * 3, StopReason.LENGTH, 0)
    for skip, shown in ((False, "a<|im_start|>b"), (True, "ab")):
        answer = words.answer(request, generation, keep_stop=False, skip_special=skip)
        assert (answer.shown, answer.text) == (shown, "a<|im_start|>b")
