"""If these fail, a client library that works with OpenAI's server does not work with ours."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from serving_clients import CONTEXT, Client, hf_engine, served
from transformers import AutoModelForCausalLM

from quintet.policies.model_loading import load_tokenizer
from quintet.runtime.serving.body_parts import Message, MessageToolCall, StreamOptions, Tool
from quintet.runtime.serving.request_schema import UNSUPPORTED_FIELDS, ChatBody, CompletionBody, OpenAiBody
from quintet.runtime.serving.tokenization import ChatTokenizer

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "_ P G"}]
PROMPT = [40, 41, 42, 43]
DOCS = Path(__file__).parents[4] / "docs/serving.md"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.reasoning_content }}{{ message.content or '' }}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %};{% endfor %}'
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MOVE = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def client(policy_directory: Path) -> Iterator[Client]:
    with served(hf_engine(policy_directory), policy_directory) as made:
        yield made


@pytest.fixture(scope="module")
def caller(policy_directory: Path) -> Iterator[Client]:
    """A server whose template shows tools and thoughts."""
    tokenizer = load_tokenizer(policy_directory)
    tokenizer.chat_template = TEMPLATE
    chat_tokenizer = ChatTokenizer(tokenizer, (tokenizer.eos_token_id,))
    with served(hf_engine(policy_directory), policy_directory, chat_tokenizer=chat_tokenizer) as made:
        yield made


def prompt_of(client: Client, messages: list[dict[str, Any]], directory: Path, **fields: Any) -> str:
    response = client.ask(CHAT, {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields})
    return str(load_tokenizer(directory).decode(response["prompt_token_ids"]))


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"store": True}, ["store"]),
        ({"service_tier": "flex", "safety_identifier": "me"}, ["safety_identifier", "service_tier"]),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, ["prompt_cache_key", "prompt_cache_retention"]),
        ({"reasoning_effort": "low"}, ["reasoning_effort"]),
        ({"stream_options": {"include_obfuscation": False}}, ["include_obfuscation"]),
        ({"messages": [{**HELLO[0], "cache_control": {"type": "ephemeral"}}]}, ["cache_control"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
            ["cache_control"],
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "a", "annotations": []}]}, ["annotations"]),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "b"}]},
            ["messages.reasoning_content"],
        ),
    ],
)
def test_fields_without_effect_are_accepted_and_counted(
    client: Client, fields: dict[str, Any], ignored: list[str]
) -> None:
    before = client.get("/load")["ignored_fields"]
    assert client.ask(CHAT, {"messages": HELLO, "max_tokens": 1, **fields})["choices"]
    after = client.get("/load")["ignored_fields"]
    assert [name for name in after if after[name] > before.get(name, 0)] == ignored


def test_the_log_names_a_field_without_effect_once(policy_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only warnings are shown: a server has no handler of its own."""
    with served(hf_engine(policy_directory), policy_directory) as server:
        for _ in range(2):
            server.ask(CHAT, {"messages": HELLO, "max_tokens": 1, "store": True})
    assert [record.getMessage() for record in caplog.records] == ["requests set store, which has no effect here"]


def test_thoughts_in_the_history_are_shown_by_a_template_that_has_them(caller: Client, policy_directory: Path) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "I think. "}]
    assert "assistant: I think. a;" in prompt_of(caller, messages, policy_directory)
    assert not caller.get("/load")["ignored_fields"]


@pytest.mark.parametrize(
    "call",
    [
        {"id": "a", "type": "function", "index": 0, "function": {"name": "move", "arguments": "{}"}},
        {"id": "a", "function": {"name": "move", "arguments": ""}},
        {"id": "a", "type": "function", "function": {"name": "move", "arguments": "{}", "parsed_arguments": {}}},
    ],
)
def test_calls_of_the_history_are_read_in_every_form_that_libraries_give_back(
    caller: Client, policy_directory: Path, call: dict[str, Any]
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "a", "name": "move", "content": [{"type": "text", "text": "done"}]}]
    text = prompt_of(caller, messages, policy_directory)
    assert '<tool_call>\n{"name": "move", "arguments": {}}\n</tool_call>;tool: done;' in text


