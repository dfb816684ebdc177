"""If these fail, a policy of one of these families learns from other tokens than its chat template gives it, or nobody
is told where the template can't be followed."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from chat_families import FAMILIES, QWEN_WORDS, by_bytes, by_pieces, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from quintet.config.native.rollout import RolloutConfig
from quintet.errors import ConfigError
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue, PromptChange
from quintet.rollout.chat.template_analysis import DifferenceKind
from quintet.rollout.chat.template_comparison import find_retokenized_spans

NAMES = sorted(FAMILIES)
THINKING = {"qwen3": True, "qwen3_nonthinking": False}
REPORTED = {
    "qwen2_5": set(),
    "qwen3": {DifferenceKind.THOUGHTS},
    "qwen3_nonthinking": {DifferenceKind.THOUGHTS, DifferenceKind.GENERATION_PROMPT},
    "qwen3_thinking": {DifferenceKind.THOUGHTS, DifferenceKind.GENERATION_PROMPT},
    "llama3": {DifferenceKind.RESPONSE_WHITESPACE},
    "llama3_2": {DifferenceKind.RESPONSE_WHITESPACE, DifferenceKind.DATE},
    "mistral_v1": {DifferenceKind.SYSTEM_MERGED, DifferenceKind.IMITABLE},
    "mistral_v1_legacy": {DifferenceKind.SYSTEM_MERGED, DifferenceKind.IMITABLE},
    "mistral_v2": {DifferenceKind.LEAD, DifferenceKind.IMITABLE},
    "mistral_v3": {DifferenceKind.SYSTEM_STAYS, DifferenceKind.LEAD, DifferenceKind.RESPONSE_WHITESPACE},
    "mistral_v3_bytes": {DifferenceKind.SYSTEM_STAYS, DifferenceKind.LEAD, DifferenceKind.RESPONSE_WHITESPACE},
    "gemma": {DifferenceKind.SYSTEM_MERGED, DifferenceKind.RESPONSE_WHITESPACE},
}
MERGED = {"mistral_v1", "mistral_v1_legacy", "gemma"}
LEAD = dict.fromkeys(("mistral_v2", "mistral_v3", "mistral_v3_bytes"), " ")
BEGUN = {"qwen3_thinking": "<think>\n"}


@cache
def chat_of(name: str) -> ChatFormat:
    return ChatFormat(tokenizer_of(name), thinking=THINKING.get(name))


def rendered(name: str, system: str, observations: Sequence[str], replies: Sequence[str]) -> str:
    """The dialogue rendered by the template; without system messages, it is merged into the first user message."""
    template_options = {"enable_thinking": THINKING[name]} if name in THINKING else {}
    users = [f"{system}\n\n{observations[0]}" if name in MERGED and system else observations[0], *observations[1:]]
    messages = [] if name in MERGED else [{"role": "system", "content": system}]
    for user, reply in zip(users, [*replies, None], strict=True):
        messages.append({"role": "user", "content": user})
        if reply is not None:
            messages.append({"role": "assistant", "content": reply})
    day = {"date_string": "26 Jul 2024"}
    return str(
        tokenizer_of(name).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **template_options, **day
        )
    )


def encoded(name: str, text: str) -> tuple[int, ...]:
    return tuple(tokenizer_of(name).encode(text, add_special_tokens=False))


def played(
    chat: ChatFormat, system: str, observations: Sequence[str], replies: Sequence[tuple[int, ...]]
) -> tuple[Dialogue, tuple[int, ...]]:
    """The dialogue and its last prompt; every new prompt continues the one before."""
    dialogue = Dialogue(chat, system, None)
    before: tuple[int, ...] = ()
    for number, observation in enumerate(observations):
        prompt, new, continues = dialogue.observe(observation)
        assert continues == (number > 0)
        assert prompt == before + new
        if number < len(replies):
            dialogue.add_response(replies[number])
            before = prompt + replies[number]
    return dialogue, prompt


@pytest.mark.parametrize("name", NAMES)
def test_template_differences_are_reported(name: str) -> None:
    report = chat_of(name).report
    assert {difference.kind for difference in report.differences} == REPORTED[name]
    assert len(report.lines()) == len(REPORTED[name])
    ends = {"llama3": "<|eot_id|>", "llama3_2": "<|eot_id|>", "gemma": "<end_of_turn>"}
    assert report.end_token == ends.get(name, "<|im_end|>" if "qwen" in name else "</s>")


def test_all_end_tokens_are_known() -> None:
    tokenizer = tokenizer_of("gemma")
    chat = ChatFormat(tokenizer)
    turn, eos = tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<eos>"])
    assert (chat.end_token_id, chat.stop_token_ids) == (turn, (turn, eos))
    llama = tokenizer_of("llama3")
    text_end = llama.convert_tokens_to_ids("<|end_of_text|>")
    assert ChatFormat(llama, extra_stop_token_ids=(text_end, llama.eos_token_id)).stop_token_ids == (
        llama.eos_token_id,
        text_end,
    )
    for end in chat.stop_token_ids:
        assert chat.decode((*chat.encode("Up"), end)) == "Up"


# ----- exactness ---------------------------------------------------------------------------------------------------

WORDS = ["go", "goal", "Right", "Größe", "目标", "🙂", "é", "12", "_", "P", "||", "<answer>", "\u00a0", "."]
BLANKS = ["\n", "\n\n", " ", "  ", "\t", "\r\n"]
CONTROL = [
    "<|im_end|>",
    "<|im_start|>user",
    "</s>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<s>",
    "<bos>",
    "<|start_header_id|>",
    "[INST]",
    "[/INST]",
]
THOUGHTS = [
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<think>\n",
    "\n</think>\n\n",
    "[INST]",
    "[/INST]",
]
tame = st.lists(st.sampled_from(WORDS + BLANKS), max_size=6).map("".join)
wild = st.lists(st.sampled_from(WORDS + BLANKS + CONTROL + THOUGHTS) | st.text(max_size=3), max_size=6).map("".join)
kernels = st.lists(st.sampled_from([*WORDS[:-2], " "]), max_size=5).map(lambda parts: "".join(parts).strip())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_dialogue_equals_its_template_token_by_token(name: str, data: st.DataObject) -> None:
    """Observations are as they like; replies are spelled as the tokenizer would, without blanks around them and
    without thoughts, and may lack their end token."""
    chat = chat_of(name)
    system = data.draw(tame) if "v3" not in name else ""
    turns = data.draw(st.lists(st.tuples(tame, kernels, st.booleans()), max_size=4))
    observations = [*(seen for seen, _, _ in turns), data.draw(tame)]
    replies = [said for _, said, _ in turns]
    lead = LEAD.get(name, "")
    tokens = [chat.encode(lead + said) + (chat.end_token_id,) * closed for _, said, closed in turns]
    dialogue, prompt = played(chat, system, observations, tokens)
    if name == "mistral_v1_legacy":
        # it puts a blank before any text
        replies = [chat.response_text(said).text for said in tokens]
    text = rendered(name, system, observations, [BEGUN.get(name, "") + reply for reply in replies])
    changed = {departure.kind for departure in dialogue.compare().deviations}
    if name == "mistral_v3" or name == "mistral_v3_bytes":
        # an empty system text still leaves its empty line, which moves
        assert changed <= {DifferenceKind.SYSTEM_STAYS}
    elif name == "qwen3_nonthinking":
        assert changed == ({DifferenceKind.GENERATION_PROMPT} if turns else set())
    else:
        assert not changed
    if changed:
        return
    spelled = encoded(name, text)
    if prompt != spelled:
        # marks that are plain words may melt into a reply
        assert DifferenceKind.IMITABLE in REPORTED[name]
        assert tokenizer_of(name).decode(prompt) == tokenizer_of(name).decode(spelled)
        assert find_retokenized_spans(tokenizer_of(name), prompt, [0] * len(prompt), [True] * len(prompt))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_deviation_is_explained(name: str, data: st.DataObject) -> None:
    """Whatever is said: the template's text with the differences put in place is the text of the tokens, and without
    differences the tokens are the template's."""
    tokenizer, chat = tokenizer_of(name), chat_of(name)
    system, last = data.draw(wild), data.draw(wild)
    sampled = st.lists(st.integers(0, len(tokenizer) - 1), max_size=5).map(tuple)
    spoken = (wild.map(chat.encode)) | sampled
    endings = st.sampled_from([(), *((end,) for end in chat.stop_token_ids)])
    turns = data.draw(st.lists(st.tuples(wild, spoken, endings), max_size=3))
    observations = [*(seen for seen, _, _ in turns), last]
    replies = [tokens + ending for _, tokens, ending in turns]
    dialogue, prompt = played(chat, system, observations, replies)
    compared = dialogue.compare()

    patched = compared.template
    for departure in reversed(compared.deviations):
        end = departure.start + len(departure.template)
        assert patched[departure.start : end] == departure.template
        patched = patched[: departure.start] + departure.prompt + patched[end:]
    assert patched == compared.prompt
    assert {departure.kind for departure in compared.deviations} <= REPORTED[name] | {DifferenceKind.OTHER_END}
    if name != "mistral_v1_legacy":
        # whose tokens say more blanks than the text that they were made of
        assert tokenizer.decode(prompt) == compared.prompt

    own = [False] * len(prompt)
    if not compared.deviations and not find_retokenized_spans(tokenizer, prompt, [0] * len(prompt), own):
        assert prompt == encoded(name, compared.template)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_rendering_is_that_of_the_tokenizer(name: str) -> None:
    chat = chat_of(name)
    response = "<think>\nso\n</think>\n\nRight " if "qwen3" in name else "Right "
    replies = [(*chat.encode(LEAD.get(name, "") + response), chat.end_token_id)] * 2
    response = " Right " if name == "mistral_v1_legacy" else response
    dialogue, _ = played(chat, "Walk. ", ["\na ", " b", "c\n"], replies)
    expected = rendered(name, "Walk. ", ["\na ", " b", "c\n"], [BEGUN.get(name, "") + response] * 2)
    assert dialogue.compare().template == expected


