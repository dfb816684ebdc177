"""The part of a text behind the thoughts of a model: what counts as its answer or verdict."""

from __future__ import annotations

import re

THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Tags around thoughts, as models write them."""
_OPENED = re.compile(rf"(?:{'|'.join(re.escape(opening) for opening, _ in THOUGHT_TAGS)})\s*\Z")


def opened_thought(prompt: str) -> str:
    r"""Return the tag that a prompt ends with, and the whitespace after it, if a chat template has opened the thought
    of the response; otherwise an empty text.

    >>> opened_thought("<|im_start|>assistant\n<think>\n"), opened_thought("<|im_start|>assistant\n")
    ('<think>\n', '')
    """
    match = _OPENED.search(prompt)
    return match[0] if match else ""


def continue_thought(response: str, prefix: str) -> str:
    r"""Return a written response without the `prefix` that its prompt ends with already, see `opened_thought`.

    >>> continue_thought("<think>\n2 and 2</think> 4", "<think>\n"), continue_thought("<think>2</think> 4", "")
    ('2 and 2</think> 4', '<think>2</think> 4')
    """
    tag = prefix.strip()
    start = response.lstrip()
    if not tag or not start.startswith(tag):
        return response
    return start.removeprefix(tag).removeprefix(prefix[len(tag) :])


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


def final_text(text: str) -> str:
    """Return the text after the thoughts, or the whole text if none is there, as verl's verifiers read it.

    >>> final_text("<think>3</think> 4"), final_text("<think>3</think>")
    (' 4', '<think>3</think>')
    """
    after = text_after_thoughts(text)
    return after if after.strip() else text
