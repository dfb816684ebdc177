"""If these fail, agents that speak OpenAI's responses or Anthropic's messages get other answers than chats do."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anthropic
import openai
import pytest
from serving_clients import CONTEXT, Client, hf_engine, served
from test_client_compatibility import DOCS, TEMPLATE

from quintet.policies.model_loading import load_tokenizer
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.body_parts import Part, RequestBody
from quintet.runtime.serving.chat_places import renamed_error
from quintet.runtime.serving.messages_api import schema as messages_schema
from quintet.runtime.serving.messages_api.reply import CHAT_FIELDS as MESSAGES_FIELDS
from quintet.runtime.serving.messages_api.schema import MessagesBody
from quintet.runtime.serving.request_schema import validate
from quintet.runtime.serving.responses_api import schema as responses_schema
from quintet.runtime.serving.responses_api.reply import CHAT_FIELDS as RESPONSES_FIELDS
from quintet.runtime.serving.responses_api.schema import ResponsesBody
from quintet.runtime.serving.tokenization import ChatTokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WAYS = {"type": "object", "properties": {"way": {"enum": ["left", "right"]}}, "required": ["way"]}
SCHEMA = {**WAYS, "additionalProperties": False}
HISTORY = [
    {"role": "system", "content": "Walk."},
    {"role": "user", "content": "_ P"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm. ",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "move", "arguments": '{"way": "left"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
    {"role": "user", "content": "And now?"},
]
SAMPLING = {"temperature": 0.0}
GREEDY = {"extra_body": SAMPLING}
"""Anthropic's library no longer has the parameter."""


def completed(ask: Callable[[], Any]) -> Any:
    """The first answer that is not cut: a random policy may write spaces up to the end of its context."""
    for _ in range(30):
        answer = ask()
        if getattr(answer, "status", None) == "completed" or getattr(answer, "stop_reason", None) == "tool_use":
            return answer
    raise AssertionError("no answer is complete")


@pytest.fixture(scope="module")
def client(policy_directory: Path) -> Iterator[Client]:
    tokenizer = load_tokenizer(policy_directory)
    tokenizer.chat_template = TEMPLATE
    chat_tokenizer = ChatTokenizer(tokenizer, (tokenizer.eos_token_id,))
    engine = hf_engine(policy_directory, max_model_len=512)
    with served(engine, policy_directory, chat_tokenizer=chat_tokenizer) as made:
        yield made


@pytest.fixture
def responses(client: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as library:
        yield library.responses


@pytest.fixture
def messages(client: Client) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=client.url, api_key="none", max_retries=0) as library:
        yield library.messages


RESPONSES_HISTORY = [
    {"role": "user", "content": [{"type": "input_text", "text": "_ P"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm. "}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "move", "arguments": '{"way": "left"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "done"},
    {"role": "user", "content": "And now?"},
]
MESSAGES_HISTORY = [
    {"role": "user", "content": "_ P"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "move", "input": {"way": "left"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "done"}]},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


def test_a_history_has_the_same_tokens_on_all_routes(client: Client, responses: Any, messages: Any) -> None:
    body = {"messages": HISTORY, "max_tokens": 12, "return_token_ids": True, **SAMPLING}
    chat = client.ask(CHAT, body)
    text, count = chat["choices"][0]["message"]["content"], len(chat["prompt_token_ids"])
    response = responses.create(
        model="tiny", instructions="Walk.", input=RESPONSES_HISTORY, max_output_tokens=12, store=False, **SAMPLING
    )
    assert (response.output_text, response.usage.input_tokens) == (text, count)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    message = messages.create(model="tiny", system="Walk.", messages=MESSAGES_HISTORY, max_tokens=12, **GREEDY)
    assert ([block.text for block in message.content], message.usage.input_tokens) == ([text], count)
    assert message.stop_reason == "max_tokens"
    assert messages.count_tokens(model="tiny", system="Walk.", messages=MESSAGES_HISTORY).input_tokens == count


def test_responses_stream_what_they_return(responses: Any) -> None:
    body = {"model": "tiny", "input": "_ P", "max_output_tokens": 20, "top_logprobs": 2, **SAMPLING}
    whole = responses.create(**body)
    events = list(responses.create(**body, stream=True))
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    values = [[each.logprob for each in r.output[0].content[0].logprobs] for r in (whole, final)]
    assert values[0] == values[1]
    assert len(values[0]) == 20


def test_messages_stream_what_they_return(messages: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "_ P"}], "max_tokens": 20, **GREEDY}
    whole = messages.create(**body)
    with messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.usage.input_tokens, final.usage.output_tokens) == (whole.usage.input_tokens, 20)
    assert final.stop_reason == "max_tokens"


