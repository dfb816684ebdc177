"""Constraints that ROLL's `GeneralRuleRewardWorker` decides unlike IFEval, on the same rows.

Some of its functions read oddly: `verify_keyword_frequency` counts all words, and `validate_choice` wants the response
inside an option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from quintet.rewards.verifiers import ifeval_constraints
from quintet.rewards.verifiers.ifeval_constraints import ANSWER_MARK, is_json, is_near

PARAGRAPH_MARK = "* * *"
SENTENCE_END = re.compile(r"(?<=[.?])(?<!\w\.\w[.?])(?<![A-Z][a-z]\.)\s")


def _has_word_total(text: str, word: str, N: int) -> bool:  # noqa: N803 - named as in the rows
    """Count all words, whatever `word` is."""
    return len(re.findall(r"\b\w+\b", text.lower())) == N


def _lacks_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(word.lower() in text.lower() for word in forbidden_words)


def _has_sentences(text: str, N: int, quantifier: str) -> bool:  # noqa: N803
    return is_near(len(SENTENCE_END.split(text)), N, quantifier, 1)


def _has_paragraph_start(text: str, N: int, first_word: str, i: int) -> bool:  # noqa: N803
    paragraphs = text.split("\n\n")
    return len(paragraphs) == N and paragraphs[i - 1].strip().startswith(first_word)


def _has_marked_paragraphs(text: str, N: int) -> bool:  # noqa: N803
    lines = "\n".join(line.strip() for line in text.splitlines()).strip()
    paragraphs = lines.split(PARAGRAPH_MARK)
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def _has_postscript(text: str, postscript_marker: str) -> bool:
    start = text.find(postscript_marker)
    return start >= 0 and len(text[start:].strip()) > len(postscript_marker)


def _has_bullets(text: str, N: int) -> bool:  # noqa: N803
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def _has_title(text: str) -> bool:
    return re.search("<<.*?>>", text) is not None


def _is_in_option(text: str, options: Sequence[str]) -> bool:
    return any(text in option for option in options)


def _has_highlights(text: str, N: int) -> bool:  # noqa: N803
    return len(re.findall(r"\*.*?\*", text)) >= N


def _has_sections(text: str, N: int, section_splitter: str) -> bool:  # noqa: N803
    sections = text.split(section_splitter)
    return len(sections) - (sections[0] == "") == N


def _starts_with_prompt(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def _has_two_answers(text: str) -> bool:
    first, _, second = text.partition(ANSWER_MARK)
    return text.count(ANSWER_MARK) == 1 and first.strip() != second.strip()


def _is_uppercase(text: str) -> bool:
    return text == text.upper()


def _is_lowercase(text: str) -> bool:
    return text == text.lower()


def _has_capital_words(text: str, N: int, quantifier: str) -> bool:  # noqa: N803
    return is_near(len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, 0)


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


def _is_quoted(text: str) -> bool:
    return text.startswith('"') and text.endswith('"')


CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    **ifeval_constraints.CONSTRAINTS,
    "verify_keyword_frequency": _has_word_total,
    "validate_forbidden_words": _lacks_words,
    "verify_sentence_constraint": _has_sentences,
    "validate_paragraphs": _has_paragraph_start,
    "verify_paragraph_count": _has_marked_paragraphs,
    "verify_postscript": _has_postscript,
    "verify_bullet_points": _has_bullets,
    "validate_title": _has_title,
    "validate_choice": _is_in_option,
    "validate_highlighted_sections": _has_highlights,
    "validate_sections": _has_sections,
    "validate_json_format": is_json,
    "validate_repeat_prompt": _starts_with_prompt,
    "validate_two_responses": _has_two_answers,
    "validate_uppercase": _is_uppercase,
    "validate_lowercase": _is_lowercase,
    "validate_frequency_capital_words": _has_capital_words,
    "validate_end": _ends_with,
    "validate_quotation": _is_quoted,
}
"""Functions `(text, **arguments) -> bool` by the `func_name` of a row."""
