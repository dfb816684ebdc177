"""If these fail, the policy is asked something else than the row says, or loses the wrong end of a long prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_templates import published

from quintet.config.native.data import DataConfig
from quintet.data.conversations import Conversation, ConversationFormat
from quintet.data.prompt_format import PromptFormat, Truncation, truncate
from quintet.data.row_reader import RowReader
from quintet.errors import ConfigError
from quintet.policies.tiny_models import train_tokenizer
from quintet.records import PromptRow


@cache
def tokenizer() -> Any:
    return train_tokenizer(320, ["user 2 + 3 = 5", "assistant"])


def ask(*messages: tuple[str, str]) -> PromptRow:
    return PromptRow(3, "", tuple({"role": role, "content": content} for role, content in messages))


def text(template: str | None, *messages: tuple[str, str]) -> str:
    return PromptFormat(tokenizer(), template, max_tokens=8).text(ask(*messages))


def test_tools_are_described_only_to_rows_that_may_call_them() -> None:
    tools = [{"type": "function", "function": {"name": "a"}}]
    form = PromptFormat(tokenizer(), "{{ tools | length if tools else 'none' }}", max_tokens=8, tools=tools)
    row = ask(("user", "2"))
    assert [form.text(replace(row, agent_loop=name)) for name in (None, "tool_agent", "single_turn_agent")] == [
        "1",
        "1",
        "none",
    ]


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("left", 4, (3, 4, 5, 6)),
        ("right", 4, (0, 1, 2, 3)),
        ("middle", 4, (0, 1, 5, 6)),
        ("middle", 5, (0, 1, 4, 5, 6)),
        ("middle", 1, (6,)),
        ("error", 7, (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_truncation_keeps_the_configured_side(side: Truncation, limit: int, kept: tuple[int, ...]) -> None:
    assert truncate(range(7), limit, side) == kept


@given(st.lists(st.integers(0, 9)), st.integers(1, 12), st.sampled_from(["left", "right", "middle"]))
def test_truncation_leaves_exactly_the_limit(tokens: list[int], limit: int, side: Truncation) -> None:
    kept = truncate(tokens, limit, side)
    assert len(kept) == min(len(tokens), limit)
    if len(tokens) <= limit:
        assert kept == tuple(tokens)


def test_a_too_long_prompt_is_an_error_with_a_hint() -> None:
    form = PromptFormat(tokenizer(), max_tokens=3)
    length = len(form.untruncated_tokens(ask(("user", "2 + 3 ="))))
    with pytest.raises(ConfigError) as caught:
        form.tokens(ask(("user", "2 + 3 =")), "a.parquet, row 3")
    assert f"a.parquet, row 3 has {length} tokens, more than rollout.max_prompt_tokens = 3" in str(caught.value)
    assert f"rollout.max_prompt_tokens={length}, or" in str(caught.value)
    for other in ("data.filter_long_prompts", "data.truncation"):
        assert other in str(caught.value)


def test_the_tokenizers_template_is_applied_with_the_generation_prompt() -> None:
    expected = "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"
    assert text(None, ("user", "2 + 3")) == text("native", ("user", "2 + 3")) == expected
    form = PromptFormat(tokenizer(), max_tokens=64)
    prompt_ids = tokenizer().encode("2 + 3", add_special_tokens=False)
    start, end = tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokens = form.tokens(ask(("user", "2 + 3")), "here")
    assert tokens.count(start) == 2
    assert tokens.count(end) == 1
    assert tokenizer().decode(tokens) == expected
    assert any(list(tokens[at : at + len(prompt_ids)]) == prompt_ids for at in range(len(tokens)))


def test_no_token_is_put_before_or_behind_the_text() -> None:
    form = PromptFormat(tokenizer(), "none", max_tokens=64)
    assert tokenizer().decode(form.untruncated_tokens(ask(("user", "2 + 3")))) == "2 + 3"


SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3_nonthinking", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (
            "qwen2_5",
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("longCOT_V3", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("plain", "Hi"),
        ("Q: {{ messages[0]['content'] }}\nA:", "Q: Hi\nA:"),
    ],
)
def test_a_template_can_be_chosen_by_name(name: str, expected: str) -> None:
    assert text(name, ("user", "Hi")) == expected


def test_a_system_message_replaces_the_templates_default() -> None:
    actual = text("qwen2_5", ("system", "Be brief."), ("user", "Hi"))
    assert actual == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_earlier_thoughts_are_left_out_by_qwen3() -> None:
    actual = text("qwen3", ("user", "a"), ("assistant", "<think>long</think>\n\nb"), ("user", "c"))
    assert actual == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_bare_text_of_several_messages() -> None:
    assert text("none", ("system", "Add."), ("user", "2 + 3 =")) == "Add.\n2 + 3 ="


def test_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("[{{ messages[-1].content }}]")
    assert text(str(tmp_path / "t.jinja"), ("user", "Hi")) == "[Hi]"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen25", "did you mean qwen2_5"),
        ("/nowhere/t.jinja", "cannot read the file"),
        ("{{ messages[0].content.nothing() }}", "cannot be applied to row 3"),
        ("{% for %}", "cannot be applied to row 3"),
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages.__class__.__mro__ }}", "cannot be applied to row 3"),
    ],
)
def test_an_invalid_template_is_reported(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        text(name, ("user", "Hi"))
    assert message in str(caught.value)
    assert caught.value.key == "data.template"


def test_a_tokenizer_without_a_template_needs_one() -> None:
    bare = train_tokenizer(320, ["a"])
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template") as caught:
        PromptFormat(bare, max_tokens=8)
    assert "chatml" in str(caught.value)
    assert PromptFormat(bare, "chatml", max_tokens=8).text(ask(("user", "Hi"))).startswith("<|im_start|>user")


CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = (
    {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1 = ?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.add:0", "content": {"sum": 2}},
    {"role": "user", "content": "And 2 + 2?"},
)


def prompt_text(name: str, messages: tuple[Any, ...]) -> str:
    row = RowReader(DataConfig()).read({"prompt": list(messages)}, 0, "x.jsonl, row 0")
    return PromptFormat(published(name), max_tokens=9).text(row)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4", "gpt_oss", "kimi_k2", "deepseek_v3_1", "deepseek_r1"])
def test_prompts_with_calls_are_those_of_fine_tuning(name: str) -> None:
    """A call is the same whether its arguments are a mapping or text, and for every template."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    as_text = (CALLED[0], {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}, *CALLED[2:])
    text = prompt_text(name, CALLED)
    assert prompt_text(name, as_text) == text
    assert "1 + 1 = ?" in text
    assert "'a'" not in text
    assert '{\\"a' not in text
    conversation = Conversation((*as_text, {"role": "assistant", "content": "4"}), first_trained=4)
    tokenizer = published(name)
    (sequence,) = ConversationFormat(tokenizer).encode(conversation)
    context = [token for token, is_trained in zip(sequence.tokens, sequence.loss_mask, strict=True) if not is_trained]
    assert text.startswith(tokenizer.decode(context))


def test_prompts_whose_calls_or_results_a_template_leaves_out_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"message 1: its `tool_calls\[0\]"):
        prompt_text("phi3_5", CALLED)
    with pytest.raises(ConfigError, match="message 2: its `content`"):
        prompt_text("phi3_5", ({"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}, *CALLED[2:]))
