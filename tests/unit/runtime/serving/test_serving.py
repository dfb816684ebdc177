"""If these fail, programs that ask our server get other tokens than the policy would write, or options do nothing."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_clients import CONTEXT, Client, hf_engine, served

from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.policies.token_statistics import log_probs_and_entropy
from quintet.records import Outcome, Request, Trajectory
from quintet.rollout.collate import collate
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.rollout.engines.weight_source import TensorWeights
from quintet.rollout.sessions import build_turns, read_session
from quintet.runtime.serving.app import ServingServer
from quintet.runtime.serving.tokenization import ChatTokenizer

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "system", "content": "Walk to the goal G."}, {"role": "user", "content": "_ P G"}]
PROMPT = [40, 41, 42, 43]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
TOOL = {"type": "function", "function": {"name": "move"}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module")
def client(policy_directory: Path) -> Iterator[Client]:
    with served(hf_engine(policy_directory), policy_directory) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(policy_directory: Path) -> Any:
    return load_tokenizer(policy_directory)


def directly(directory: Path, **fields: Any) -> Any:
    """The engine's own answer."""
    engine = hf_engine(directory)
    engine.add_request(Request(**({"id": 0, "prompt": tuple(PROMPT), "max_tokens": 12, "seed": 5} | fields)))
    done: list[Any] = []
    while not done:
        done += engine.step()
    return done[0]


@pytest.mark.parametrize(
    "drawn",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"min_p": 0.05, "repetition_penalty": 1.3},
        {"min_tokens": 9},
    ],
)
def test_the_same_seed_gives_the_tokens_of_the_engine_itself(
    client: Client, policy_directory: Path, tokenizer: Any, drawn: dict[str, float]
) -> None:
    response = client.ask(GENERATE, {"prompt_token_ids": PROMPT, "max_tokens": 12, "seed": 5, **drawn})
    expected = directly(policy_directory, stop_token_ids=(tokenizer.eos_token_id,), **drawn)
    assert (tuple(response["token_ids"]), response["finish_reason"]) == (expected.tokens, expected.finish_reason)
    assert response["logprobs"] == list(expected.logprobs)
    assert response["weight_version"] == 0


def test_logprobs_are_the_learners(client: Client, policy_directory: Path) -> None:
    from quintet.policies.attention import PackedLayout
    from quintet.policies.packed_batch import PackedBatch

    body = {"messages": HELLO, "max_tokens": 16, "seed": 3, "temperature": 0.8, "logprobs": True}
    response = client.ask(CHAT, {**body, "return_token_ids": True})
    prompt, answer = response["prompt_token_ids"], response["choices"][0]["token_ids"]
    whole = torch.tensor(prompt + answer)
    sources = torch.arange(len(prompt) - 1, len(whole) - 1)
    packed = PackedBatch(
        whole, torch.arange(len(whole)), PackedLayout(torch.tensor([len(whole)])), sources, whole[sources + 1]
    )
    model = load_model(policy_directory)
    with torch.no_grad():
        expected, _ = log_probs_and_entropy(model, packed, 0.8)
    shown = [one["logprob"] for one in response["choices"][0]["logprobs"]["content"]]
    torch.testing.assert_close(torch.tensor(shown), expected, atol=1e-5, rtol=0)