def test_merges_cross_message_borders() -> None:
    """Otherwise the tests above would not cover such merges."""
    tokenizer, chat = tokenizer_of("qwen2_5"), chat_of("qwen2_5")
    _, prompt = played(chat, "\nWalk.", ["\n\n P"], [])
    pieces = ["<|im_start|>system\n", "\nWalk.", "<|im_end|>\n<|im_start|>user\n", "\n\n P"]
    apart = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    text = "".join(pieces)
    assert prompt[: len(encoded("qwen2_5", text))] == encoded("qwen2_5", text)
    assert list(prompt[: len(apart)]) != apart


# ----- what a template makes impossible ----------------------------------------------------------------------------


def departures(name: str, *replies: str, system: str = "Walk.") -> list[tuple[DifferenceKind, int, str, str]]:
    chat = chat_of(name)
    tokens = [(*chat.encode(reply), chat.end_token_id) for reply in replies]
    dialogue, _ = played(chat, system, ["a", "b", "c"][: len(replies) + 1], tokens)
    return [
        (deviation.kind, deviation.turn, deviation.template, deviation.prompt)
        for deviation in dialogue.compare().deviations
    ]


def test_thoughts_stay_as_sampled() -> None:
    response = "<think>\nleft?\n</think>\n\nRight"
    assert departures("qwen3", response, "Right") == [(DifferenceKind.THOUGHTS, 0, "", "<think>\nleft?\n</think>\n\n")]


