"""If these fail, the policy's answers are misread: wrong moves, wrong penalties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rollout.replies import ReplyFormat

MOVES = ("Left", "Down", "Right", "Up")
THINKING = ReplyFormat(MOVES, think=True, separator="||", max_actions=2)


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
def test_replies_by_hand(text: str, actions: tuple[str, ...], valid: bool) -> None:
    parsed = THINKING.parse(text)
    assert (parsed.actions, parsed.valid) == (actions, valid)


def test_without_thinking_the_answer_stands_alone() -> None:
    plain = ReplyFormat(MOVES, think=False, separator="||", max_actions=1)
    assert plain.parse("<answer>Up</answer>").valid
    assert not plain.parse("<think>a</think><answer>Up</answer>").valid


@given(st.lists(st.sampled_from(MOVES), min_size=1, max_size=2), st.text(alphabet="abc 12", max_size=20))
def test_what_is_written_is_read_back(actions: list[str], thought: str) -> None:
    parsed = THINKING.parse(THINKING.write(thought, tuple(actions)))
    assert parsed == type(parsed)(tuple(actions), valid=True)


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    assert all(action in MOVES for action in THINKING.parse(text).actions)
