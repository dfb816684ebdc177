"""If these fail, clients lose likely tokens of a position, or cannot join the bytes of tokens to the text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_clients import Client, hf_engine, served
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quintet.policies.model_loading import load_tokenizer
from quintet.policies.tiny_models import train_tokenizer
from quintet.runtime.serving.request_schema import ChatBody, CompletionBody
from quintet.runtime.serving.responses import LogprobFormat, TextOffsets
from quintet.runtime.serving.token_bytes import token_names
from quintet.runtime.serving.tokenization import ChatTokenizer

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
PROMPT = [40, 41, 42, 43]
HELLO = [{"role": "user", "content": "_ P G"}]
TEXTS = st.text(st.sampled_from("ab ,.\n\t_é€漢字👩‍👩‍👧🏽ß\u0301�\u200b\0"), max_size=40) | st.text(max_size=20)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Few merges: characters beyond ASCII are mostly cut into bytes."""
    return train_tokenizer(300, ["the goal is é", "漢 漢 漢", "👩 👩"])


@cache
def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is ▁, a text begins with one, and unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abé,.", "▁a", "▁ab", "ab"]
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_tokens([AddedToken("<tag>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@cache
def word_piece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", *"abé,", "##a", "##b", "##é", "ab"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> ChatTokenizer:
    return ChatTokenizer(tokenizer, ())


def own_bytes(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> bytes:
    data = [chat_tokenizer(tokenizer).token_bytes(token) for token in tokens]
    assert None not in data
    return b"".join(part for part in data if part is not None)


@given(TEXTS)
@settings(deadline=None, max_examples=200)
def test_the_bytes_of_byte_level_tokens_are_the_text(text: str) -> None:
    tokens = byte_level().encode(text, add_special_tokens=False)
    assert own_bytes(byte_level(), tokens) == text.encode()


@given(st.text(st.sampled_from("ab é漢👩,."), max_size=30))
@settings(deadline=None, max_examples=100)
def test_the_bytes_of_sentence_piece_tokens_are_the_text_behind_its_space(text: str) -> None:
    tokens = sentence_piece().encode(text, add_special_tokens=False)
    decoded = sentence_piece().decode(tokens)
    assert decoded == text
    assert own_bytes(sentence_piece(), tokens) == (f" {decoded}" if text else "").encode()


@pytest.mark.parametrize(
    ("tokenizer", "piece", "expected"),
    [
        (byte_level, "â", b"\xe2"),
        (byte_level, "Ġ", b" "),
        (byte_level, "<answer>", b"<answer>"),
        (byte_level, "<|im_end|>", b"<|im_end|>"),
        (sentence_piece, "<0xE2>", b"\xe2"),
        (sentence_piece, "<0x0A>", b"\n"),
        (sentence_piece, "▁a", b" a"),
        (sentence_piece, "a", b"a"),
        (sentence_piece, "▁", b" "),
        (sentence_piece, "é", "é".encode()),
        (sentence_piece, "<tag>", b"<tag>"),
        (sentence_piece, "</s>", b"</s>"),
        (word_piece, "##b", b"b"),
        (word_piece, "b", b" b"),
        (word_piece, "##é", "é".encode()),
        (word_piece, "[UNK]", b"[UNK]"),
    ],
)
def test_a_token_has_its_own_bytes(tokenizer: Any, piece: str, expected: bytes) -> None:
    token = tokenizer().convert_tokens_to_ids(piece)
    assert own_bytes(tokenizer(), [token]) == expected


def test_a_number_beyond_the_vocabulary_has_no_bytes() -> None:
    tokens = chat_tokenizer(byte_level())
    assert tokens.token_bytes(99_999) is None
    assert token_names([99_999, 99_998], tokens.token_bytes) == {99_999: "token_id:99999", 99_998: "token_id:99998"}


def test_tokens_of_the_same_text_have_different_names() -> None:
    """A trained token and an added one, one whose text looks like a number's name, and parts of characters."""
    texts = {1: b"ab", 2: b"ab", 3: b"token_id:2", 4: b"\xe2\x80", 5: b"\xe2", 6: b"", 7: None, 8: "�".encode()}
    names = token_names(texts, texts.get, bytes_prefix="bytes:")
    assert names == {
        1: "ab",
        2: "token_id:2",
        3: "token_id:3",
        4: "bytes:\\xe2\\x80",
        5: "bytes:\\xe2",
        6: "token_id:6",
        7: "token_id:7",
        8: "�",
    }
    assert token_names([2, 1], texts.get)[2] == "ab", "the sampled token, which is the first, keeps its text"


def formatted(body: Any, tokens: list[int], top: tuple[Any, ...], tokenizer: PreTrainedTokenizerFast) -> Any:
    chat = chat_tokenizer(tokenizer)
    response = (tuple(tokens), tuple(best[0][1] for best in top), top)
    return LogprobFormat(chat, body).format(response, TextOffsets(chat, skip_special_tokens=False))


def test_impossible_tokens_are_valid_json_and_the_sampled_one_has_one_value() -> None:
    top = (((40, -0.25), (41, -math.inf)),)
    chat = ChatBody(messages=HELLO, logprobs=True, top_logprobs=2)
    (position,) = formatted(chat, [40], top, byte_level())["content"]
    assert [entry["logprob"] for entry in position["top_logprobs"]] == [-0.25, -9999.0]
    json.dumps(position, allow_nan=False)
    chat_tokens = chat_tokenizer(byte_level())
    response = ((40,), (-0.5,), top)
    completion = LogprobFormat(chat_tokens, CompletionBody(prompt="a", logprobs=2))
    shown: Any = completion.format(response, TextOffsets(chat_tokens, skip_special_tokens=False))
    assert shown["top_logprobs"][0][shown["tokens"][0]] == shown["token_logprobs"][0] == -0.5


@given(TEXTS)
@settings(deadline=None, max_examples=60)
def test_offsets_are_the_places_of_tokens_in_the_text(text: str) -> None:
    """Also behind characters of several tokens, and of tokens that hold the end of one character."""
    tokens = byte_level().encode(text, add_special_tokens=False)
    offsets = TextOffsets(chat_tokenizer(byte_level()), skip_special_tokens=False)
    data = b""
    for token in tokens:
        assert offsets.add(token) == len(data.decode(errors="ignore"))
        data += own_bytes(byte_level(), [token])


def test_a_part_of_a_stream_without_tokens_has_lists() -> None:
    tokens = chat_tokenizer(byte_level())
    body = CompletionBody(prompt="a", logprobs=2)
    shown = LogprobFormat(tokens, body).format(((), (), ()), TextOffsets(tokens, skip_special_tokens=False))
    assert shown == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def test_the_space_that_a_text_drops_counts_not() -> None:
    tokens = sentence_piece().encode("ab é,", add_special_tokens=False)
    offsets = TextOffsets(chat_tokenizer(sentence_piece()), skip_special_tokens=False)
    text = sentence_piece().decode(tokens)
    places = [offsets.add(token) for token in tokens]
    pieces = [own_bytes(sentence_piece(), [token]).decode() for token in tokens]
    assert pieces[0].startswith(" ")
    assert not text.startswith(" ")
    pieces[0] = pieces[0].lstrip()
    assert all(text[place:].startswith(piece) for place, piece in zip(places, pieces, strict=True))


@pytest.fixture(scope="module")
def client(policy_directory: Path) -> Iterator[Client]:
    """A random policy, most of whose tokens are parts of characters."""
    with served(hf_engine(policy_directory), policy_directory) as made:
        yield made


def content(data: list[Any]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in data)


@pytest.mark.parametrize("top", [1, 5, 20])
def test_no_alternative_of_a_completion_is_lost(client: Client, policy_directory: Path, top: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "temperature": 2.0, "ignore_eos": True, "logprobs": top}
    (by_text,) = client.ask(COMPLETE, body)["choices"]
    (by_id,) = client.ask(COMPLETE, {**body, "return_tokens_as_token_ids": True})["choices"]
    named, numbered = by_text["logprobs"], by_id["logprobs"]
    partial = 0
    for position, best in enumerate(named["top_logprobs"]):
        assert sorted(best.values()) == sorted(numbered["top_logprobs"][position].values())
        assert len(best) in (top, top + 1)
        assert best[named["tokens"][position]] == named["token_logprobs"][position]
        partial += sum(name.startswith("bytes:") for name in best)
    assert partial > 10 * top, "parts of characters are among them"
    assert named["token_logprobs"] == numbered["token_logprobs"]
    for place, token in zip(named["text_offset"], named["tokens"], strict=True):
        assert token.startswith("bytes:") or by_text["text"][place:].startswith(token)


def test_the_greedy_token_is_the_likeliest_by_name(client: Client) -> None:
    """As lm-eval finds out whether a completion is greedy."""
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    shown = client.ask(COMPLETE, body)["choices"][0]["logprobs"]
    for token, best in zip(shown["tokens"], shown["top_logprobs"], strict=True):
        assert max(best, key=best.__getitem__) == token


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": ["e"]}, {"skip_special_tokens": True}])
def test_a_stream_has_the_same_logprobs_as_one_answer(client: Client, more: dict[str, Any]) -> None:
    sampling = {"max_tokens": 40, "seed": 5, "temperature": 1.5, **more}
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 7, **sampling}
    choices = client.ask(CHAT, body)["choices"]
    events = client.stream(CHAT, body)
    for choice in choices:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        streamed = [entry for part in parts if part.get("logprobs") for entry in part["logprobs"]["content"]]
        whole = choice["logprobs"]["content"]
        # the rounding of log-probs depends on which requests share a step
        assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in whole]
        assert [entry["logprob"] for entry in streamed] == pytest.approx(
            [entry["logprob"] for entry in whole], abs=1e-4
        )
        assert all(len(entry["top_logprobs"]) == 7 for entry in streamed)
    body = {"prompt": PROMPT, "logprobs": 7, **sampling}
    choices = client.ask(COMPLETE, body)["choices"]
    events = client.stream(COMPLETE, body)
    for choice in choices:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        streams = {name: [entry for part in parts for entry in part["logprobs"][name]] for name in choice["logprobs"]}
        for name in ("tokens", "text_offset"):
            assert streams[name] == choice["logprobs"][name], name
        assert streams["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert all(len(best) in (7, 8) for best in streams["top_logprobs"])


def test_the_bytes_of_a_completion_are_its_text(client: Client, policy_directory: Path) -> None:
    end = load_tokenizer(policy_directory).eos_token
    for seed in range(8):
        body = {"messages": HELLO, "logprobs": True, "max_tokens": 40, "seed": seed, "temperature": 1.5}
        choice = client.ask(CHAT, body)["choices"][0]
        data = content(choice["logprobs"]["content"])
        if choice["finish_reason"] == "stop":
            data = data.removesuffix(end.encode())
        assert data.decode(errors="replace") == choice["message"]["content"]
