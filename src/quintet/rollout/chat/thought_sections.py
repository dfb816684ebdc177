"""Sections of thoughts: the policy describes the observation, reasons, and predicts the next observation.

The forms are those of VAGEN (Wang et al. 2025, arXiv:2510.16907); `rollout.thoughts` selects one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quintet.config.native.rollout import Thoughts

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "grounding": ("observation", "reasoning"),
    "worldmodeling": ("reasoning", "prediction"),
    "grounding_worldmodeling": ("observation", "reasoning", "prediction"),
}
"""Tags within `<think>`, in order, by form."""
STYLES: Mapping[str, str] = {
    "structured": "as a JSON object with the position of each object",
    "symbolic": "with the symbols of the observations",
}
"""How the state is described, by the end of a form's name."""
ANSWER = "answer"
AROUND_ANSWER: Mapping[str, tuple[tuple[str, ...], str]] = {
    "wm": (("observation", "think", ANSWER, "prediction"), r"\s*"),
    "free_wm": (("observation", ANSWER, "prediction"), ".*?"),
}
"""Tags of forms without a common `<think>`, in order, and the pattern of what may be between them."""
TEXTS: Mapping[str, str] = {
    "observation": "the current state, {style}",
    "reasoning": "why you choose these actions",
    "think": "why you choose these actions",
    "prediction": "the state after these actions, {style}",
}


def section_names(thoughts: Thoughts) -> tuple[str, ...]:
    """Return the tags of a form besides the answer's.

    >>> section_names("worldmodeling_symbolic")
    ('reasoning', 'prediction')
    """
    if thoughts in AROUND_ANSWER:
        return tuple(name for name in AROUND_ANSWER[thoughts][0] if name != ANSWER)
    return SECTIONS[_split(thoughts)[0]]


def response_pattern(thoughts: Thoughts, answer: str) -> str:
    """Return a regular expression for a response with these sections, each a group of its name; `answer` is that of the
    answer with its tags. Nothing else may be between them, except in `free_wm`."""
    if thoughts in AROUND_ANSWER:
        names, between = AROUND_ANSWER[thoughts]
        return between.join(answer if name == ANSWER else _section_pattern(name) for name in names)
    sections = r"\s*".join(map(_section_pattern, section_names(thoughts)))
    return rf"<think>\s*{sections}\s*</think>\s*{answer}"


def _section_pattern(name: str) -> str:
    return rf"<{name}>(?P<{name}>(?:(?!</?(?:think|{name})>).)*)</{name}>"


def format_response(thoughts: Thoughts, content: Mapping[str, str]) -> str:
    """Return a response with the content of each section and of the answer."""
    if thoughts in AROUND_ANSWER:
        return _tagged(AROUND_ANSWER[thoughts][0], content)
    return f"<think>{_tagged(section_names(thoughts), content)}</think>{_tagged((ANSWER,), content)}"


def _tagged(names: Sequence[str], content: Mapping[str, str]) -> str:
    return "".join(f"<{name}> {content[name]} </{name}>" for name in names)


def format_instruction(thoughts: Thoughts, separator: str) -> str:
    """Return the part of the system message that describes the form of a response."""
    style = STYLES.get(_split(thoughts)[1], "in words")
    content = {name: text.format(style=style) for name, text in TEXTS.items()}
    content[ANSWER] = f"your actions, separated by {separator}"
    rule = "you may reason between these parts" if thoughts == "free_wm" else "add nothing else"
    return f"Always respond in this form and {rule}:\n{format_response(thoughts, content)}"


def _split(thoughts: Thoughts) -> tuple[str, str]:
    """Return form and style."""
    form, _, style = thoughts.rpartition("_")
    return (form, style) if style in STYLES else (thoughts, "")
