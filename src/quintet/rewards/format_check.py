"""Formats of responses that earn the format reward (`reward.format`)."""

from __future__ import annotations

from quintet.rewards.answer_extraction import extract_boxed, extract_tagged, has_single_tag
from quintet.rewards.thoughts import text_after_thoughts


def has_format(name: str, text: str) -> bool:
    r"""Return whether a text has a format: `think_answer` is `<think>…</think><answer>…</answer>` and nothing else;
    after the thoughts, `answer_tag` has one `<answer>…</answer>`, and `boxed` a closed `\boxed{}`.

    Raises:
        ValueError: there is no such format.
    """
    final = text_after_thoughts(text)
    if name == "boxed":
        return bool(extract_boxed(final, braces_only=True))
    if name == "answer_tag":
        return has_single_tag(final, "answer") and bool(extract_tagged(final))
    if name == "think_answer":
        return _is_think_answer(text.strip())
    raise ValueError(f"there is no format {name!r}")


def _is_think_answer(text: str) -> bool:
    if not (has_single_tag(text, "think") and text.startswith("<think>")):
        return False
    # thoughts may mention the tags of the answer
    answer = text.partition("</think>")[2].strip()
    return has_single_tag(answer, "answer") and answer.startswith("<answer>") and answer.endswith("</answer>")
