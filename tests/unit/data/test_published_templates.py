"""If these fail, fine-tuning with a published chat template trains other tokens than the replies, or forgets some."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_templates import NAMES, published

from quintet.data.conversations import Conversation, ConversationFormat
from quintet.errors import ConfigError

WEATHER = {"city": "Paris", "days": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Forecast.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def calls(*arguments: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"functions.weather:{i}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for i, each in enumerate(arguments)
    ]


def result(text: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": "functions.weather:0", "content": text}


def spans(name: str, messages: Sequence[dict[str, Any]], **variables: Any) -> list[list[tuple[str, bool]]]:
    """The texts of each sequence, and whether they are trained."""
    tokenizer = published(name)
    sequences = ConversationFormat(tokenizer).encode(Conversation(tuple(messages), variables=variables), "row 7")
    return [
        [
            (tokenizer.decode([token for token, _ in group]), is_trained)
            for is_trained, group in itertools.groupby(
                zip(each.tokens, each.loss_mask, strict=True), key=lambda pair: pair[1]
            )
        ]
        for each in sequences
    ]


def trained(name: str, messages: Sequence[dict[str, Any]], **variables: Any) -> list[str]:
    return [text for each in spans(name, messages, **variables) for text, is_trained in each if is_trained]


PLAIN = [{"role": "system", "content": "Be short."}, user("Up?"), reply("Up."), user("And now?"), reply("Down.")]
INLINE = [user("Up?"), reply("<think>\nWhy not.\n</think>\n\nUp."), user("Now?"), reply("<think>Hm.</think>Down.")]
REASONING = [
    user("Up?"),
    reply("Up.", reasoning_content="Why not."),
    user("Now?"),
    reply("Down.", reasoning_content="Hm."),
]
LOOP = [user("Paris?"), reply(None, tool_calls=calls(WEATHER)), result("sunny"), reply("It is sunny.")]
THOUGHTS = {
    "deepseek_r1": "inline",
    "deepseek_v3_1": "with enable_thinking",
    "gpt_oss": "key",
    "kimi_k2": "none",
    "glm4": "both",
    "qwen3": "both",
    "qwen3_5": "both",
    "qwq": "inline",
    "granite": "text",
    "llama3_1": "text",
    "mistral_small": "text",
    "phi3_5": "text",
    "phi4_mini": "text",
    "smollm3": "text",
}
"""How a template has thoughts: in the content, under a key, or as text like any other."""
CALLS = {name: name not in {"phi3_5", "smollm3"} for name in NAMES}
TOOLS = {name: name != "phi3_5" and not name.startswith("deepseek") for name in NAMES}


def test_each_template_is_tested() -> None:
    assert set(THOUGHTS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_sequences_of_plain_replies_are_what_transformers_renders(name: str) -> None:
    tokenizer = published(name)
    rendered = [tokenizer.apply_chat_template(PLAIN[:n], tokenize=False) for n in (3, 5)]
    sequences = ["".join(text for text, _ in each) for each in spans(name, PLAIN)]
    # GLM has no end token: that of the tokenizer ends the last reply
    texts = [sequence.removesuffix(tokenizer.eos_token) for sequence in sequences]
    assert [any(text.startswith(each) for text in rendered) for each in texts] == [True] * len(texts)
    assert rendered[-1].startswith(texts[-1])
    assert [text.count("Up.") + text.count("Down.") for text in trained(name, PLAIN)] == [1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_no_token_of_a_sequence_depends_on_where_it_is_masked(name: str) -> None:
    """Except where a word spans the end of a prompt, the tokens are those of the whole text."""
    tokenizer = published(name)
    for messages in (PLAIN, INLINE) if THOUGHTS[name] not in {"none", "with enable_thinking"} else (PLAIN,):
        for each in ConversationFormat(tokenizer).encode(Conversation(tuple(messages))):
            text = tokenizer.decode(each.tokens)
            if "<think>\n\n</think>" not in text:
                assert list(each.tokens) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_in_the_content_are_trained_or_refused(name: str) -> None:
    if THOUGHTS[name] in {"none", "with enable_thinking"}:
        with pytest.raises(ConfigError, match=r"row 7: message 1: .*thought.*`content`"):
            trained(name, INLINE)
        return
    first, last = trained(name, INLINE)
    assert all(part in first for part in ("Why not.", "</think>", "Up."))
    assert all(part in last for part in ("Hm.", "</think>", "Down."))
    assert "<think>\n\n</think>" not in first + last


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", NAMES)
def test_thoughts_under_a_key_are_trained_or_refused(name: str, key: str) -> None:
    messages = [{key if k == "reasoning_content" else k: v for k, v in message.items()} for message in REASONING]
    if THOUGHTS[name] not in {"both", "key"}:
        with pytest.raises(
            ConfigError, match=rf"row 7: message 1: its `{'reasoning_content' if name == 'kimi_k2' else key}`"
        ):
            trained(name, messages)
        return
    first, last = trained(name, messages)
    assert "Why not." in first
    assert "Up." in first
    assert "Hm." in last
    assert "Why not." not in last


@pytest.mark.parametrize("text", [False, True], ids=["mapping", "JSON text"])
@pytest.mark.parametrize("name", NAMES)
def test_calls_are_trained_or_refused(name: str, text: bool) -> None:
    arguments = json.dumps(WEATHER) if text else WEATHER
    messages = [user("Paris?"), reply(None, tool_calls=calls(arguments)), *LOOP[2:]]
    if not CALLS[name]:
        with pytest.raises(ConfigError, match=r"row 7: message 1: its `tool_calls\[0\]"):
            trained(name, messages)
        return
    first, last = trained(name, messages)
    assert "weather" in first
    assert "Paris" in first
    assert "\\" not in first, "encoded twice"
    assert "'city'" not in first, "a Python mapping"
    assert "It is sunny." in last
    assert "sunny" not in first


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_shown_or_refused(name: str) -> None:
    messages = LOOP if CALLS[name] else PLAIN
    if TOOLS[name]:
        assert "weather" in spans(name, messages, tools=[TOOL])[0][0][0]
        return
    with pytest.raises(ConfigError, match="row 7: the chat template does not show tools"):
        trained(name, messages, tools=[TOOL])


@pytest.mark.parametrize("name", ["qwen3_5", "glm4"])
def test_a_thought_before_a_call_stays_while_the_template_shows_it(name: str) -> None:
    messages = [user("Paris?"), reply("", reasoning_content="Look it up.", tool_calls=calls(WEATHER)), *LOOP[2:]]
    (sequence,) = spans(name, [*messages[:-1], reply("It is sunny.", reasoning_content="Seen.")])
    first, last = [text for text, is_trained in sequence if is_trained]
    assert "Look it up." in first
    assert "Seen." in last
    more = spans(name, [*messages, user("Thanks."), reply("Welcome.")])
    assert len(more) == 2
    assert "Look it up." not in "".join(text for text, _ in more[1])


def test_thoughts_that_the_template_drops_behind_a_later_answer_stay_as_the_policy_saw_them() -> None:
    """gpt-oss leaves out the analysis before a call as soon as the final answer is there."""
    first = reply("", thinking="Look it up.", tool_calls=calls(WEATHER))
    ((*_, (call, _), (between, _), (answer, _)),) = spans(
        "gpt_oss", [LOOP[0], first, LOOP[2], reply("Sunny.", thinking="Seen.")]
    )
    assert call.startswith("<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=functions.weather")
    assert call.endswith('{"city": "Paris", "days": 3}<|call|>')
    assert (
        between
        == '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|><|start|>assistant'
    )
    assert (
        answer
        == "<|channel|>analysis<|message|>Seen.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
    )


EXACT = [
    ("qwen3", {}, "<|im_start|>assistant\n", "<think>\n\n</think>\n\nUp.<|im_end|>"),
    ("qwen3", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Up.<|im_end|>"),
    ("qwen3_5", {}, "<|im_start|>assistant\n<think>\n", "\n</think>\n\nUp.<|im_end|>"),
    ("qwen3_5", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Up.<|im_end|>"),
    ("glm4", {}, "Up?<|assistant|>", "\n<think></think>Up.<|endoftext|>"),
    ("glm4", {"enable_thinking": False}, "Up?/nothink<|assistant|>\n<think></think>", "Up.<|endoftext|>"),
    ("deepseek_r1", {}, "<｜User｜>Up?<｜Assistant｜>", "Up.<｜end▁of▁sentence｜>"),
    ("deepseek_v3_1", {}, "<｜Assistant｜></think>", "Up.<｜end▁of▁sentence｜>"),
    ("gpt_oss", {}, "<|start|>assistant", "<|channel|>final<|message|>Up.<|return|>"),
    ("kimi_k2", {}, "<|im_assistant|>assistant<|im_middle|>", "<think></think>Up.<|im_end|>"),
    ("mistral_small", {}, "[INST]Up?[/INST]", "Up.<|endoftext|>"),
    ("granite", {}, "<|start_of_role|>assistant<|end_of_role|>", "Up.<|end_of_text|>"),
    ("smollm3", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n", "Up.<|im_end|>"),
    ("llama3_1", {}, "<|start_header_id|>assistant<|end_header_id|>\n\n", "Up.<|eot_id|>"),
    ("phi4_mini", {}, "<|user|>Up?<|end|><|assistant|>", "Up.<|end|>"),
    ("phi3_5", {}, "<|user|>\nUp?<|end|>\n<|assistant|>\n", "Up.<|end|>"),
]


@pytest.mark.parametrize(("name", "variables", "prompt", "text"), EXACT)
def test_a_reply_is_trained_from_the_end_of_its_prompt_on(
    name: str, variables: dict[str, Any], prompt: str, text: str
) -> None:
    (((before, _), (after, _)),) = spans(name, PLAIN[1:3], **variables)
    assert before.endswith(prompt)
    assert after == text


def test_a_thought_under_a_prompt_without_thoughts_begins_where_the_prompts_differ() -> None:
    (((before, _), (after, _)),) = spans("qwen3", INLINE[:2], enable_thinking=False)
    assert before.endswith("<|im_start|>assistant\n<think>\n")
    assert after == "Why not.\n</think>\n\nUp.<|im_end|>"


def test_deepseek_v3_1_trains_thoughts_after_a_prompt_that_opens_one() -> None:
    (((before, _), (after, _)),) = spans("deepseek_v3_1", INLINE[:2], enable_thinking=True)
    assert before.endswith("<｜Assistant｜><think>")
    assert after == "\nWhy not.\n</think>\n\nUp.<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("thinking", [True, False])
def test_deepseek_v3_1_refuses_thoughts_before_calls_which_its_template_writes_behind_an_ended_one(
    thinking: bool,
) -> None:
    messages = [user("Paris?"), reply("<think>Look.</think>", tool_calls=calls(WEATHER))]
    with pytest.raises(ConfigError, match="row 7: message 1: the chat template writes an empty thought"):
        trained("deepseek_v3_1", messages, enable_thinking=thinking)


def test_a_thought_before_a_call_follows_a_prompt_that_opens_one() -> None:
    messages = [user("Paris?"), reply("<think>Look.</think>", tool_calls=calls(WEATHER))]
    assert trained("qwq", messages)[0].startswith("Look.</think><tool_call>\n{")
    for name in ("granite", "mistral_small", "llama3_1"):
        with pytest.raises(ConfigError, match="message 1: the chat template leaves out the thought"):
            trained(name, messages)


def test_the_token_of_the_next_role_ends_replies_of_a_template_without_end_token() -> None:
    texts = trained("glm4", [*LOOP, user("More?"), reply("No.")])
    assert [text[text.rfind("<|") :] for text in texts] == ["<|observation|>", "<|user|>", "<|endoftext|>"]


def test_a_reply_with_calls_ends_once_as_other_replies_do() -> None:
    """Phi-4-mini's last reply has a second end token; DeepSeek-R1 ends calls and a content that is not null."""
    (sequence,) = spans("phi4_mini", LOOP)
    assert sequence[1][0].endswith('"days": 3}}<|/tool_call|><|end|>')
    assert sequence[2][0] == '<|tool_response|>"sunny"<|end|><|assistant|>'
    for content in (None, ""):
        (sequence,) = spans("deepseek_r1", [LOOP[0], reply(content, tool_calls=calls(WEATHER)), *LOOP[2:]])
        assert sequence[1][0].endswith("<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>")
        assert sequence[1][0].count("<｜end▁of▁sentence｜>") == 1
    for content in ("I look.", "<think>Look.</think>\n"):
        with pytest.raises(ConfigError, match=r"row 7: message 1: .* between its `tool_calls` and its `content`"):
            trained("deepseek_r1", [LOOP[0], reply(content, tool_calls=calls(WEATHER))])