def test_calls_are_returned_and_streamed_on_both_routes(responses: Any, messages: Any) -> None:
    tool = {"type": "function", "name": "move", "parameters": SCHEMA, "strict": True}
    body = {"model": "tiny", "input": "_ P", "tools": [tool], "tool_choice": "required"}

    def streamed_response() -> Any:
        events = list(responses.create(**body, stream=True))
        (arguments,) = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert events[-1].response.output[0].arguments == arguments
        return events[-1].response

    for ask in (lambda: responses.create(**body), streamed_response):
        (call,) = completed(ask).output
        assert (call.type, call.name) == ("function_call", "move")
        assert json.loads(call.arguments)["way"] in ("left", "right")

    tools = [{"name": "move", "input_schema": SCHEMA}]
    question = {"model": "tiny", "messages": [{"role": "user", "content": "_ P"}], "max_tokens": 200, "tools": tools}

    def streamed_message() -> Any:
        with messages.stream(**question, tool_choice={"type": "tool", "name": "move"}) as stream:
            return stream.get_final_message()

    for ask in (lambda: messages.create(**question, tool_choice={"type": "any"}), streamed_message):
        (block,) = completed(ask).content
        assert (block.type, block.name) == ("tool_use", "move")
        assert block.input["way"] in ("left", "right")


def test_formats_and_stop_sequences_hold_on_both_routes(responses: Any, messages: Any) -> None:
    output_format = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    answer = completed(lambda: responses.create(model="tiny", input="_ P", text={"format": output_format}))
    assert json.loads(answer.output_text)["way"] in ("left", "right")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "_ P"}], "max_tokens": 20, **GREEDY}
    text = messages.create(**body).content[0].text
    stop = text[len(text) // 2 :][:3]
    cut = messages.create(**body, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in cut.content) == text[: text.index(stop)]


def test_errors_have_the_form_and_the_fields_of_their_route(client: Client, responses: Any, messages: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
        responses.create(model="tiny", input="P" * 2 * CONTEXT * 4)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError, match="send the whole history"):
        responses.create(model="tiny", input="P", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError) as error:
        responses.create(model="tiny", input=[{"role": "user", "content": [{"type": "input_text", "text": 7}]}])
    assert error.value.param == "input.0.content.0.text"
    with pytest.raises(openai.NotFoundError):
        responses.create(model="other", input="P")
    with pytest.raises(anthropic.BadRequestError) as error:
        messages.create(
            model="tiny", max_tokens=2, messages=[{"role": "user", "content": "P"}], extra_body={"top_p": 7}
        )
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert "top_p" in error.value.message
    with pytest.raises(anthropic.NotFoundError):
        messages.create(model="other", max_tokens=2, messages=[{"role": "user", "content": "P"}])


def test_anthropics_key_is_the_token(policy_directory: Path) -> None:
    with served(hf_engine(policy_directory), policy_directory, token="sesame") as guarded:
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "P"}]}
        with anthropic.Anthropic(base_url=guarded.url, api_key="sesame", max_retries=0) as library:
            assert library.messages.create(**body).content
        with (
            anthropic.Anthropic(base_url=guarded.url, api_key="other", max_retries=0) as library,
            pytest.raises(anthropic.AuthenticationError),
        ):
            library.messages.create(**body)


@pytest.mark.parametrize("route", [RESPONSES, MESSAGES])
def test_a_session_records_what_an_agent_asks_on_any_route(client: Client, route: str) -> None:
    question: dict[str, Any] = {"input": "_ P", "max_output_tokens": 4}
    if route == MESSAGES:
        question = {"messages": [{"role": "user", "content": "_ P"}], "max_tokens": 4}
    name = route.rpartition("/")[2]
    client.ask(f"/sessions/{name}{route}", question)
    assert client.get("/sessions")["sessions"][name] == 1


