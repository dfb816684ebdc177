"""If these fail, responses are parsed wrongly: wrong actions, wrong penalties."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.config.native.rollout import RolloutConfig, Thoughts
from quintet.rollout.chat.response_parser import ParsedResponse, ResponseFormat
from quintet.rollout.chat.thought_sections import section_names

MOVES = ("Left", "Down", "Right", "Up")
THINKING = ResponseFormat(MOVES, think=True, separator="||", max_actions=2)


@pytest.mark.parametrize(
    ("text", "actions", "valid"),
    [
        ("<think> a </think><answer> Right </answer>", ("Right",), True),
        ("<think></think>\n<answer>right||UP</answer>\n", ("Right", "Up"), True),
        ("<think>a</think><answer>Up || Up || Up</answer>", ("Up", "Up"), True),
        ("<answer>Right</answer>", (), False),
        ("<think>a</think><answer>Right", (), False),
        ("<think>a</think><answer></answer>", (), False),
        ("<think>a</think><answer>Jump</answer>", (), False),
        ("<think>a</think><answer>Up || Jump || Left</answer>", ("Up",), False),
        ("<think>a</think><answer>Up</answer> trailing", (), False),
        ("<think>a</think><answer>Up</answer><answer>Down</answer>", (), False),
        ("<think>a<think>b</think><answer>Up</answer>", (), False),
    ],
)
def test_example_responses(text: str, actions: tuple[str, ...], valid: bool) -> None:
    parsed = THINKING.parse(text)
    assert (parsed.actions, parsed.valid) == (actions, valid)


def test_without_thinking_only_the_answer_is_allowed() -> None:
    plain = ResponseFormat(MOVES, think=False, separator="||", max_actions=1)
    assert plain.parse("<answer>Up</answer>").valid
    assert not plain.parse("<think>a</think><answer>Up</answer>").valid


@given(st.lists(st.sampled_from(MOVES), min_size=1, max_size=2), st.text(alphabet="abc 12", max_size=20))
def test_formatted_responses_are_parsed_back(actions: list[str], thought: str) -> None:
    parsed = THINKING.parse(THINKING.format(thought, tuple(actions)))
    assert parsed == type(parsed)(tuple(actions), valid=True)


DRAWING = '<svg viewBox="0 0 1 1"><g/></svg>'


@pytest.mark.parametrize(
    ("text", "actions", "valid"),
    [
        (f"<think>a</think><answer>{DRAWING}</answer>", (DRAWING,), True),
        (f"<think>a</think><answer> ```{DRAWING}``` </answer>", (DRAWING,), True),
        (f"<think>a</think><answer>{DRAWING}~~{DRAWING}</answer>", (DRAWING,), True),
        (f"Here it is: {DRAWING}, or {DRAWING}", (DRAWING,), False),
        (f"<think><svg>a</svg></think>Here it is: {DRAWING}", (DRAWING,), False),
        ("<think>a</think><answer>none</answer>", ("",), False),
        ("<think>a</think><answer><svg viewBox", ("",), False),
        ("", ("",), False),
    ],
)
def test_an_element_is_found_wherever_it_is(text: str, actions: tuple[str, ...], valid: bool) -> None:
    parsed = ResponseFormat(("<svg{text}</svg>",), think=True, separator="~~", max_actions=1).parse(text)
    assert (parsed.actions, parsed.valid) == (actions, valid)


@pytest.mark.parametrize(
    ("answer", "actions", "valid"),
    [("Up || || Left ||", ("Up", "Left"), True), ("||", (), False), (" ", (), False), ("Up || no", ("Up",), False)],
)
def test_separators_with_nothing_between_them_are_ignored(answer: str, actions: tuple[str, ...], valid: bool) -> None:
    """As in RAGEN and VAGEN."""
    form = ResponseFormat(MOVES, think=False, separator="||", max_actions=3)
    parsed = form.parse(f"<answer>{answer}</answer>")
    assert (parsed.actions, parsed.valid) == (actions, valid)


@given(st.text(max_size=200))
def test_any_text_can_be_parsed(text: str) -> None:
    assert all(action in MOVES for action in THINKING.parse(text).actions)


def reads(**options: object) -> ResponseFormat:
    return ResponseFormat.from_config(RolloutConfig.model_validate(options), MOVES, ("<|im_end|>", "<pad>"))


@pytest.mark.parametrize(
    ("form", "text", "actions"),
    [
        ("whole", "<think>a</think><answer>Up</answer>", ("Up",)),
        ("whole", "so <think>a</think><answer>Up</answer>", ()),
        ("anywhere", "so <think>a</think> <answer>Up</answer> and <answer>Down</answer>", ("Up",)),
        ("anywhere", "so <answer>Up</answer>", ()),
        ("answer", "a</think> so <answer>Up</answer> and <answer>Down</answer>", ("Up",)),
        ("answer", "Up", ()),
        ("answer", "<think>or <answer>Left</answer>?</think> <answer>Up</answer>", ("Up",)),
        ("answer", "or <answer>Left</answer>?</think> <answer>Up</answer>", ("Up",)),
        ("answer", "<think>a</think><think><answer>Left</answer></think><answer>Up</answer>", ("Up",)),
        ("answer", "<think>only <answer>Left</answer></think> no", ()),
        # without its end, a thought ends with the answer
        ("answer", "<think>so <answer>Up</answer>", ("Up",)),
        ("answer", "<answer>Up</answer> or <think><answer>Left</answer></think>", ("Up",)),
        ("anywhere", "<think>or <answer>Left</answer>?</think><answer>Up</answer>", ("Up",)),
        ("anywhere", "<think>Left || Left</think> <answer>Up || Down</answer>", ("Up",)),
        ("whole", "<think>or <answer>Left</answer>?</think><answer>Up</answer>", ("Up",)),
    ],
)
def test_response_forms(form: str, text: str, actions: tuple[str, ...]) -> None:
    parsed = reads(response_format=form).parse(text)
    assert (parsed.actions, parsed.valid) == (actions, bool(actions))


SKILLS = ("pick({number},{number},{number})", "Wait")


@pytest.mark.parametrize(
    ("answer", "actions", "valid"),
    [
        ("pick(62,-55,20)|wait", ("pick(62,-55,20)", "Wait"), True),
        (" PICK( 1.5 , 2,3 ) ", ("PICK( 1.5 , 2,3 )",), True),
        ("pick(1,2)", (), False),
        ("pick(1,2,x)|Wait", (), False),
        ("Wait|pick(1,2,3", ("Wait",), False),
    ],
)
def test_actions_with_numbers_are_taken_as_they_are_spelt(answer: str, actions: tuple[str, ...], valid: bool) -> None:
    parsed = ResponseFormat(SKILLS, think=False, separator="|", max_actions=2).parse(f"<answer>{answer}</answer>")
    assert (parsed.actions, parsed.valid) == (actions, valid)


def test_a_placeholder_itself_is_no_action() -> None:
    skills = ResponseFormat(SKILLS, think=False, separator="|", max_actions=2)
    assert skills.parse(f"<answer>{SKILLS[0]}</answer>") == ParsedResponse((), valid=False)


def test_an_action_of_any_text_is_the_whole_answer() -> None:
    """With one action per turn; otherwise the separator is between texts."""
    text = "<answer> [a || b]\nand more </answer>"
    one = ResponseFormat(("{text}",), think=False, separator="||", max_actions=1)
    two = ResponseFormat(("{text}",), think=False, separator="||", max_actions=2)
    assert one.parse(text).actions == ("[a || b]\nand more",)
    assert two.parse(text).actions == ("[a", "b]\nand more")
    assert not one.parse("<answer> </answer>").valid


def test_a_strict_format_also_holds_for_thoughts_with_sections() -> None:
    text = "So: <think><observation>a</observation><reasoning>b</reasoning></think><answer>Up</answer>"
    parsed = reads(thoughts="grounding").parse(text)
    assert (parsed.actions, parsed.valid) == (("Up",), False)
    assert reads(thoughts="grounding", response_format="strict").parse(text) == ParsedResponse((), valid=False)
    assert reads(thoughts="grounding", response_format="strict").parse(text.removeprefix("So: ")).valid


def test_thoughts_are_known_by_tags_that_are_special_tokens() -> None:
    special = ("<think>", "</think>", "<pad>")
    options = {"response_format": "answer", "strip_special_tokens": True}
    form = ResponseFormat.from_config(RolloutConfig.model_validate(options), MOVES, special)
    assert form.parse("<think><answer>Left</answer></think><answer>U<pad>p</answer>").actions == ("Up",)


def test_an_answer_in_a_thought_is_not_one_where_no_thoughts_are_demanded() -> None:
    parsed = reads(response_format="anywhere", think=False).parse(
        "<think><answer>Left</answer></think><answer>Up</answer>"
    )
    assert parsed.actions == ("Up",)


def test_letter_case_can_matter() -> None:
    text = "<think></think><answer>uP</answer>"
    assert reads().parse(text).actions == ("Up",)
    assert reads(ignore_case=False).parse(text).actions == ()
    assert reads(ignore_case=False).parse("<think></think><answer>Up</answer>").valid


@pytest.mark.parametrize(
    ("word", "action"),
    [("1", "Left"), ("4", "Up"), ("2 (Down)", "Down"), ("2(down)", "Down"), ("Down", "Down")]
    + [(word, None) for word in ("0", "5", "9" * 5000, "2 (Up)", "2 Down", "-1", "Up.", "[Up]", "1.0")],
)
def test_numbered_actions(word: str, action: str | None) -> None:
    """RAGEN's grammar: a word, its number, or both."""
    parsed = reads(numbered_actions=True, think=False).parse(f"<answer>{word}</answer>")
    assert parsed.actions == (() if action is None else (action,))
    assert parsed.valid == (action is not None)
    assert not reads(think=False).parse("<answer>1</answer>").valid


