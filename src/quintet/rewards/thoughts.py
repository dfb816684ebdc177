"""The part of a text behind the thoughts of a model: what counts as its answer or verdict."""

from __future__ import annotations

THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Tags around thoughts, as models write them."""


def text_after_thoughts(text: str) -> str:
    """Return the text after the last thought, and before one that is not closed; empty if the text ends within its
    first thought.

    The opening tag may be missing, as it is if the prompt ends with it.

    >>> text_after_thoughts("<think>B?</think> C"), text_after_thoughts("B?</think> C"), text_after_thoughts("<think>B")
    (' C', ' C', '')
    """
    for opening, closing in THOUGHT_TAGS:
        text = text.rpartition(closing)[2].partition(opening)[0]
    return text