@pytest.mark.parametrize(
    "nested", [{"type": "tool_use", "id": "c2", "name": "move", "input": {}}, {"type": "thinking", "thinking": "Hm."}]
)
def test_a_result_holds_only_texts_and_images(client: Client, nested: dict[str, Any]) -> None:
    for content in ([nested], [{"type": "tool_result", "tool_use_id": "c1", "content": [nested]}]):
        result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
        history = [*MESSAGES_HISTORY[:2], {"role": "user", "content": [result]}]
        status, answer = client.send("POST", MESSAGES, {"messages": history, "max_tokens": 2})
        assert status == 400
        assert "messages.2.content.0.content.0: Input should be an object with type text or image" in answer.decode()


IMAGE = "data:image/png;base64,AAAA"
"""No image: the model reads none, or refuses it."""


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "input.0.call_id"),
        (
            RESPONSES,
            {
                "instructions": "Walk.",
                "input": [
                    {"role": "user", "content": "P"},
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "call_id": "c", "name": "move", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "d", "output": "1"},
                ],
            },
            "input.3.call_id",
        ),
        (
            RESPONSES,
            {"input": "P", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"if": {}}}}},
            "text.format",
        ),
        (RESPONSES, {"input": "P", "tool_choice": "required"}, "tool_choice"),
        (
            MESSAGES,
            {
                "system": "Walk.",
                "messages": [
                    {"role": "user", "content": "P"},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "?"},
                            {"type": "tool_result", "tool_use_id": "x", "content": "1"},
                        ],
                    },
                ],
            },
            "messages.1.content.1.tool_use_id",
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": "P"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_errors_of_the_converted_chat_name_the_fields_of_the_route(
    client: Client, route: str, body: dict[str, Any], param: str
) -> None:
    limits = {"max_tokens": 2} if route == MESSAGES else {}
    status, answer = client.send("POST", route, body | limits)
    error = json.loads(answer)["error"]
    assert (status, error["message"].partition(": ")[0]) == (400, param)
    assert route == MESSAGES or error["param"] == param


def test_places_of_images_are_those_of_the_route() -> None:
    image = {"type": "input_image", "image_url": IMAGE}
    items = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "?"}, image]},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ]
    places = validate(ResponsesBody, {"instructions": "Walk.", "input": items}).chat_places()
    error = RequestError("messages.2.content.1.image_url.url: no image", param="messages.2.content.1.image_url.url")
    assert renamed_error(error, RESPONSES_FIELDS, places).param == "input.1.content.1.image_url"
    error = RequestError("messages.3.content.0.image_url.url: no image", param="messages.3.content.0.image_url.url")
    assert renamed_error(error, RESPONSES_FIELDS, places).message == "input.2.output.0.image_url: no image"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    history = [{"role": "user", "content": [result, {"type": "text", "text": "?"}, block]}]
    places = validate(MessagesBody, {"messages": history, "max_tokens": 1}).chat_places()
    for index, expected in ((0, "messages.0.content.0.content.0.source"), (1, "messages.0.content.2.source")):
        part = 0 if index == 0 else 1
        error = RequestError("x", param=f"messages.{index}.content.{part}.image_url.url")
        assert renamed_error(error, MESSAGES_FIELDS, places).param == expected


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", 400, "invalid_request_error"),
        ("POST", "/sessions/a/v1/messages", 400, "invalid_request_error"),
    ],
)
def test_every_error_of_messages_has_anthropics_form(
    client: Client, method: str, path: str, status: int, kind: str
) -> None:
    actual, answer = client.send(method, path, {"messages": 7})
    body = json.loads(answer)
    assert (actual, body["type"], body["error"]["type"]) == (status, "error", kind)


def test_a_refused_token_has_the_form_of_the_route(policy_directory: Path) -> None:
    with served(hf_engine(policy_directory), policy_directory, token="sesame") as guarded:
        for path, keys in ((MESSAGES, {"type", "message"}), (CHAT, {"message", "type", "param", "code"})):
            status, answer = guarded.send("POST", path, {}, Authorization="Bearer other")
            assert (status, set(json.loads(answer)["error"])) == (401, keys)


