"""Sections of thoughts: the policy describes the observation, reasons, and predicts the next observation.

The forms are those of VAGEN (Wang et al. 2025, arXiv:2510.16907); `rollout.thoughts` selects one.
"""

from __future__ import annotations

from collections.abc import Mapping

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
TEXTS: Mapping[str, str] = {
    "observation": "the current state, {style}",
    "reasoning": "why you choose these actions",
    "prediction": "the state after these actions, {style}",
}


def section_names(thoughts: Thoughts) -> tuple[str, ...]:
    """Return the tags of a form.

    >>> section_names("worldmodeling_symbolic")
    ('reasoning', 'prediction')
    """
    return SECTIONS[_split(thoughts)[0]]


def thought_pattern(thoughts: Thoughts) -> str:
    """Return a regular expression for thoughts with these sections, each a group of its name, and nothing else."""
    sections = r"\s*".join(
        rf"<{name}>(?P<{name}>(?:(?!</?(?:think|{name})>).)*)</{name}>" for name in section_names(thoughts)
    )
    return rf"<think>\s*{sections}\s*</think>\s*"


def format_thoughts(thoughts: Thoughts, content: Mapping[str, str]) -> str:
    """Return thoughts with the content of each section."""
    sections = "".join(f"<{name}> {content[name]} </{name}>" for name in section_names(thoughts))
    return f"<think>{sections}</think>"


def format_instruction(thoughts: Thoughts, separator: str) -> str:
    """Return the part of the system message that describes the form of a response."""
    style = STYLES.get(_split(thoughts)[1], "in words")
    content = {name: text.format(style=style) for name, text in TEXTS.items()}
    answer = f"<answer> your actions, separated by {separator} </answer>"
    return f"Always respond in this form and add nothing else:\n{format_thoughts(thoughts, content)}{answer}"


def _split(thoughts: Thoughts) -> tuple[str, str]:
    """Return form and style."""
    form, _, style = thoughts.rpartition("_")
    return (form, style) if style in STYLES else (thoughts, "")