def test_templates_keep_thoughts_before_a_tool_response() -> None:
    """Qwen3 keeps the thoughts of responses before a tool response."""
    chat = chat_of("qwen3")
    replies = [(*chat.encode("<think>\nleft?\n</think>\n\nRight"), chat.end_token_id)] * 2
    seen = ["a", *["<tool_response>\nb\n</tool_response>"] * 2]
    dialogue, prompt = played(chat, "Walk.", seen, replies)
    assert dialogue.compare().deviations == ()
    assert prompt == encoded("qwen3", dialogue.compare().template)
    assert departures("qwen3", "Right") == []


@pytest.mark.proves("vagen", "data.apply_chat_template_kwargs.enable_thinking")
@pytest.mark.parametrize(
    ("options", "empty"),
    [({"think": True}, False), ({"think": True, "template_thinking": False}, True), ({"think": False}, True)],
)
def test_thoughts_of_the_template_need_not_be_those_of_the_response(options: dict[str, bool], empty: bool) -> None:
    chat = ChatFormat.from_config(RolloutConfig.model_validate(options), tokenizer_of("qwen3"))
    assert ("<think>\n\n</think>" in chat.template_parts.header) == empty


def test_without_thinking_the_prompt_has_an_empty_thought() -> None:
    chat, tokenizer = chat_of("qwen3_nonthinking"), tokenizer_of("qwen3")
    prompt = chat.initial_prompt("Walk.", "a")
    assert tokenizer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    assert prompt == encoded("qwen3_nonthinking", rendered("qwen3_nonthinking", "Walk.", ["a"], []))
    assert departures("qwen3_nonthinking", "Up") == [
        (DifferenceKind.GENERATION_PROMPT, 0, "", "<think>\n\n</think>\n\n")
    ]
    assert not ChatFormat(tokenizer, thinking=True).response_prefix
    assert not chat.response_prefix