def test_malformed_arguments_of_the_history_are_shown_as_they_are(caller: Client, policy_directory: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "move", "arguments": '{"way": '}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "?"},
    ]
    assert r'"arguments": "{\"way\": "' in prompt_of(caller, messages, policy_directory)


def test_a_message_dumped_by_openais_library_is_accepted(client: Client) -> None:
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none") as library:
        first = library.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
        history = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "_ P G"}]
        assert history[1]["tool_calls"] is None
        second = library.chat.completions.create(
            model="tiny",
            messages=history,
            max_tokens=4,
            seed=-1,
            store=True,
            temperature=0.001,
            top_p=0.0,
            presence_penalty=0.5,
            logit_bias={"40": 5},
            extra_body={"max_completion_tokens": 2},
        )
        assert second.usage.completion_tokens <= 2
        assert library.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            library.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
            library.completions.create(model="tiny", prompt=[40] * CONTEXT)
        assert error.value.code == "context_length_exceeded"


def test_strict_tools_may_be_chosen_automatically(caller: Client) -> None:
    strict = {**MOVE, "function": {**MOVE["function"], "strict": True}}
    body = {"messages": HELLO, "tools": [strict], "max_tokens": 1}
    assert caller.ask(CHAT, body)["choices"]
    assert caller.get("/load")["ignored_fields"]["tools.function.strict"] == 1


def test_a_forced_call_that_is_cut_is_a_call(caller: Client) -> None:
    body = {"messages": HELLO, "tools": [MOVE], "tool_choice": "required", "max_tokens": 60, "temperature": 0}
    while True:
        (choice,) = caller.ask(CHAT, body)["choices"]
        if choice["finish_reason"] == "length" and choice["message"].get("tool_calls"):
            break
        body["max_tokens"] -= 1
        assert body["max_tokens"] > 8
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], call["function"]["name"]) == (None, "move")
    events = caller.stream(CHAT, body)
    (streamed,) = [each for event in events for each in event["choices"][0]["delta"].get("tool_calls", ())]
    assert streamed["function"] == call["function"]


def test_the_error_of_a_part_names_its_own_field(client: Client) -> None:
    part = {"type": "text", "text": 7}
    _, error = client.refused(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert error["param"] == "messages.0.content.0.text"


def expected_logprobs(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probs after each token, [tokens, vocab], of transformers."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echoed_prompts_have_the_logprobs_of_transformers(
    client: Client, policy_directory: Path, max_tokens: int
) -> None:
    prompts = [[40, 41, 42, 43, 44], [50, 51], [40, 41, 60]]
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "return_token_ids": True}
    tokenizer = load_tokenizer(policy_directory)
    for prompt, choice in zip(prompts, client.ask(COMPLETE, body | {"ignore_eos": True})["choices"], strict=True):
        whole = [*prompt, *choice["token_ids"]]
        assert len(whole) == len(prompt) + max_tokens
        assert choice["text"] == tokenizer.decode(prompt) + tokenizer.decode(choice["token_ids"])
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(whole)}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        table = expected_logprobs(policy_directory, whole)
        for place in range(1, len(whole)):
            value = logprobs["token_logprobs"][place]
            assert value == pytest.approx(float(table[place - 1, whole[place]]), abs=1e-4)
            top = logprobs["top_logprobs"][place]
            assert top[logprobs["tokens"][place]] == value
            best = table[place - 1].topk(2).values.tolist()
            assert sorted(top.values())[-2:] == pytest.approx(sorted(best), abs=1e-4)
        assert logprobs["text_offset"][:2] == [0, len(tokenizer.decode(prompt[:1]))]


