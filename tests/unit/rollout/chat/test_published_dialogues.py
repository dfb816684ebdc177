"""If these fail, a policy with a thinking template learns from other tokens than it saw, or nobody is told how its
prompts differ from the template."""

from __future__ import annotations

from functools import cache

import pytest
from published_templates import NAMES, published

from quintet.errors import ConfigError
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue
from quintet.rollout.chat.template_analysis import DifferenceKind

REPORTED = {
    "deepseek_r1": "asked_with thoughts",
    "deepseek_v3_1": "thoughts",
    "deepseek_v3_1 thinking": "asked_with lead thoughts",
    "glm4": "lead thoughts reply_blanks",
    "gpt_oss": "lead date",
    "granite": "",
    "kimi_k2": "lead",
    "llama3_1": "reply_blanks",
    "mistral_small": "",
    "phi3_5": "",
    "phi4_mini": "",
    "qwen3": "thoughts",
    "qwen3_5": "asked_with thoughts reply_blanks",
    "qwq": "asked_with thoughts reply_blanks",
    "smollm3": "",
}
"""Rules of docs/exact-tokens.md by template."""


@cache
def chat_of(name: str) -> ChatFormat:
    template, _, thinking = name.partition(" ")
    tokenizer = published(template)
    stops = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"]) if template == "glm4" else ()
    return ChatFormat(tokenizer, thinking=True if thinking else None, extra_stop_token_ids=stops)


def test_each_template_is_tested() -> None:
    assert {name.partition(" ")[0] for name in REPORTED} == set(NAMES)


def test_the_token_of_the_next_role_ends_a_response_only_if_it_is_a_stop_token() -> None:
    """GLM's generation config lists `<|user|>` and `<|observation|>`."""
    tokenizer = published("glm4")
    with pytest.raises(ConfigError, match="does not end every response with the end token"):
        ChatFormat(tokenizer)
    end, other, eos = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>", tokenizer.eos_token])
    chat = chat_of("glm4")
    assert chat.stop_token_ids == (end, eos, other)
    dialogue = Dialogue(chat, "", None)
    dialogue.observe("Up?")
    for sampled, closing in ((end, "<|user|>"), (eos, "<|endoftext|><|user|>"), (None, "<|user|>")):
        dialogue.add_response((*chat.encode("\n<think></think>Up."), *(() if sampled is None else (sampled,))))
        prompt, new, _ = dialogue.observe("And now?")
        assert tokenizer.decode(prompt).endswith(f"Up.{closing}\nAnd now?<|assistant|>")
        assert new.count(end) == (sampled != end), "no token twice"


@pytest.mark.parametrize("name", REPORTED)
def test_template_differences_are_reported(name: str) -> None:
    assert [str(each.kind) for each in chat_of(name).report.differences] == REPORTED[name].split()


@pytest.mark.parametrize("name", REPORTED)
def test_every_deviation_of_a_dialogue_with_thoughts_is_explained(name: str) -> None:
    chat = chat_of(name)
    dialogue = Dialogue(chat, "Be short.", None)
    prompt, _, _ = dialogue.observe("Up?")
    sequence = prompt
    for text in ("<think>\nWhy not.\n</think>\n\nUp.", "<think>\nHm.\n</think>\n\nDown."):
        response = chat.encode_response(text)
        dialogue.add_response(response)
        prompt, new, continues = dialogue.observe("And now?")
        assert continues
        assert prompt == sequence + response + new
        sequence = prompt
    comparison = dialogue.compare()
    kinds = {deviation.kind for deviation in comparison.deviations}
    assert DifferenceKind.OTHER not in kinds
    assert {str(kind) for kind in kinds} <= set(REPORTED[name].split())


def test_a_demonstrated_response_has_the_channel_of_gpt_oss() -> None:
    chat, tokenizer = chat_of("gpt_oss"), published("gpt_oss")
    response = chat.encode_response("Up.")
    assert tokenizer.decode(response).startswith("<|channel|>final<|message|>Up.")
    assert response[0] == tokenizer.convert_tokens_to_ids("<|channel|>")


def test_a_demonstrated_thought_follows_a_prompt_that_opens_one() -> None:
    chat, tokenizer = chat_of("deepseek_v3_1 thinking"), published("deepseek_v3_1")
    assert tokenizer.decode(chat.initial_prompt("", "Up?")).endswith("<｜Assistant｜><think>")
    assert tokenizer.decode(chat.encode_response("<think>Why not.</think>Up.")).startswith("Why not.</think>Up.")