def test_the_likeliest_tokens_are_those_of_the_model(client: Client, policy_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "temperature": 0.8, "top_k": 2, "return_token_ids": True}
    (choice,) = client.ask(COMPLETE, {**body, "logprobs": 4, "return_tokens_as_token_ids": True})["choices"]
    whole = torch.tensor([[*PROMPT, *choice["token_ids"]]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(policy_directory)(whole).logits[0, len(PROMPT) - 1 : -1]
    best = (logits / 0.8).log_softmax(-1).topk(4)
    for token, shown, tokens, logprobs in zip(
        choice["token_ids"], choice["logprobs"]["top_logprobs"], best.indices, best.values, strict=True
    ):
        expected = {
            f"token_id:{each}": logprob for each, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        }
        assert f"token_id:{token}" in expected, "one of the two that were sampled from"
        assert shown == pytest.approx(expected, abs=1e-5)
    assert client.ask(COMPLETE, {**body, "logprobs": 0})["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_chat_goes_through_the_models_template(client: Client, tokenizer: Any) -> None:
    response = client.ask(
        CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 8, "seed": 1, "return_token_ids": True}
    )
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert response["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)
    choice = response["choices"][0]
    own = [token for token in choice["token_ids"] if token != tokenizer.eos_token_id]
    assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(own)}
    assert choice["finish_reason"] in ("stop", "length")
    assert response["object"] == "chat.completion"
    usage = {"prompt_tokens": len(response["prompt_token_ids"]), "completion_tokens": len(choice["token_ids"])}
    assert response["usage"] == usage | {"total_tokens": sum(usage.values())}


def test_parts_of_a_message_are_joined(client: Client) -> None:
    parts = [{"type": "text", "text": "_ P"}, {"type": "text", "text": "G _"}]
    body = {"max_tokens": 2, "seed": 1, "return_token_ids": True}
    one = client.ask(CHAT, {"messages": [{"role": "user", "content": parts}], **body})
    other = client.ask(CHAT, {"messages": [{"role": "user", "content": "_ P\nG _"}], **body})
    assert one["prompt_token_ids"] == other["prompt_token_ids"]


def test_several_answers_come_of_seeds_of_their_own(client: Client) -> None:
    body = {"prompt": PROMPT, "n": 3, "seed": 5, "max_tokens": 12, "return_token_ids": True, "logprobs": 0}
    choices = client.ask(COMPLETE, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    alone = client.ask(GENERATE, {"prompt_token_ids": PROMPT, "seed": 5, "max_tokens": 12})
    assert choices[0]["token_ids"] == alone["token_ids"], "the first draws by the seed itself"
    assert choices[0]["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"], abs=1e-5)
    again = client.ask(COMPLETE, body)["choices"]
    assert [choice["token_ids"] for choice in again] == [choice["token_ids"] for choice in choices]


def test_without_a_seed_answers_differ(client: Client) -> None:
    body = {"prompt_token_ids": PROMPT, "max_tokens": 16}
    assert client.ask(GENERATE, body)["token_ids"] != client.ask(GENERATE, body)["token_ids"]


def test_prompts_as_text_and_tokens_one_and_many(client: Client, tokenizer: Any) -> None:
    text = "<answer> Down </answer>"
    tokens = tokenizer.encode(text)
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    for prompt in (text, tokens, [text], [tokens]):
        (choice,) = client.ask(COMPLETE, {"prompt": prompt, **body})["choices"]
        assert choice["prompt_token_ids"] == tokens
    response = client.ask(COMPLETE, {"prompt": [text, "P G"], "n": 2, **body})
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] == tokens for choice in response["choices"]] == [True, True, False, False]
    assert response["usage"]["prompt_tokens"] == len(tokens) + len(tokenizer.encode("P G"))
    assert len(client.ask(COMPLETE, {"prompt": "P G", "ignore_eos": True})["choices"][0]["text"]) > 0


def test_stops_end_an_answer_and_arent_shown(client: Client, tokenizer: Any) -> None:
    whole = client.ask(COMPLETE, {"prompt": PROMPT, "max_tokens": 24, "seed": 9, "return_token_ids": True})["choices"][
        0
    ]
    stop = whole["text"][5:8]
    cut = whole["text"].index(stop)
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 9, "return_token_ids": True}
    response = client.ask(COMPLETE, {**body, "stop": ["nowhere", stop]})["choices"][0]
    assert (response["text"], response["finish_reason"], response["stop_reason"]) == (whole["text"][:cut], "stop", stop)
    assert response["token_ids"] == whole["token_ids"][: len(response["token_ids"])]
    assert stop in tokenizer.decode(response["token_ids"]), "the tokens are all that were sampled"
    kept = client.ask(COMPLETE, {**body, "stop": stop, "include_stop_str_in_output": True})["choices"][0]
    assert kept["text"] == whole["text"][: cut + len(stop)]
    token = whole["token_ids"][4]
    by_token = client.ask(COMPLETE, {**body, "stop_token_ids": [token]})["choices"][0]
    assert by_token["stop_reason"] == token
    assert by_token["token_ids"][-1] == token
    assert by_token["text"] == tokenizer.decode(by_token["token_ids"][:-1])