def test_an_unknown_action_ends_the_list_or_is_skipped() -> None:
    text = "<think></think><answer>Up || Jump || Left</answer>"
    many = {"max_actions_per_turn": 5}
    assert reads(**many).parse(text).actions == ("Up",)
    skipping = reads(**many, unknown_actions="skip").parse(text)
    assert (skipping.actions, skipping.valid) == (("Up", "Left"), False)


def test_special_tokens_can_be_removed_before_parsing() -> None:
    text = "<think>a</think><|im_end|><answer>Up<pad></answer><|im_end|>"
    assert not reads().parse(text).valid
    assert reads(strip_special_tokens=True).parse(text).actions == ("Up",)


WORLD = (
    "<think><observation> P next to a hole </observation>\n<reasoning>go up</reasoning><prediction>P above</prediction>"
    "</think><answer>Up</answer>"
)
GROUNDING = "<think><observation>a</observation><reasoning>b</reasoning></think><answer>Up</answer>"
PREDICTING = "<think><reasoning>b</reasoning><prediction>c</prediction></think><answer>Up</answer>"


@pytest.mark.parametrize(
    ("thoughts", "text", "actions", "valid"),
    [
        ("grounding_worldmodeling", WORLD, ("Up",), True),
        ("grounding_worldmodeling_symbolic", WORLD, ("Up",), True),
        ("grounding_worldmodeling", f"Let me see. {WORLD}", ("Up",), False),
        ("grounding_worldmodeling", WORLD.replace("<reasoning>go up</reasoning>", ""), (), False),
        ("grounding_worldmodeling", WORLD.replace("Up", "Jump"), (), False),
        ("grounding", GROUNDING, ("Up",), True),
        ("grounding", WORLD, (), False),
        ("worldmodeling_structured", PREDICTING, ("Up",), True),
        ("worldmodeling", "<think>b</think><answer>Up</answer>", (), False),
    ],
)  # fmt: skip
@pytest.mark.proves("vagen", "env1.env_config.prompt_format")
def test_required_sections_of_thoughts(thoughts: str, text: str, actions: tuple[str, ...], valid: bool) -> None:
    """As in VAGEN, actions are executed although something else surrounds the form, which earns no reward then."""
    parsed = reads(thoughts=thoughts).parse(text)
    assert (parsed.actions, parsed.valid) == (actions, valid)