def test_a_thought_opened_by_the_template_belongs_to_the_response() -> None:
    chat = chat_of("qwen3_thinking")
    assert chat.response_prefix == "<think>\n"
    actual = departures("qwen3_thinking", "so\n</think>\n\nUp")
    assert actual == [
        (DifferenceKind.GENERATION_PROMPT, 0, "", "<think>\n"),
        (DifferenceKind.THOUGHTS, 0, "", "so\n</think>\n\n"),
    ]
    assert departures("qwen3_thinking", "so") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_demonstrated_response_equals_the_template(name: str) -> None:
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    reply = chat.encode_response("<think>up</think>Up" if name == "qwen3_thinking" else "Up")
    assert reply[-1] == chat.end_token_id
    prompt = chat.initial_prompt("", "a")
    if name == "qwen3_thinking":
        assert tokenizer.decode(prompt + reply).endswith("assistant\n<think>\nup</think>Up<|im_end|>")
    elif name != "qwen3_nonthinking":
        whole = rendered(name, "", ["a", "b"], ["Up"])
        if name.startswith("mistral_v3"):
            whole = whole.replace("[INST] a", "[INST] \n\na", 1)
        elif name == "mistral_v1_legacy":
            whole = whole.replace("/INST]Up", "/INST] Up")
        assert encoded(name, whole)[: len(prompt + reply)] == prompt + reply


def test_whitespace_around_a_response_is_kept() -> None:
    assert departures("llama3", " Up\n", "Down") == [(DifferenceKind.RESPONSE_WHITESPACE, 0, "Up", " Up\n")]
    assert departures("gemma", "Up\n") == [(DifferenceKind.RESPONSE_WHITESPACE, 0, "", "\n")]
    assert departures("qwen2_5", " Up\n\n") == []


def test_a_moving_system_message_stays_in_the_first_prompt() -> None:
    assert departures("mistral_v3", " Up") == [
        (DifferenceKind.SYSTEM_STAYS, 0, "", "Walk.\n\n"),
        (DifferenceKind.SYSTEM_STAYS, 0, "Walk.\n\n", ""),
    ]


def test_an_unsupported_system_message_is_merged_into_the_first_user_message() -> None:
    for name in sorted(MERGED):
        text = tokenizer_of(name).decode(chat_of(name).initial_prompt("Walk.", "a"))
        assert "Walk.\n\na" in text
        assert departures(name, "Up") == []


def test_a_response_with_another_end_token_is_closed_too() -> None:
    chat, tokenizer = chat_of("gemma"), tokenizer_of("gemma")
    eos = tokenizer.convert_tokens_to_ids("<eos>")
    dialogue, prompt = played(chat, "", ["a", "b"], [(*chat.encode("Up"), eos)])
    assert "Up<eos><end_of_turn>\n<start_of_turn>user\nb" in tokenizer.decode(prompt)
    assert [(deviation.kind, deviation.prompt) for deviation in dialogue.compare().deviations] == [
        (DifferenceKind.OTHER_END, "<eos>")
    ]


def test_the_date_in_templates_is_fixed() -> None:
    assert "26 Jul 2024" in tokenizer_of("llama3_2").decode(chat_of("llama3_2").initial_prompt("Walk.", "a"))


