"""What the policy is told about the form of its responses, and about a response in another form."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.config.native.rollout import RolloutConfig
from quintet.envs.env import NUMBER, TEXT
from quintet.rollout.chat.response_parser import element_pattern
from quintet.rollout.chat.thought_sections import format_instruction

MAX_LISTED_ACTIONS = 32
"""Longer lists of actions are left to the env."""
MARKS = {NUMBER: "a number", TEXT: "a text"}


def response_instruction(config: RolloutConfig, actions: Sequence[str], stated: str = "") -> str:
    """Return the form of a response in words, with the actions unless `stated` names all of them.

    >>> print(response_instruction(RolloutConfig(), ("Look", "Take({number})"), "Look for the box."))
    Always respond in this form and add nothing else: <think>[your thoughts]</think><answer>[one action]</answer>
    Actions: Look, Take({number}), with a number in place of {number}
    """
    if config.thoughts is not None and config.think:
        return format_instruction(config.thoughts, config.action_separator)
    thought = "<think>[your thoughts]</think>" if config.think else ""
    rule = " and add nothing else" if config.response_format in ("whole", "strict") else ""
    form = f"Always respond in this form{rule}: {thought}<answer>[{_answer(config, actions)}]</answer>"
    is_open = tuple(actions) == (TEXT,) or element_pattern(actions) is not None
    if is_open or len(actions) > MAX_LISTED_ACTIONS or all(each.casefold() in stated.casefold() for each in actions):
        return form
    used = [
        f", with {kind} in place of {mark}" for mark, kind in MARKS.items() if any(mark in each for each in actions)
    ]
    return f"{form}\nActions: {', '.join(actions)}{''.join(used)}"


def _answer(config: RolloutConfig, actions: Sequence[str]) -> str:
    """Return what belongs between the tags of an answer."""
    limit = config.max_actions_per_turn
    if element_pattern(actions) is not None:
        element = actions[0].replace(TEXT, "…")
        return element if limit == 1 else f"up to {limit} {element}, separated by {config.action_separator}"
    if limit == 1:
        return "your answer" if tuple(actions) == (TEXT,) else "one action"
    return f"up to {limit} actions, separated by {config.action_separator}"


def states_form(*texts: str) -> bool:
    """Return whether one of an env's texts describes the form of responses itself."""
    return any("<answer>" in text for text in texts)