@pytest.mark.parametrize("thoughts", get_args(Thoughts))
def test_demonstrations_have_the_required_sections(thoughts: str) -> None:
    form = reads(thoughts=thoughts, max_actions_per_turn=2)
    text = form.format("safe", ("Up", "Left"), observation="_ P\nG _", prediction="P _\nG _")
    parsed = form.parse(text)
    assert (parsed.actions, parsed.valid) == (("Up", "Left"), True)
    sections = {"observation": "_ P\nG _", "reasoning": "safe", "think": "safe", "prediction": "P _\nG _"}
    assert parsed.sections == {name: sections[name] for name in section_names(thoughts)}
    both = thoughts.endswith("wm")
    expected = ("grounding" in thoughts or both, "worldmodeling" in thoughts or both)
    assert ("_ P\nG _" in text, "P _\nG _" in text) == expected


AROUND = "<observation>box left</observation>{}<answer>Up</answer>{}<prediction>box here</prediction>"
TAGGED, FREE = AROUND.format("<think>push</think>", ""), AROUND.format(" Push it. ", " Then it is there. ")


@pytest.mark.parametrize(
    ("thoughts", "text", "actions"),
    [
        ("wm", TAGGED, ("Up",)),
        ("wm", f"Well: {TAGGED} Done.", ("Up",)),
        ("wm", FREE, ()),
        ("free_wm", FREE, ("Up",)),
        ("free_wm", TAGGED, ("Up",)),
        ("free_wm", FREE.replace("<prediction>", "").replace("</prediction>", ""), ()),
        ("free_wm", "<think>push</think><answer>Up</answer>", ()),
    ],
)
def test_descriptions_around_the_answer_are_found_anywhere(thoughts: str, text: str, actions: tuple[str, ...]) -> None:
    parsed = reads(thoughts=thoughts, response_format="anywhere").parse(text)
    assert (parsed.actions, parsed.valid) == (actions, bool(actions))
    assert parsed.sections.get("prediction") == ("box here" if actions else None)