def test_what_a_template_leaves_out_is_refused() -> None:
    two = [user("Paris?"), reply(None, tool_calls=calls(WEATHER, {"city": "Rome"}))]
    with pytest.raises(ConfigError, match=r"message 1: its `tool_calls\[1\]\.function\.name`"):
        trained("gpt_oss", two)
    with pytest.raises(ConfigError, match="message 1: its `content`"):
        trained("mistral_small", [user("Paris?"), reply("I look.", tool_calls=calls(WEATHER))])
    unnamed = [{**call, "id": "call_12345"} for call in calls(WEATHER)]
    with pytest.raises(ConfigError, match=r"message 1: its `tool_calls\[0\]\.function\.name`"):
        trained("kimi_k2", [user("Paris?"), reply(None, tool_calls=unnamed)])
    with pytest.raises(ConfigError, match="message 1: its `content`"):
        trained("phi3_5", [user("Paris?"), {"role": "tool", "content": "sunny"}, reply("Sunny.")])
    for template in ("qwen2_5", "chatml", "llama3"):
        with pytest.raises(ConfigError, match=r"message 1: its `tool_calls\[0\]"):
            ConversationFormat(published("qwen3"), template).encode(Conversation(tuple(LOOP)), "row 7")


def test_kimis_thoughts_before_calls_are_trained() -> None:
    first = reply("", reasoning_content="Look it up.", tool_calls=calls(WEATHER))
    ((*_, (call, _), _, (answer, _)),) = spans("kimi_k2", [LOOP[0], first, *LOOP[2:]])
    assert call.startswith("<think>Look it up.</think><|tool_calls_section_begin|>")
    assert answer == "<think></think>It is sunny.<|im_end|>"