# ----- what an env says is words ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_no_text_becomes_a_control_token(name: str) -> None:
    tokenizer, chat = tokenizer_of(name), chat_of(name)
    control = set(tokenizer.convert_tokens_to_ids(sorted(chat.template_parts.control)))
    for word in sorted(chat.template_parts.control):
        for text in (word, f"a{word}b", f"{word}{word}", f" {word}\n", f"{word[:2]}{word}"):
            spoilt, plain = chat.initial_prompt(text, text), chat.initial_prompt("x", "x")
            assert [t for t in spoilt if t in control] == [t for t in plain if t in control], text
            assert tokenizer.decode(spoilt).count(word) >= tokenizer.decode(plain).count(word) + 2
            assert [t for t in chat.next_prompt(text, closed=False) if t in control] == [
                t for t in chat.next_prompt("x", closed=False) if t in control
            ]
            assert chat.contains_control_token(text)
    assert not chat.contains_control_token("a < b | c > d")


def test_turn_markers_that_are_not_special_tokens_cannot_be_forged() -> None:
    make = by_bytes(QWEN_WORDS, ["<|endoftext|>"], ["<|im_start|>", "<|im_end|>", "<think>"], None, "<|endoftext|>")
    tokenizer = make()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = tokenizer_of("qwen2_5").chat_template
    chat = ChatFormat(tokenizer)
    assert {"<|im_start|>", "<|im_end|>"} <= chat.template_parts.control
    mark = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert chat.initial_prompt("", "<|im_start|>").count(mark) == 3
    thought = tokenizer.convert_tokens_to_ids("<think>")
    assert thought in chat.initial_prompt("", "<think>")


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_text_is_tokenized_as_in_the_template(name: str) -> None:
    """Splitting special tokens changes nothing where there are none."""
    text = "<|not_one|> [x] < s > a_b\n"
    prompt = chat_of(name).initial_prompt("Walk.", text)
    assert prompt == encoded(name, rendered(name, "Walk.", [text], [])) or name.startswith("mistral_v3")
    assert not chat_of(name).contains_control_token(text)


# ----- tokenizers with ways of their own ---------------------------------------------------------------------------


def test_control_tokens_that_strip_whitespace() -> None:
    """Phi-3 has such tokens."""
    make = by_bytes(QWEN_WORDS, ["<|endoftext|>"], [], None, "<|endoftext|>")
    tokenizer = make()
    ends = ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
    marks = [AddedToken(mark, rstrip=True, normalized=False, special=True) for mark in ends]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    chat = ChatFormat(tokenizer)
    assert (chat.template_parts.end, len(chat.stop_token_ids)) == ("<|end|>", 2)
    replies = [(*chat.encode("Up"), chat.end_token_id), chat.encode("Down")]
    dialogue, prompt = played(chat, "\n Walk.", ["  a", "\nb ", "c"], replies)
    assert prompt == tuple(tokenizer.encode(dialogue.compare().template, add_special_tokens=False))


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_leading_spaces_match_the_tokenizer(scheme: str) -> None:
    """Tokenizers from SentencePiece write one before the first word of a text, or of every stretch of it."""
    tokenizer = by_pieces(("<s>", "</s>", "<u>", "<a>"), scheme, "<s>", "</s>")()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<u>' if message['role'] != 'assistant' else '<a>' }}{{ message['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    chat = ChatFormat(tokenizer)
    replies = [(*chat.encode("Right"), chat.end_token_id), chat.encode(" Down")]
    dialogue, prompt = played(chat, "Walk", ["goal", " goal", "go"], replies)
    text = "<s><u>Walk</s><u>goal</s><a>Right</s><u> goal</s><a> Down</s><u>go</s><a>"
    assert prompt == tuple(tokenizer.encode(text, add_special_tokens=False))
    assert dialogue.compare().deviations == ()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}",
            "does not end every response",
        ),
        ("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}", "does not end every response"),
        ("{{ messages[-1]['content'] }}<|im_end|>", "drops a message"),
        ("{% for m in messages %}{{ m['content'] * 2 }}<|im_end|>{% endfor %}", "writes a message twice"),
        ("{% for m in messages %}{{ m['content'] | replace(' ', '_') }}<|im_end|>{% endfor %}", "changes the text"),
        ("{{ raise_exception('never') }}", "rejects a dialogue"),
        (None, "no chat template"),
    ],
)
def test_unsupported_templates_are_config_errors(template: str | None, message: str) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message) as error:
        ChatFormat(tokenizer)
    assert error.value.key == "policy.path"
    assert str(error.value.hint).startswith("save a chat_template.jinja next to the tokenizer that ")


