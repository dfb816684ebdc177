"""Formats of responses that earn the format reward (`reward.format`)."""

from __future__ import annotations

from quintet.rewards.answer_extraction import extract_boxed, extract_tagged, has_single_tag


def has_format(name: str, text: str) -> bool:
    r"""Return whether a text has a format: `think_answer` is `<think>…</think><answer>…</answer>` and nothing else,
    `answer_tag` has one `<answer>…</answer>`, `boxed` a closed `\boxed{}`.

    Raises:
        ValueError: there is no such format.
    """
    if name == "boxed":
        return bool(extract_boxed(text, braces_only=True))
    if name == "answer_tag":
        return has_single_tag(text, "answer") and bool(extract_tagged(text))
    if name == "think_answer":
        return _is_think_answer(text.strip())
    raise ValueError(f"there is no format {name!r}")


def _is_think_answer(text: str) -> bool:
    if not (has_single_tag(text, "think") and has_single_tag(text, "answer")):
        return False
    thought, _, rest = text.partition("</think>")
    rest = rest.strip()
    return thought.startswith("<think>") and rest.startswith("<answer>") and rest.endswith("</answer>")
