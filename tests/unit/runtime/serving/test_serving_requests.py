"""If these fail, a body that nobody foresaw breaks the server, or a stream shows other words than the answer has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.policies.model_loading import load_tokenizer
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.stop_strings import borders
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.request_schema import (
    UNSUPPORTED_FIELDS,
    ChatBody,
    CompletionBody,
    GenerateBody,
    parse,
)
from quintet.runtime.serving.tokenization import ChatTokenizer, StreamingText

KINDS = (ChatBody, CompletionBody, GenerateBody)
NAMES = sorted(
    {name for kind in KINDS for name in kind.model_fields} | set(UNSUPPORTED_FIELDS) | {"", "model_", "\ud800"}
)
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
    except RequestError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert json.loads(json.dumps(refusal.body()))["error"]["message"]


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse(GenerateBody, body)


@pytest.fixture(scope="module")
def tokenizer(policy_directory: Path) -> ChatTokenizer:
    tokenizer = load_tokenizer(policy_directory)
    return ChatTokenizer(tokenizer, (tokenizer.eos_token_id,))


def streamed(
    tokenizer: ChatTokenizer, tokens: list[int], request: Request, cuts: list[int], *, skip: bool
) -> tuple[str, str]:
    """What a stream shows, and what the whole answer does."""
    stop = FinishReason.STOP if tokens[-1] in request.stop_token_ids or request.stop_strings else FinishReason.LENGTH
    generation = Generation(0, tuple(tokens), (0.0,) * len(tokens), stop, 0)
    answer = tokenizer.answer(request, generation, include_stop_text=False, skip_special_tokens=skip)
    writing = StreamingText(
        tokenizer, [(stop, borders(stop)) for stop in request.stop_strings], skip_special_tokens=skip
    )
    pieces = [writing.update(tokens[:cut]) for cut in sorted(set(cuts)) if cut < len(tokens)]
    return "".join(pieces) + writing.remaining(answer.returned_text), answer.returned_text


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=30),
    st.lists(st.integers(1, 30), max_size=12),
    st.booleans(),
)
def test_pieces_come_to_the_whole(tokenizer: ChatTokenizer, tokens: list[int], cuts: list[int], skip: bool) -> None:
    """Tokens of a random policy: halves of letters, special ones in the middle."""
    own = [token for token in tokens if token not in tokenizer.stop_token_ids] or [40]
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0, stop_token_ids=tokenizer.stop_token_ids)
    assert len(set(streamed(tokenizer, own, request, cuts, skip=skip))) == 1
    assert len(set(streamed(tokenizer, [*own, tokenizer.stop_token_ids[0]], request, cuts, skip=skip))) == 1


@given(st.text("ab", min_size=2, max_size=12), st.text("ab", min_size=1, max_size=3), st.lists(st.integers(1, 12)))
def test_pieces_come_to_the_whole_with_stops(tokenizer: ChatTokenizer, text: str, stop: str, cuts: list[int]) -> None:
    """The answer ends where its stop first comes up, as engines end it."""
    if stop not in text:
        return
    text = text[: text.index(stop) + len(stop)]
    tokens = [token for letter in text for token in tokenizer.encode(letter)]
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0, stop_strings=("nowhere", stop))
    shown, whole = streamed(tokenizer, tokens, request, cuts, skip=False)
    assert shown == whole == text[: -len(stop)]
    for cut in range(len(tokens)):
        writing = StreamingText(
            tokenizer, [(stop, borders(stop)) for stop in request.stop_strings], skip_special_tokens=False
        )
        assert whole.startswith(writing.update(tokens[:cut]))


def test_the_stop_that_ended_an_answer_is_cut_off_and_no_earlier_one(tokenizer: ChatTokenizer) -> None:
    """`min_tokens` let the first one pass."""
    tokens = tokenizer.encode("ab|cd|")
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0, stop_strings=("|",), min_tokens=4)
    generation = Generation(0, tokens, (0.0,) * len(tokens), FinishReason.STOP, 0)
    answer = tokenizer.answer(request, generation, include_stop_text=False, skip_special_tokens=False)
    assert (answer.returned_text, answer.stopped_by, answer.text) == ("ab|cd", "|", "ab|cd|")
    kept = tokenizer.answer(request, generation, include_stop_text=True, skip_special_tokens=False)
    assert kept.returned_text == "ab|cd|"


def test_special_tokens_are_shown_unless_they_are_unwanted(tokenizer: ChatTokenizer) -> None:
    tokens = (*tokenizer.encode("a"), *tokenizer.encode("<|im_start|>"), *tokenizer.encode("b"))
    request = Request(id=0, prompt=(1,), max_tokens=30, seed=0)
    generation = Generation(0, tokens, (0.0,) * 3, FinishReason.LENGTH, 0)
    for skip, shown in ((False, "a<|im_start|>b"), (True, "ab")):
        answer = tokenizer.answer(request, generation, include_stop_text=False, skip_special_tokens=skip)
        assert (answer.returned_text, answer.text) == (shown, "a<|im_start|>b")


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["x"] * 100_000, "stop: List should have at most 64 items"),
        ("x" * 2000, "stop: String should have at most 1024 characters"),
        (["fine", 7], "stop.1: Input should be a valid string"),
    ],
)
def test_a_wrong_stop_is_refused_for_what_is_wrong_with_it(stop: object, message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse(CompletionBody, json.dumps({"prompt": "a", "stop": stop}).encode())
    assert error.value.message.startswith(message), error.value.message