def test_errors_of_messages_name_their_own_fields(client: Client) -> None:
    body = {"messages": MESSAGES_HISTORY, "max_tokens": 2, "metadata": {"user_id": "x" * 2000}}
    status, answer = client.send("POST", MESSAGES, body)
    assert (status, json.loads(answer)["error"]["message"][:17]) == (400, "metadata.user_id:")


def test_a_stream_that_fails_midway_ends_with_an_error_in_its_order(policy_directory: Path) -> None:
    engine, steps = hf_engine(policy_directory), itertools.count()
    step = engine.step

    def fail_later() -> Any:
        if next(steps) > 6:
            raise RuntimeError("boom")
        return step()

    engine.step = fail_later
    tokenizer = load_tokenizer(policy_directory)
    tokenizer.chat_template = TEMPLATE
    with served(engine, policy_directory, chat_tokenizer=ChatTokenizer(tokenizer, ())) as failing:
        _, answer = failing.send("POST", RESPONSES, {"input": "_ P", "max_output_tokens": 60, "stream": True})
    events = [json.loads(part.split("data: ")[1]) for part in answer.decode().strip().split("\n\n")]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert len(events) > 2
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "engine_gone")


def test_an_empty_answer_stays_in_the_history() -> None:
    """The server returns no blocks for an answer without text; templates want answers between messages of the user."""
    user = {"role": "user", "content": "_ P"}
    body = validate(MessagesBody, {"messages": [user, {"role": "assistant", "content": []}, user], "max_tokens": 2})
    assert [message.role for message in body.to_chat().messages] == ["user", "assistant", "user"]


def test_all_thoughts_before_an_answer_are_kept() -> None:
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in ("Hm.", "So.")]
    items = [
        RESPONSES_HISTORY[0],
        *thoughts,
        {"role": "assistant", "content": "I look."},
        {"role": "user", "content": "?"},
    ]
    answer = validate(ResponsesBody, {"input": items}).to_chat().messages[1]
    assert (answer.text, answer.model_extra) == ("I look.", {"reasoning_content": "Hm.\nSo."})


@pytest.mark.attack
def test_thoughts_before_an_answer_are_joined_in_linear_time() -> None:
    """By processor time: 16 times as many thoughts took 256 times as long when each was joined with all before."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 900}]}

    def seconds(count: int) -> float:
        body = ResponsesBody.model_validate({"input": [thought] * count + [{"role": "assistant", "content": "a"}]})
        times = []
        for _ in range(3):
            started = time.thread_time()
            body.chat_fields()
            times.append(time.thread_time() - started)
        return min(times)

    assert seconds(4000) < 60 * seconds(250)


def test_a_scored_prompt_is_no_exchange_of_a_session(client: Client) -> None:
    chat = {"prompt": "_ P", "max_tokens": 2, "ignore_eos": True}
    client.ask("/sessions/scored/v1/completions", chat)
    client.ask("/sessions/scored/v1/completions", {"prompt": "_ P", "max_tokens": 0, "echo": True, "logprobs": 0})
    client.ask("/sessions/scored/reward", {"reward": 1.0})
    _, lines = client.send("GET", "/sessions/scored")
    (exchange,) = map(json.loads, lines.decode().splitlines())
    assert (len(exchange["token_ids"]), exchange["reward"]) == (2, 1.0)


@pytest.mark.parametrize(("module", "body"), [(responses_schema, ResponsesBody), (messages_schema, MessagesBody)])
def test_the_documentation_lists_the_fields_of_each_class(module: ModuleType, body: type[RequestBody]) -> None:
    section = DOCS.read_text(encoding="utf-8").split("## Responses and messages")[1].split("\n## ")[0]
    name = module.__name__.split(".")[-2].removesuffix("_api")
    parts = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Part)]
    accepted = {field for part in parts if part.__module__ == module.__name__ for field in part.NO_EFFECT}
    rows = [line for line in section.splitlines() if line.startswith(f"| {name} ")]
    assert accepted <= set(re.findall(r"`(\w+)`", "\n".join(rows)))
    assert set(body.model_fields) - {"messages", "input", "stream", "stream_options", "reasoning"} <= set(
        re.findall(r"`([a-z_]+)", section)
    )
    for row in rows:  # what is listed without an effect has none
        for field in re.findall(r"`(\w+)`", row.split("|")[3]) if row.count("|") == 5 else ():
            assert field in accepted | set(body.model_fields), field