def test_an_answer_that_fills_the_context_says_length(client: Client) -> None:
    response = client.ask(CHAT, {"messages": HELLO, "ignore_eos": True, "seed": 1, "return_token_ids": True})
    assert len(response["prompt_token_ids"]) + len(response["choices"][0]["token_ids"]) >= CONTEXT
    assert response["choices"][0]["finish_reason"] == "length"


def test_tokens_by_number(client: Client) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "seed": 1, "logprobs": True, "return_token_ids": True}
    response = client.ask(CHAT, {**body, "return_tokens_as_token_ids": True})["choices"][0]
    named = [one["token"] for one in response["logprobs"]["content"]]
    assert named == [f"token_id:{token}" for token in response["token_ids"]]


@pytest.mark.parametrize("stream", [False, True])
def test_json_mode_returns_json(client: Client, stream: bool) -> None:
    """A random model writes long strings: what is cut off ends by its length."""
    finished = 0
    for seed in range(12):
        body = {"messages": HELLO, "response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 150}
        if stream:
            events = client.stream(CHAT, body)
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = client.ask(CHAT, body)["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert reason in ("stop", "length")
        finished += reason == "stop"
        assert reason == "length" or isinstance(json.loads(text), dict)
    assert finished > 2


def test_completions_conform_to_a_schema_or_a_choice(client: Client) -> None:
    schema = {"type": "object", "properties": {"move": {"enum": ["Up", "Down"]}}, "required": ["move"]}
    strict = schema | {"additionalProperties": False}
    for output_format in ({"response_format": schema_format(strict)}, {"structured_outputs": {"json": strict}}):
        body = {"prompt": PROMPT, "n": 8, "seed": 3, "max_tokens": 200, **output_format}
        texts = [one["text"] for one in client.ask(COMPLETE, body)["choices"] if one["finish_reason"] == "stop"]
        assert {json.loads(text)["move"] for text in texts} == {"Up", "Down"}
    body = {"prompt": PROMPT, "n": 8, "seed": 3, "structured_outputs": {"choice": ["Left", "Right"]}}
    assert {one["text"] for one in client.ask(COMPLETE, body)["choices"]} == {"Left", "Right"}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {"messages": HELLO, "frequency_penalti": 1}, "frequency_penalti", "unknown field"),
        (CHAT, {"messages": HELLO, "max_token": 1}, "max_token", "did you mean max_tokens"),
        (CHAT, {"messages": HELLO, "frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        (CHAT, {"messages": HELLO, "logit_bias": {"1000000": 1}}, "logit_bias", "no token 1000000"),
        (CHAT, {"messages": HELLO, "verbosity": "low"}, "verbosity", "ask for the length"),
        (COMPLETE, {"prompt": "a", "max_tokens": 0}, None, "only with echo"),
        (COMPLETE, {"prompt": "a", "echo": True, "stream": True, "logprobs": 0}, None, "not streamed"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, None, "set logprobs to true"),
        (CHAT, {"messages": HELLO, "top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json"}}, "response_format.type", "'json_object'"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            CHAT,
            {"messages": HELLO, "response_format": schema_format({"type": "text"})},
            "response_format",
            "type: text",
        ),
        (CHAT, {"messages": HELLO, "response_format": schema_format({"not": {}})}, "response_format", '"not"'),
        (COMPLETE, {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        (CHAT, {"messages": HELLO, "response_format": schema_format({}), "min_tokens": 2}, None, "remove min_tokens"),
        (CHAT, {"messages": HELLO, "response_format": schema_format({}), "ignore_eos": True}, None, "end tokens"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        (CHAT, {"messages": HELLO, "tools": [TOOL]}, "tools", "does not support tools"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, None, "no such function"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}, None, "no such variable"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages.0.name", "does not use it"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", "'system'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, None, "'text', 'image_url'"),
        (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, None, "the model reads no images"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {}, "messages", "missing"),
        (CHAT, {"messages": HELLO, "n": 129}, "n", "128"),
        (CHAT, {"messages": HELLO, "n": True}, "n", "integer"),
        (CHAT, {"messages": HELLO, "temperature": "1"}, "temperature", "number"),
        (CHAT, {"messages": HELLO, "stop": ""}, "stop", "at least 1"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogate"),
        (COMPLETE, {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        (COMPLETE, {"prompt": "a", "top_logprobs": 2}, "top_logprobs", "set logprobs"),
        (COMPLETE, {"prompt": "a", "best_of": 4}, "best_of", "request n"),
        (COMPLETE, {"prompt": ""}, "prompt", "empty"),
        (COMPLETE, {"prompt": []}, "prompt", "empty"),
        (COMPLETE, {"prompt": [10**6]}, "prompt", "no token 1000000"),
        (COMPLETE, {"prompt": [-1]}, "prompt.0", "greater than"),
        (COMPLETE, {"prompt": ["a"] * 100, "n": 100}, "n", "4096"),
        (COMPLETE, {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens, 3"),
        (
            GENERATE,
            {"prompt_token_ids": [1] * CONTEXT},
            "prompt_token_ids",
            f"maximum context length is {CONTEXT} tokens",
        ),
        (GENERATE, {"prompt_token_ids": [1], "echo": False}, "echo", "unknown field"),
        (GENERATE, {"prompt_token_ids": [1], "model": "gpt"}, "model", "unknown model"),
    ],
)
def test_what_isnt_done_is_refused_by_name(
    client: Client, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    state, error = client.refused(path, body)
    assert state == (404 if param == "model" else 400)
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'{"n": 1, "n": 2}', b'{"temperature": NaN}', b"[" * 100_000, b'{"prompt": 1e999}', b"\xff"],
)
def test_bodies_that_arent_json_objects_are_refused(client: Client, body: bytes) -> None:
    assert client.refused(COMPLETE, body)[0] == 400


def test_the_message_of_a_field_that_is_not_supported_says_so_once(client: Client) -> None:
    body = {"prompt": "a", "bad_words": ["b"]}
    _, error = client.refused(COMPLETE, json.dumps(body).encode())[:2]
    assert str(error).count("not supported") == 1
    assert "leave it out" in str(error)


def test_neutral_values_of_fields_that_arent_done_pass(client: Client) -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "top_logprobs": 0, "store": False}
    response = client.ask(CHAT, {"messages": HELLO, "max_tokens": 1, "stop": None, "user": "me", **neutral})
    assert response["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("method", "path", "state"),
    [
        ("GET", "/nowhere", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("PUT", CHAT, 405),
        ("GET", "/sessions/none", 404),
        ("POST", "/sessions/a%2Fb/v1/completions", 404),
        ("GET", "/session", 404),
    ],
)
def test_other_routes_and_methods_are_refused(client: Client, method: str, path: str, state: int) -> None:
    body = {"prompt": "a"} if method == "POST" else None
    assert client.refused(path, body, method)[0] == state


def test_bodies_are_json_and_no_longer_than_allowed(client: Client) -> None:
    assert client.refused(COMPLETE, b"prompt=a", Content_Type="application/x-www-form-urlencoded")[0] == 415
    assert client.refused(COMPLETE, {"prompt": "a"}, Content_Encoding="gzip")[0] == 415
    assert client.refused(COMPLETE, b"", Content_Length=str(1 << 30))[0] == 413
    assert client.refused(COMPLETE, b"", Content_Length="-1")[0] == 400


@pytest.mark.parametrize("kind", ["message", "prompt"])
def test_texts_far_beyond_the_context_cost_no_time(client: Client, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens would take the server as long as many completions."""
    monkeypatch.setattr(ChatTokenizer, "encode", lambda *_, **__: pytest.fail("the text was tokenized"))
    text = "go left " * 500_000
    body = {"prompt": text} if kind == "prompt" else {"messages": [{"role": "user", "content": text}]}
    status, error = client.refused(COMPLETE if kind == "prompt" else CHAT, body)
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_pages_of_other_sites_cant_ask(client: Client) -> None:
    assert client.refused(COMPLETE, {"prompt": "a"}, Host="evil.example:80")[0] == 403


def test_models_health_and_load(client: Client) -> None:
    (model,) = client.get("/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", CONTEXT)
    assert client.get("/health") == {"status": "ok"}
    before = client.get("/load")
    response = client.ask(GENERATE, {"prompt_token_ids": PROMPT, "max_tokens": 5, "ignore_eos": True})
    after = client.get("/load")
    assert len(response["token_ids"]) == 5
    assert after["tokens"] - before["tokens"] == 5
    assert after["requests"] - before["requests"] == 1
    assert after["open"] == 0


def test_one_connection_carries_many_requests(client: Client) -> None:
    connection = client.connect()
    for _ in range(3):
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        connection.request("POST", COMPLETE, body, {"Content-Type": "application/json"})
        assert len(json.loads(connection.getresponse().read())["choices"]) == 1
    connection.request("GET", "/nowhere")
    assert connection.getresponse().read()
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.fixture(scope="module")
def guarded(policy_directory: Path) -> Iterator[Client]:
    with served(hf_engine(policy_directory), policy_directory, token="sesame") as made:
        yield made


class TestToken:
    def test_who_has_it_may_ask_also_under_another_name(self, guarded: Client) -> None:
        assert guarded.ask(COMPLETE, {"prompt": "a", "max_tokens": 1}, Host="box.example")["choices"]

    @pytest.mark.parametrize("token", [None, "", "Sesame", "sesam", "sésame"])
    def test_others_may_not(self, guarded: Client, token: str | None) -> None:
        other = Client(guarded.url)
        headers = {} if token is None else {"Authorization": f"Bearer {token}".encode().decode("latin-1")}
        for method, path in (("POST", COMPLETE), ("GET", "/v1/models"), ("GET", "/load"), ("GET", "/sessions/a")):
            state, error = other.refused(path, {"prompt": "a"} if method == "POST" else None, method, **headers)
            assert (state, error["code"]) == (401, "invalid_api_key")
        assert other.get("/health") == {"status": "ok"}


class Slow:
    """An engine that waits in each step, so that there is time to go away; it shows what it writes."""

    def __init__(self, engine: Any, seconds: float = 0.01) -> None:
        self._engine, self._seconds = engine, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        time.sleep(self._seconds)
        return self._engine.step()


def test_clients_side_by_side_share_batches(policy_directory: Path) -> None:
    """Each of four asks for itself, and gets what it would get alone."""
    alone = [directly(policy_directory, seed=seed, max_tokens=40).tokens for seed in range(4)]
    with served(Slow(hf_engine(policy_directory)), policy_directory) as client, ThreadPoolExecutor(4) as pool:
        together = threading.Barrier(4, timeout=10)

        def one(seed: int) -> tuple[int, ...]:
            body = {"prompt_token_ids": PROMPT, "seed": seed, "max_tokens": 40, "ignore_eos": True}
            together.wait()
            return tuple(client.ask(GENERATE, body)["token_ids"])

        assert list(pool.map(one, range(4))) == alone
        load = client.get("/load")
    assert (load["requests"], load["tokens"]) == (4, 160)
    assert load["most_together"] == 4
    assert load["steps"] < 80, "one step writes a token for all"


@pytest.fixture(scope="module")
def slow(policy_directory: Path) -> Iterator[Client]:
    with served(Slow(hf_engine(policy_directory)), policy_directory) as made:
        yield made


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_requests_along(slow: Client, stream: bool) -> None:
    before = slow.get("/load")["stops"].get("abort", 0)
    connection = slow.connect()
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "n": 2, "ignore_eos": True, "stream": stream})
    connection.request("POST", "/sessions/gone/v1/completions", body, {"Content-Type": "application/json"})
    wait_for(lambda: slow.get("/load")["open"] == 2)
    connection.close()
    wait_for(lambda: slow.get("/load")["open"] == 0)
    assert slow.get("/load")["stops"]["abort"] == before + 2
    assert slow.send("GET", "/sessions/gone") == (200, b""), "nobody read it, so it is no exchange"


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stream_comes_to_the_same_as_one_answer(slow: Client, path: str) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": PROMPT}
    scored: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    body = {**prompt, **scored, "max_tokens": 20, "seed": 4, "n": 2, "return_token_ids": True}
    whole = slow.ask(path, body)
    events = slow.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert len(events) > 8, "it comes in pieces"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert {event["id"] for event in events} == {events[0]["id"]}
    for choice in whole["choices"]:
        pieces = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        shown = "".join(piece["delta"].get("content", "") if path == CHAT else piece["text"] for piece in pieces)
        assert shown == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert [token for piece in pieces for token in piece.get("token_ids", ())] == choice["token_ids"]
        assert [piece["finish_reason"] for piece in pieces][:-1] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        name = "content" if path == CHAT else "token_logprobs"
        results = [score for piece in pieces if piece.get("logprobs") for score in piece["logprobs"][name]]
        assert results == choice["logprobs"][name]
    first = events[0] if path == CHAT else events[0]["choices"][0]
    assert first["prompt_token_ids"] == (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]


def test_a_stream_never_shows_the_beginning_of_a_stop(slow: Client) -> None:
    whole = slow.ask(COMPLETE, {"prompt": PROMPT, "max_tokens": 20, "seed": 4})["choices"][0]["text"]
    stop = whole[6:10]
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 4, "stop": stop}
    events = slow.stream(COMPLETE, body)
    shown = "".join(event["choices"][0]["text"] for event in events)
    assert shown == whole[: whole.index(stop)]
    assert events[-1]["choices"][0]["stop_reason"] == stop


def test_an_old_client_gets_its_stream_without_chunks(slow: Client) -> None:
    connection = slow.connect()
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True})
    connection.request("POST", COMPLETE, body, {"Content-Type": "application/json"})
    response = connection.getresponse().read()
    assert response.startswith(b"data: {")
    assert response.endswith(b"data: [DONE]\n\n")


def test_an_engine_that_dies_answers_503(policy_directory: Path) -> None:
    class Dying(Slow):
        def step(self) -> Any:
            raise RuntimeError("out of luck")

    with served(Dying(hf_engine(policy_directory)), policy_directory) as client:
        for _ in range(2):
            state, error = client.refused(COMPLETE, {"prompt": "a"})
            assert (state, error["code"]) == (503, "engine_gone")
            assert "out of luck" in error["message"]
        assert client.refused("/health", None, "GET")[0] == 503


def test_weights_that_are_no_numbers_fail_the_request_alone(policy_directory: Path) -> None:
    engine = hf_engine(policy_directory)
    with torch.no_grad():
        engine._model.model.norm.weight.fill_(math.nan)
    with served(engine, policy_directory) as client:
        state, error = client.refused(COMPLETE, {"prompt": "a"})
        assert (state, error["code"]) == (500, "generation_failed")
        assert client.get("/health") == {"status": "ok"}


def test_new_weights_come_between_two_steps(policy_directory: Path) -> None:
    """The engine's own copy of the model, and weights that are twice as sure of the token that was likeliest last."""
    model = load_model(policy_directory)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    weights["model.norm.weight"] = weights["model.norm.weight"] * -1
    engine = Slow(hf_engine(policy_directory))
    with served(engine, policy_directory) as client:
        body = {"prompt_token_ids": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.ask, GENERATE, body)
            wait_for(lambda: client.get("/load")["steps"] > 5)
            client.handler.engine.call(lambda engine: engine.load_weights(4, TensorWeights(weights.items())))
            actual = asked.result()
        assert actual["weight_version"] == 0
        ((place, version),) = actual["version_changes"]
        assert version == 4
        assert 0 < place < 40
        after = client.ask(GENERATE, body)
        assert (after["weight_version"], after["version_changes"]) == (4, [])
        model.model.norm.weight.data *= -1
        own = HfEngine(model, max_num_seqs=1, max_model_len=CONTEXT)
        own.add_request(Request(id=0, prompt=tuple(PROMPT), max_tokens=40, seed=0, temperature=0.0))
        done: list[Any] = []
        while not done:
            done += own.step()
        assert tuple(after["token_ids"]) == done[0].tokens


def test_a_template_that_never_ends_costs_only_its_own_request(policy_directory: Path, tmp_path: Path) -> None:
    model = shutil.copytree(policy_directory, tmp_path / "model")
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(f"{{% if 'loop' in messages[0]['content'] %}}{loops}{{% endif %}}{text}")
    num_answers = 0
    with served(hf_engine(policy_directory), model) as client, ThreadPoolExecutor(2) as pool:
        hanging = [
            pool.submit(client.refused, CHAT, {"messages": [{"role": "user", "content": "loop"}]}) for _ in range(2)
        ]
        while not all(one.done() for one in hanging):
            assert client.ask(CHAT, {"messages": HELLO, "max_tokens": 1})["usage"]["completion_tokens"] == 1
            num_answers += 1
    for state, error in (one.result() for one in hanging):
        assert (state, error["param"]) == (400, "messages")
        assert f"the chat template of {model} exceeds" in error["message"]
        assert "2 s of processor time" in error["message"]
    assert num_answers >= 5


def test_closing_tells_those_who_wait(policy_directory: Path) -> None:
    results: list[Any] = []
    with served(Slow(hf_engine(policy_directory)), policy_directory) as client:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        asking = threading.Thread(target=lambda: results.append(client.refused(COMPLETE, body)))
        asking.start()
        wait_for(lambda: client.get("/load")["open"] == 1)
    asking.join(10)
    assert results[0][0] == 503


class TestSession:
    """A program of several turns, and what it leaves to be trained on."""

    def play(self, client: Client, turns: int = 3) -> None:
        """Each time it repeats all that was said, as programs do."""
        client.send("DELETE", "/sessions/episode")
        messages = list(HELLO)
        for turn in range(turns):
            body = {"messages": messages, "max_tokens": 10, "seed": turn, "user": "agent"}
            response = client.ask(f"/sessions/episode{CHAT}", body)["choices"][0]["message"]
            messages += [response, {"role": "user", "content": f"_ _ P{turn}"}]

    def exchanges(self, client: Client) -> Any:
        state, actual = client.send("GET", "/sessions/episode")
        assert state == 200
        return read_session(actual.decode())

    def test_replies_keep_their_tokens_and_turns_continue(self, client: Client, policy_directory: Path) -> None:
        self.play(client)
        exchanges = self.exchanges(client)
        for before, after in itertools.pairwise(exchanges):
            assert after.prompt.tokens[: len(before.sequence)] == before.sequence
            assert after.prompt.reused == len(before.sequence)
        turns = build_turns(exchanges)
        assert [turn.continues for turn in turns] == [False, True, True]
        assert [turn.observation for turn in turns] == ["_ P G", "_ _ P0", "_ _ P1"]
        assert all(exchange.notes == {"user": "agent"} for exchange in exchanges)
        batch = collate([Trajectory("agent", 0, 0, 0, turns, Outcome.SUCCESS)])
        assert batch.lengths.tolist() == [len(exchanges[-1].sequence)]
        assert tuple(batch.tokens.tolist()) == exchanges[-1].sequence

    def test_two_requests_of_a_session_at_once(self, slow: Client) -> None:
        """Programs ask for several things at a time: each gets its own answer."""
        slow.send("DELETE", "/sessions/both")

        def one(seed: int) -> list[int]:
            body = {"prompt_token_ids": PROMPT, "seed": seed, "max_tokens": 20, "ignore_eos": True}
            return slow.ask("/sessions/both/generate", body)["token_ids"]

        with ThreadPoolExecutor(3) as pool:
            actual = list(pool.map(one, range(3)))
        assert actual == [one(seed) for seed in range(3)]
        kept = read_session(slow.send("GET", "/sessions/both")[1].decode())
        assert sorted(list(known.tokens) for known in kept) == sorted(actual * 2)

    def test_what_is_trained_on_has_the_learners_logprobs(self, client: Client, policy_directory: Path) -> None:
        """The session's tokens through the learner's own pass: what importance ratios start from."""
        from quintet.training.learner_setup import LearnerSetup
        from quintet.training.packing import MicroBatchBudget
        from quintet.training.scorer import PolicyScorer

        self.play(client)
        batch = collate([Trajectory("agent", 0, 0, 0, build_turns(self.exchanges(client)), Outcome.SUCCESS)])
        scorer = PolicyScorer(
            load_model(policy_directory),
            LearnerSetup(budget=MicroBatchBudget(4096), dtype=torch.float32, temperature=1.0),
        )
        actual = scorer.compute_log_probs(batch)
        torch.testing.assert_close(actual[batch.loss_mask], batch.logprobs[batch.loss_mask], atol=1e-5, rtol=0)

    def test_the_text_is_the_templates(self, client: Client, tokenizer: Any) -> None:
        """Sampled tokens or not, together they say what the template says of the whole dialogue."""
        self.play(client)
        for exchange in self.exchanges(client):
            assert tokenizer.decode(list(exchange.prompt.tokens)) == exchange.prompt.text

    def test_a_changed_history_is_another_sequence(self, client: Client) -> None:
        self.play(client, 1)
        actual = {"role": "assistant", "content": "something else"}
        messages = [*HELLO, actual, {"role": "user", "content": "_"}]
        client.ask(CHAT, {"messages": messages, "max_tokens": 2}, X_Quintet_Session="episode")
        exchanges = self.exchanges(client)
        assert [exchange.prompt.reused for exchange in exchanges] == [0, 0]
        assert [turn.continues for turn in build_turns(exchanges)] == [False, False]

    def test_streams_and_tokens_are_kept_too(self, client: Client) -> None:
        client.send("DELETE", "/sessions/episode")
        client.stream("/sessions/episode/v1/completions", {"prompt": "P G", "max_tokens": 6, "seed": 1, "n": 2})
        first, second = self.exchanges(client)
        assert (first.number, second.choice) == (0, 1)
        tokens = [*first.sequence, 40, 41]
        client.ask("/sessions/episode/generate", {"prompt_token_ids": tokens, "max_tokens": 3})
        last = self.exchanges(client)[-1]
        assert build_turns([first, last])[1].prompt == (40, 41)

    def test_rewards_lists_and_ends(self, client: Client) -> None:
        self.play(client, 2)
        client.ask("/sessions/episode/reward", {"reward": 1.5})
        assert [exchange.reward for exchange in self.exchanges(client)] == [0.0, 1.5]
        assert client.get("/sessions")["sessions"]["episode"] == 2
        assert client.refused("/sessions/episode/reward", {"reward": "much"})[0] == 400
        client.send("DELETE", "/sessions/episode")
        assert client.refused("/sessions/episode", None, "GET")[0] == 404

    @pytest.mark.parametrize("name", ["..", "a b", "é", "-a", "a" * 129])
    def test_names_are_plain(self, client: Client, name: str) -> None:
        from urllib.parse import quote

        assert client.refused(f"/sessions/{quote(name)}{COMPLETE}", {"prompt": "a"})[0] == 400


def test_a_refused_request_opens_no_session_so_its_client_cannot_fill_the_server(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in ({"prompt": "a", "model": "another"}, {"prompt": [1] * 5000}, {"prompt": "a", "min_tokens": 99}):
        assert client.refused(f"/sessions/refused{COMPLETE}", body)[0] in (400, 404)
    assert "refused" not in client.get("/sessions")["sessions"]
    monkeypatch.setattr("quintet.runtime.serving.session_table.MAX_SESSIONS", 0)
    assert client.refused(f"/sessions/refused{COMPLETE}", {"prompt": "a"})[0] == 429
    monkeypatch.undo()
    client.ask(f"/sessions/refused{COMPLETE}", {"prompt": "a", "max_tokens": 1})
    assert client.get("/sessions")["sessions"]["refused"] == 1
    assert client.get("/load")["open"] == 0
    client.send("DELETE", "/sessions/refused")


def test_a_port_that_is_taken_is_told(client: Client) -> None:
    from quintet.errors import ConfigError, MachineError
    from quintet.runtime.http_service.address import Address

    port = int(client.url.rpartition(":")[2])
    with pytest.raises(MachineError, match="cannot listen on"):
        ServingServer(object(), Address("127.0.0.1", port))
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ConfigError, match="there is no token"):
            ServingServer(object(), Address(host, 0))
    for token in ("", " ", "a\nb", "é"):
        with pytest.raises(ConfigError, match="--token"):
            ServingServer(object(), Address("127.0.0.1", 0, token))


def test_openais_own_client_understands_all_of_it(slow: Client) -> None:
    openai = pytest.importorskip("openai")
    own = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none")
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "seed": 1, "logprobs": True}
    whole = own.chat.completions.create(**body, extra_body={"return_token_ids": True})
    assert whole.choices[0].logprobs.content[0].logprob < 0
    pieces = own.chat.completions.create(**body, stream=True)
    shown = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert shown == whole.choices[0].message.content
    best = own.chat.completions.create(**body, top_logprobs=3).choices[0].logprobs.content[0].top_logprobs
    assert len(best) == 3
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        own.chat.completions.create(**body, top_logprobs=21)