FILLER = st.text(st.sampled_from("ab \n<>{}'\"[]|é🙂/"), max_size=6)
PREFIXED = ("qwen3", "qwen3_5", "granite", "llama3_1", "mistral_small", "phi3_5", "glm4")
"""Templates whose sequences are the output of the template for the dialogue up to a reply."""


@st.composite
def dialogues(draw: st.DrawFn, name: str) -> list[dict[str, Any]]:
    """Dialogues whose texts all have a number of their own."""
    numbers = itertools.count(100)

    def text() -> str:
        return f"{draw(FILLER)}t{next(numbers)}{draw(FILLER)}"

    messages = [{"role": "system", "content": text()}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(text()))
        thought = {"reasoning_content": text()} if THOUGHTS[name] == "both" and draw(st.booleans()) else {}
        if CALLS[name] and draw(st.booleans()):
            arguments = {"city": text(), "n": draw(st.sampled_from([1, 2.5, True, None, [1, "x"], {"y": None}]))}
            messages += [reply(None, tool_calls=calls(arguments), **thought), result(text())]
        messages.append(reply(text(), **thought))
    return messages


@pytest.mark.parametrize("name", PREFIXED)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_sequences_of_any_dialogue_are_the_templates_output_and_replies_are_trained(
    name: str, data: st.DataObject
) -> None:
    messages, tokenizer = data.draw(dialogues(name)), published(name)
    ends = [index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"]
    rendered = [str(tokenizer.apply_chat_template(messages[:end], tokenize=False)) for end in ends]
    texts, contexts, sequences = [], [], spans(name, messages)
    for each in sequences:
        whole = "".join(text for text, _ in each).removesuffix("<|endoftext|>")
        assert any(text.startswith(whole) for text in rendered)
        texts += [text for text, is_trained in each if is_trained]
        contexts += [text for text, is_trained in each if not is_trained]
    assert len(texts) == len(ends)
    for end, text in zip(ends, texts, strict=True):
        message = messages[end - 1]
        own = re.findall(r"t\d{3}", json.dumps(message))
        assert re.findall(r"t\d{3}", text) == sorted(own), "the thought before the content before the call"
        others = [other for other in messages if other is not message]
        assert not any(number in text for number in re.findall(r"t\d{3}", json.dumps(others)) if number not in own)
    asked = re.findall(r"t\d{3}", json.dumps([message for message in messages if message["role"] != "assistant"]))
    assert all(number in "".join(contexts) for number in asked)


def test_a_template_that_would_write_a_python_mapping_gets_json() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name ~ call.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    )
    for arguments in (WEATHER, json.dumps(WEATHER), {"city": "it's", "days": None}):
        talk = (user("Paris?"), reply(None, tool_calls=calls(arguments)))
        tokenizer = published("qwen3")
        (sequence,) = ConversationFormat(tokenizer, template).encode(Conversation(talk))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        assert tokenizer.decode(sequence.tokens).endswith(f"assistant\nweather{written}<|im_end|>")


@pytest.mark.parametrize("thinking", [True, False])
def test_the_option_of_thinking_has_the_name_that_the_template_reads(thinking: bool) -> None:
    template = (
        "{{ 'deep' if thinking is defined and thinking else 'quick' }}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{{ '<|im_start|>' if add_generation_prompt }}"
    )
    tokenizer, talk = published("qwen3"), (user("Up?"), reply("Up."))
    conversation = Conversation(talk, variables={"enable_thinking": thinking})
    (sequence,) = ConversationFormat(tokenizer, template).encode(conversation)
    assert tokenizer.decode(sequence.tokens).startswith("deep" if thinking else "quick")
    tokenizer.chat_template = template
    name = "native_thinking" if thinking else "native_nonthinking"
    (sequence,) = ConversationFormat(tokenizer, name).encode(Conversation(talk))
    assert tokenizer.decode(sequence.tokens).startswith("deep" if thinking else "quick")
