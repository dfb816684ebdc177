"""The forms an answer may have to have (`reward.format`)."""

from __future__ import annotations

from quintet.rewards.reading import boxed, opened_and_closed, tagged

__all__ = ["has_form"]


def has_form(form: str, text: str) -> bool:
    r"""Whether a text has the form: `think_answer` is `<think>…</think><answer>…</answer>` and nothing else,
    `answer_tag` has one `<answer>…</answer>`, `boxed` a closed `\boxed{}`.

    Raises:
        ValueError: there is no such form.
    """
    if form == "boxed":
        return bool(boxed(text))
    if form == "answer_tag":
        return opened_and_closed(text, "answer") and bool(tagged(text))
    if form == "think_answer":
        return _thought_then_answered(text.strip())
    raise ValueError(f"there is no form {form!r}")


def _thought_then_answered(text: str) -> bool:
    if not (opened_and_closed(text, "think") and opened_and_closed(text, "answer")):
        return False
    thought, _, rest = text.partition("</think>")
    rest = rest.strip()
    return thought.startswith("<think>") and rest.startswith("<answer>") and rest.endswith("</answer>")
