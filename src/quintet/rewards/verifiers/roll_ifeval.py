"""Constraints that ROLL's `GeneralRuleRewardWorker` decides unlike IFEval, on the same rows.

Some of its functions read oddly: `verify_keyword_frequency` counts all words, and `validate_choice` wants the response
inside an option.
"""

# ruff: noqa: N803 - arguments are named as in the rows
from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from quintet.rewards.verifiers import ifeval_constraints
from quintet.rewards.verifiers.ifeval_constraints import ANSWER_MARK, is_json, is_near

PARAGRAPH_MARK = "* * *"
SENTENCE_END = re.compile(r"(?<=[.?])(?<!\w\.\w[.?])(?<![A-Z][a-z]\.)\s")


def _has_paragraph_start(text: str, N: int, first_word: str, i: int) -> bool:
    paragraphs = text.split("\n\n")
    return len(paragraphs) == N and paragraphs[i - 1].strip().startswith(first_word)


def _has_marked_paragraphs(text: str, N: int) -> bool:
    lines = "\n".join(line.strip() for line in text.splitlines()).strip()
    paragraphs = lines.split(PARAGRAPH_MARK)
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def _has_postscript(text: str, postscript_marker: str) -> bool:
    start = text.find(postscript_marker)
    return start >= 0 and len(text[start:].strip()) > len(postscript_marker)


def _has_sections(text: str, N: int, section_splitter: str) -> bool:
    sections = text.split(section_splitter)
    return len(sections) - (sections[0] == "") == N


def _has_two_answers(text: str) -> bool:
    first, _, second = text.partition(ANSWER_MARK)
    return text.count(ANSWER_MARK) == 1 and first.strip() != second.strip()


CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    **ifeval_constraints.CONSTRAINTS,
    # counts all words, whatever `word` is.
    "verify_keyword_frequency": lambda text, word, N: len(re.findall(r"\b\w+\b", text.lower())) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_sentence_constraint": lambda text, N, quantifier: is_near(len(SENTENCE_END.split(text)), N, quantifier, 1),
    "validate_paragraphs": _has_paragraph_start,
    "verify_paragraph_count": _has_marked_paragraphs,
    "verify_postscript": _has_postscript,
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": lambda text: re.search("<<.*?>>", text) is not None,
    "validate_choice": lambda text, options: any(text in option for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N,
    "validate_sections": _has_sections,
    "validate_json_format": is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": _has_two_answers,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: is_near(
        len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, 0
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
}
"""Functions `(text, **arguments) -> bool` by the `func_name` of a row."""
