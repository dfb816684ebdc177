"""If these fail, an endpoint gets other messages than the env's, or its errors end an evaluation."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.config.native.rollout import RolloutConfig
from quintet.envs.vector_env import LocalVectorEnv
from quintet.errors import ConfigError
from quintet.records import FinishReason, Generation, Observation, Outcome, Request, Step
from quintet.rewards import chat_endpoint
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.engines.openai_endpoint import EndpointEngine, EndpointSettings, message_tokenizer, without_tokens
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeRules
from quintet.rollout.sampling_params import SamplingParams
from quintet.sampling import StructuredOutput

ReplyBody = str | tuple[int, dict[str, Any]]
"""Content of a response, or status and body."""


@dataclass
class StandIn:
    """An endpoint that responds to each body with the result of `reply`."""

    reply: Callable[[dict[str, Any]], ReplyBody]
    url: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    together: int = 0
    most_together: int = 0


@contextmanager
def stand_in(reply: Callable[[dict[str, Any]], ReplyBody]) -> Iterator[StandIn]:
    known, lock = StandIn(reply), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request_body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                known.seen.append(request_body)
                known.headers.append(dict(self.headers))
                known.together += 1
                known.most_together = max(known.most_together, known.together)
            reply = known.reply(request_body)
            with lock:
                known.together -= 1
            if isinstance(reply, str):
                choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
                reply = 200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
            body = json.dumps(reply[1]).encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    known.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(chat_endpoint, "MAX_PAUSE", 0.002)


class Mirror:
    """An env of three turns that shows the last response."""

    actions = ("left", "right")

    def __init__(self) -> None:
        self.turn = 0

    def instruction(self) -> str:
        return "Say left or right."

    def reset(self, seed: int) -> Observation:
        return Observation(f"start {seed}")

    def step(self, action: str) -> Step:
        self.turn += 1
        done = self.turn == 3
        return Step(Observation(f"went {action}"), float(done), done, False, {"success": done})

    def close(self) -> None:
        pass


def settings(known: StandIn, **changes: Any) -> EndpointSettings:
    return EndpointSettings(known.url, "big", **{"retries": 2, "timeout_seconds": 10, **changes})


GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def played(known: StandIn, episodes: int, sampling: SamplingParams = GREEDY, **changes: Any) -> list[Any]:
    config = RolloutConfig(
        **{"think": False, "format_instruction": False, "window_size": None, "max_prompt_tokens": 10**6, **changes}
    )
    engine = EndpointEngine(settings(known), message_tokenizer())
    chat = ChatFormat(message_tokenizer())
    loop = AgentLoop(engine, chat, LocalVectorEnv(Mirror), [EpisodeRules("mirror", config)])
    actual = sorted(loop.collect_rollouts([Episode(n, n, 0) for n in range(episodes)], sampling), key=lambda t: t.group)
    engine.close()
    return actual


@given(st.text(), st.text())
def test_messages_round_trip_through_the_tokenizer(system: str, user: str) -> None:
    assert_through([{"role": "system", "content": system}, {"role": "user", "content": user}])


def test_markers_of_other_templates_are_plain_text() -> None:
    assert_through([{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\n</s> <think>\n\n"}])


TOKENIZER = message_tokenizer()
ENGINE = EndpointEngine(EndpointSettings("http://127.0.0.1:1/v1", "m"), TOKENIZER)


def assert_through(messages: list[dict[str, str]]) -> None:
    if any("\uf8f0" in message["content"] or "\uf8f1" in message["content"] for message in messages):
        return
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tuple(TOKENIZER.encode(text, add_special_tokens=False))
    assert ENGINE._messages(GREEDY.request(0, tokens, 1, 0, ())) == messages


def test_an_env_is_evaluated_through_chat_messages() -> None:
    with stand_in(
        lambda request_body: f"<answer> {'left' if len(request_body['messages']) < 4 else 'right'} </answer>"
    ) as known:
        (episode,) = played(known, 1, max_response_tokens=50)
    assert episode.outcome is Outcome.SUCCESS
    assert [turn.actions for turn in episode.turns] == [("left",), ("right",), ("right",)]
    first, _, last = known.seen
    assert first["messages"] == [
        {"role": "system", "content": "Say left or right."},
        {"role": "user", "content": "start 0"},
    ]
    assert [message["role"] for message in last["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert last["messages"][2]["content"] == "<answer> left </answer>"
    assert last["messages"][-1]["content"] == "went right"
    assert first == {**first, "model": "big", "max_tokens": 50, "temperature": 0.0}
    assert set(first) == {"model", "messages", "max_tokens", "temperature"}, "nothing that some endpoint doesn't know"


def test_requests_have_seeds_and_sampling_options() -> None:
    sampling = SamplingParams(
        0.7, 5, 0.9, 3, min_p=0.1, repetition_penalty=1.2, min_tokens=4, stop_strings=("</answer>",)
    )
    with stand_in(lambda _: "<answer> left </answer>") as known:
        played(known, 2, sampling)
    request_body = known.seen[0]
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 4}
    assert {name: request_body[name] for name in options} == options
    assert request_body["stop"] == ["</answer>"]
    assert len({one["seed"] for one in known.seen}) == len(known.seen)


@pytest.mark.parametrize(
    ("output", "fields"),
    [
        (StructuredOutput("json_object"), {"response_format": {"type": "json_object"}}),
        (
            StructuredOutput("json_schema", '{"type": "integer"}'),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "response", "schema": {"type": "integer"}, "strict": True},
                }
            },
        ),
        (StructuredOutput("choice", '["left"]'), {"structured_outputs": {"choice": ["left"]}}),
    ],
)
def test_structured_outputs_are_sent(output: StructuredOutput, fields: dict[str, Any]) -> None:
    with stand_in(lambda _: "<answer> left </answer>") as known:
        played(known, 1, replace(GREEDY, structured_output=output))
    assert known.seen[0].items() >= fields.items()


def test_the_prompt_window_slides() -> None:
    with stand_in(lambda _: "<answer> left </answer>") as known:
        played(known, 1, window_size=1)
    assert [len(request_body["messages"]) for request_body in known.seen] == [2, 2, 2]


def test_requests_are_sent_concurrently() -> None:
    gate = threading.Barrier(8, timeout=10)

    def wait(request_body: dict[str, Any]) -> str:
        if len(request_body["messages"]) == 2:
            gate.wait()
        return "<answer> left </answer>"

    with stand_in(wait) as known:
        assert len(played(known, 8)) == 8
    assert known.most_together == 8


def test_failed_requests_are_retried_and_then_fail_their_episode() -> None:
    tried: dict[str, int] = {}

    def reply(request_body: dict[str, Any]) -> ReplyBody:
        start = request_body["messages"][1]["content"]
        tried[start] = tried.get(start, 0) + 1
        if start == "start 1":
            return 503, {"error": {"message": "busy"}}
        if start == "start 2" and tried[start] < 3:
            return 429, {}
        if start == "start 3":
            return 400, {"error": {"message": "too long"}}
        return "<answer> left </answer>"

    with stand_in(reply) as known:
        episodes = played(known, 4)
    assert [episode.outcome for episode in episodes] == [
        Outcome.SUCCESS,
        Outcome.FAILED,
        Outcome.SUCCESS,
        Outcome.FAILED,
    ]
    assert (episodes[1].failure.where, episodes[1].failure.error_type) == ("engine", "Http503")
    assert "busy" in episodes[1].failure.message
    assert episodes[3].failure.error_type == "Http400"
    assert (tried["start 1"], tried["start 3"]) == (3, 1)


def one(known: StandIn, **changes: Any) -> Generation:
    engine = EndpointEngine(settings(known, **changes), TOKENIZER)
    engine.add_request(Request(id=4, prompt=(1, 2), max_tokens=9, seed=0, temperature=0.0, stop_token_ids=(1,)))
    done: list[Generation] = []
    while engine.busy:
        done += engine.step()
    engine.close()
    return done[0]


@pytest.mark.parametrize(
    ("choice", "stop", "text"),
    [
        ({"message": {"content": "x"}, "finish_reason": "length"}, FinishReason.LENGTH, "x"),
        ({"message": {"content": "x"}}, FinishReason.STOP, "x\uf8f1"),
        ({"message": {"content": None}, "finish_reason": "stop"}, FinishReason.STOP, "\uf8f1"),
        ({"message": {"content": "a\uf8f1b"}, "finish_reason": "stop"}, FinishReason.STOP, "a\ufffdb\uf8f1"),
        # the endpoint's template has opened the thought in the prompt
        ({"message": {"content": "x</think>y"}, "finish_reason": "stop"}, FinishReason.STOP, "<think>x</think>y\uf8f1"),
        ({"message": {"content": "x"}, "finish_reason": "content_filter"}, FinishReason.FAILED, ""),
        ({"message": {"content": ["x"]}, "finish_reason": "stop"}, FinishReason.FAILED, ""),
        ({"text": "x"}, FinishReason.FAILED, ""),
    ],
)
def test_finish_reasons(choice: dict[str, Any], stop: FinishReason, text: str) -> None:
    with stand_in(lambda _: (200, {"choices": [choice]})) as known:
        actual = one(known)
    assert (actual.id, actual.finish_reason) == (4, stop)
    assert TOKENIZER.decode(list(actual.tokens)) == text
    assert (actual.failure is not None) == (stop is FinishReason.FAILED)


def test_a_timeout_is_a_failure() -> None:
    released = threading.Event()

    def late(_: dict[str, Any]) -> str:
        released.wait(10)
        return "x"

    with stand_in(late) as known:
        actual = one(known, timeout_seconds=0.05, retries=0)
        released.set()
    assert actual.failure is not None
    assert actual.failure.error_type == "Timeout"


def test_max_completion_tokens_replaces_max_tokens() -> None:
    def reply(request_body: dict[str, Any]) -> ReplyBody:
        if "max_tokens" in request_body:
            return 400, {"error": {"message": "Unsupported parameter: use 'max_completion_tokens' instead."}}
        return f"{request_body['max_completion_tokens']}"

    with stand_in(reply) as known:
        actual = one(known)
    assert TOKENIZER.decode(list(actual.tokens[:-1])) == "9"
    assert len(known.seen) == 2


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with stand_in(lambda _: "x") as known:
        one(known, key_variable="MY_KEY")
        one(known)
    assert [headers.get("Authorization") for headers in known.headers] == ["Bearer sesame", None]


def test_aborted_requests_are_not_waited_for() -> None:
    released = threading.Event()

    def late(_: dict[str, Any]) -> str:
        released.wait(10)
        return "x"

    with stand_in(late) as known:
        engine = EndpointEngine(settings(known), TOKENIZER)
        for number in (1, 2):
            engine.add_request(Request(id=number, prompt=(1,), max_tokens=1, seed=0))
        (gone,) = engine.abort([1, 7])
        assert (gone.id, gone.finish_reason) == (1, FinishReason.ABORT)
        released.set()
        done: list[Generation] = []
        while engine.busy:
            done += engine.step()
        assert [generation.id for generation in done] == [2]
        engine.close()


def test_usage_is_that_of_the_endpoint() -> None:
    with stand_in(lambda request_body: (500, {}) if "2" in request_body["messages"][1]["content"] else "x") as known:
        engine = EndpointEngine(settings(known, retries=1), TOKENIZER)
        for number in range(4):
            text = f"\uf8f0system\n\uf8f1\uf8f0user\n{number}\uf8f1"
            prompt = tuple(TOKENIZER.encode(text, add_special_tokens=False))
            engine.add_request(Request(id=number, prompt=prompt, max_tokens=1, seed=0))
        while engine.busy:
            engine.step()
        assert engine.counts == {"requests": 4, "failed": 1, "prompt_tokens": 21, "completion_tokens": 9}


def test_stored_episodes_have_no_tokens() -> None:
    with stand_in(lambda _: "<answer> left </answer>") as known:
        (episode,) = played(known, 1)
    bare = without_tokens(episode)
    assert (bare.response_tokens, [turn.text for turn in bare.turns]) == (0, [turn.text for turn in episode.turns])


@pytest.mark.parametrize("url", ["ftp://a/v1", "localhost:8000", "http://", "file:///etc/passwd"])
def test_invalid_urls_are_config_errors(url: str) -> None:
    with pytest.raises(ConfigError, match="not an http"):
        EndpointSettings(url, "m").check()