def test_long_prompts_are_scored_in_several_passes(policy_directory: Path) -> None:
    tokens = [40 + place % 50 for place in range(100)]
    body = {"prompt": [tokens, tokens[:20]], "echo": True, "logprobs": 0, "max_tokens": 0}
    with served(hf_engine(policy_directory, prefill_tokens=32), policy_directory) as made:
        first, second = (choice["logprobs"]["token_logprobs"] for choice in made.ask(COMPLETE, body)["choices"])
    table = expected_logprobs(policy_directory, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert first[1:] == pytest.approx(table.tolist(), abs=1e-4)
    assert second[1:] == pytest.approx(table[:19].tolist(), abs=1e-4)


def test_echo_without_logprobs_returns_the_text_also_in_a_stream(client: Client) -> None:
    body = {"prompt": "a b", "echo": True, "max_tokens": 3, "seed": 1}
    whole = client.ask(COMPLETE, body)["choices"][0]["text"]
    assert whole.startswith("a b")
    assert "".join(event["choices"][0]["text"] for event in client.stream(COMPLETE, body)) == whole


@pytest.mark.parametrize("logprobs", [None, 0])
def test_echo_without_tokens_returns_the_prompt_alone(client: Client, logprobs: int | None) -> None:
    body = {"prompt": "a b", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = client.ask(COMPLETE, body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("a b", "length", 0)
    assert (choice["logprobs"] is None) == (logprobs is None)
    if logprobs is None:
        assert "".join(event["choices"][0]["text"] for event in client.stream(COMPLETE, body)) == "a b"


def test_errors_about_several_fields_name_one(client: Client) -> None:
    _, error = client.refused(CHAT, {"messages": HELLO, "max_tokens": 0})
    assert (error["param"], error["message"]) == ("max_tokens", "max_tokens: 0 tokens only with echo")
    _, error = client.refused(CHAT, {"messages": HELLO, "logit_bias": {"40": 1, "040": 1}})
    assert error["param"] == "logit_bias.040"


def test_a_bias_forces_or_forbids_a_token(client: Client) -> None:
    body = {"prompt_token_ids": PROMPT, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    plain = client.ask(GENERATE, body)
    assert set(client.ask(GENERATE, body | {"logit_bias": {"77": 100}})["token_ids"]) == {77}
    first = plain["token_ids"][0]
    assert first not in client.ask(GENERATE, body | {"logit_bias": {str(first): -100}})["token_ids"]


def test_penalties_are_subtracted_from_the_logits_of_tokens_of_the_completion(
    client: Client, policy_directory: Path
) -> None:
    """By hand: greedy tokens of transformers' logits minus the penalties."""
    for frequency, presence in ((2.0, 0.0), (0.0, 2.0), (0.7, -1.0)):
        tokens: list[int] = []
        for _ in range(12):
            row = expected_logprobs(policy_directory, [*PROMPT, *tokens])[-1]
            for token in set(tokens):
                row[token] -= frequency * tokens.count(token) + presence
            tokens.append(int(row.argmax()))
        body = {"prompt_token_ids": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        penalties = {"frequency_penalty": frequency, "presence_penalty": presence}
        assert client.ask(GENERATE, body | penalties)["token_ids"] == tokens
        # the log-probs are those without penalties
        assert client.ask(GENERATE, body | penalties)["logprobs"][-1] == pytest.approx(
            float(expected_logprobs(policy_directory, [*PROMPT, *tokens])[-2, tokens[-1]]), abs=1e-4
        )


def test_top_p_0_and_low_temperatures_are_greedy(client: Client) -> None:
    body = {"prompt_token_ids": PROMPT, "max_tokens": 8, "ignore_eos": True, "seed": 3}
    greedy = client.ask(GENERATE, body | {"temperature": 0})["token_ids"]
    assert client.ask(GENERATE, body)["token_ids"] != greedy
    for fields in ({"top_p": 0.0}, {"temperature": 1e-4}, {"temperature": 1e-7}):
        assert client.ask(GENERATE, body | fields)["token_ids"] == greedy


def test_text_and_tokens_are_converted_as_in_vllm(client: Client, policy_directory: Path) -> None:
    tokenizer = load_tokenizer(policy_directory)
    response = client.ask("/tokenize", {"model": "tiny", "prompt": "_ P G", "return_token_strs": True})
    assert response == {
        "count": len(response["tokens"]),
        "max_model_len": CONTEXT,
        "tokens": tokenizer.encode("_ P G"),
        "token_strs": [tokenizer.decode([token]) for token in response["tokens"]],
    }
    assert client.ask("/detokenize", {"tokens": response["tokens"]}) == {"prompt": "_ P G"}
    chat = client.ask("/tokenize", {"messages": HELLO})["tokens"]
    assert chat == client.ask(CHAT, {"messages": HELLO, "max_tokens": 1, "return_token_ids": True})["prompt_token_ids"]
    assert client.refused("/detokenize", {"tokens": [10**6]})[1]["param"] == "tokens"
    assert client.refused("/tokenize", {})[0] == 400


def test_head_and_options_answer_without_a_body(client: Client) -> None:
    connection = client.connect()
    for method, path, status in (("HEAD", "/v1/models", 200), ("HEAD", "/health", 200), ("OPTIONS", CHAT, 204)):
        connection.request(method, path)
        response = connection.getresponse()
        assert (response.status, response.read()) == (status, b"")
        assert response.headers["Date"]
    assert response.headers["Allow"] == "POST, OPTIONS"
    connection.request("HEAD", CHAT)
    assert connection.getresponse().status == 405


def chunked(client: Client, parts: list[bytes]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(client.url.removeprefix("http://"), timeout=20)
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    connection.request("POST", COMPLETE, iter(parts), headers, encode_chunked=True)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_bodies_may_be_sent_in_chunks_within_the_limits(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    status, response = chunked(client, [body[:7], body[7:]])
    assert (status, response["object"]) == (200, "text_completion")
    monkeypatch.setattr("quintet.runtime.http_service.limits.BODY_SECONDS", 5.0)
    status, response = chunked(client, [b'{"prompt": "', *[b"a" * (1 << 20)] * 17, b'"}'])
    assert (status, response["error"]["code"]) == (413, "too_large")


def test_a_stream_begins_with_its_first_token(policy_directory: Path) -> None:
    """The first event may not come before the engine has sampled."""
    engine = hf_engine(policy_directory)
    with served(engine, policy_directory) as made:
        steps: list[int] = []
        step = engine.step
        engine.step = lambda: (steps.append(1), step())[1]
        body = {"messages": HELLO, "max_tokens": 3, "stream": True, "ignore_eos": True}
        connection = made.connect()
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        first = connection.getresponse().readline()
        assert steps
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"


def test_every_event_has_the_token_counts_so_far_on_request(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "max_tokens": 5, "ignore_eos": True, "stream_options": options, "seed": 1}
    counts = [event["usage"]["completion_tokens"] for event in client.stream(CHAT, body)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5)


def test_the_documentation_lists_the_fields_of_each_class() -> None:
    tables = DOCS.read_text(encoding="utf-8")
    ignored = tables.split("## Fields without an effect")[1].split("\n## ")[0]
    parts = (OpenAiBody, StreamOptions, Message, MessageToolCall, Tool)
    accepted = {name for part in parts for name in part.NO_EFFECT}
    assert accepted <= set(re.findall(r"`([\w.]+)`", ignored))
    refused = set(re.findall(r"`(\w+)`", tables.split("## Refused fields")[1].split("\n## ")[0]))
    assert set(UNSUPPORTED_FIELDS) <= refused
    described = set(re.findall(r"`([\w.]+)`", tables))
    names = {*ChatBody.model_fields, *CompletionBody.model_fields} - {"messages", "prompt"}
    assert names <= described, names - described


def test_the_documentation_lists_the_clients_that_were_tried() -> None:
    results = json.loads((DOCS.parents[1] / "benchmarks/results/clients.json").read_text(encoding="utf-8"))
    section = DOCS.read_text(encoding="utf-8").split("## Clients that were tried")[1].split("\n## ")[0]
    for client in results["clients"].values():
        assert not any(client["features"].values()), "the text says that all features work"
        assert f"| {', '.join(client['features'])} |" in section
        assert all(f" {version} |" in section for version in client["versions"].values())