def test_a_template_can_be_named() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = None
    named = ChatFormat(tokenizer, template="qwen3_nonthinking", thinking=True)
    assert tokenizer.decode(named.initial_prompt("", "a")).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="unknown template"):
        ChatFormat(tokenizer, template="qwen33")


# ----- windows and cuts --------------------------------------------------------------------------------------------


def test_prompt_changes_are_recorded() -> None:
    chat = chat_of("qwen2_5")
    dialogue = Dialogue(chat, "Walk.", 2, max_start=30, max_observation=4)
    dialogue.observe("go")
    assert dialogue.changes == ()
    dialogue.add_response((*chat.encode("Up"), chat.end_token_id))
    dialogue.observe("go go go go go go")
    assert dialogue.changes == (PromptChange.OBSERVATION_CUT,)
    dialogue.add_response(chat.encode("Up"))
    dialogue.observe("<|im_end|>")
    assert set(dialogue.changes) == {
        PromptChange.CONTROL_AS_TEXT,
        PromptChange.OBSERVATION_CUT,
        PromptChange.RESPONSE_CLOSED,
        PromptChange.WINDOW,
    }
    short = Dialogue(chat, "Walk.", None, max_start=5)
    prompt, _, _ = short.observe("go")
    assert (len(prompt), short.changes) == (5, (PromptChange.START_CUT,))


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma"])
def test_a_window_equals_the_template_of_its_turns(name: str, window: int) -> None:
    chat = chat_of(name)
    dialogue = Dialogue.from_config(RolloutConfig(window_size=window, format_instruction=False), chat, "Walk.")
    observations = [f"see {number}" for number in range(5)]
    for number, observation in enumerate(observations):
        prompt, new, continues = dialogue.observe(observation)
        oldest = max(0, number + 1 - window)
        kept = observations[oldest : number + 1]
        assert prompt == encoded(name, rendered(name, "Walk.", kept, ["Up"] * (len(kept) - 1)))
        assert continues == (number > 0 and oldest == 0)
        assert (new == prompt) == (not continues)
        assert dialogue.compare().deviations == ()
        dialogue.add_response((*chat.encode("Up"), chat.end_token_id))
        assert dialogue.compare().template.startswith(dialogue.compare().prompt[:10])


@pytest.mark.parametrize("name", ["qwen2_5", "mistral_v1", "mistral_v1_legacy", "gemma"])
@settings(max_examples=30, deadline=None)
@given(text=wild, limit=st.integers(1, 8))
def test_truncated_text_is_a_prefix_that_fits(name: str, text: str, limit: int) -> None:
    chat = chat_of(name)
    kept = chat.truncate(text, limit)
    assert text.startswith(kept)
    assert len(chat.encode(kept)) <= limit
    assert kept == text or len(chat.encode(text)) > limit


def test_truncation_does_not_split_characters() -> None:
    chat = chat_of("qwen2_5")
    smile = len(chat.encode("🦊"))
    assert smile > 1
    assert chat.truncate("a🦊", smile) == "a"
    assert chat.truncate("a🦊", smile + 1) == "a🦊"


def test_lone_surrogates_in_observations_are_replaced() -> None:
    prompt, _, _ = Dialogue(chat_of("llama3"), "Walk.", None).observe("a\ud83d")
    assert "a?" in tokenizer_of("llama3").decode(prompt)


# ----- the page ----------------------------------------------------------------------------------------------------


def test_the_documentation_lists_the_same_differences() -> None:
    page = (Path(__file__).parents[4] / "docs" / "exact-tokens.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([^`]+)` \| ([^|]*) \|$", page, re.M)
    rules_by_name = {name: (end, set(re.findall(r"`(\w+)`", rules))) for name, end, rules in rows}
    assert rules_by_name == {
        name: (chat_of(name).template_parts.end, {str(rule) for rule in REPORTED[name]})
        for name in NAMES
        if not name.endswith(("_legacy", "_bytes"))
    }
