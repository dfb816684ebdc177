"""Constraints on the form of a response, with the names and arguments of IFEval rows in ROLL (Zhou et al. 2023).

They decide as ROLL's functions do, also where these read oddly: `verify_keyword_frequency` counts all words, and
`validate_choice` wants the response inside an option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

SENTENCE_END = re.compile(r"(?<=[.?])(?<!\w\.\w[.?])(?<![A-Z][a-z]\.)\s")
PARAGRAPH_MARK = "* * *"
ANSWER_MARK = "******"


def _is_near(count: int, number: int, quantifier: str, tolerance: int) -> bool:
    if quantifier == "at least":
        return count >= number
    if quantifier == "at most":
        return count <= number
    return quantifier == "around" and abs(count - number) <= tolerance


def _has_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def _has_word_total(text: str, word: str, N: int) -> bool:  # noqa: N803 - named as in the rows
    """Count all words, whatever `word` is, as ROLL does."""
    return len(re.findall(r"\b\w+\b", text.lower())) == N


def _lacks_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(word.lower() in text.lower() for word in forbidden_words)


def _has_letter_count(text: str, letter: str, N: int) -> bool:  # noqa: N803
    return len(letter) == 1 and text.count(letter) == N


def _is_language(text: str, language: str) -> bool:
    from langdetect import DetectorFactory, detect

    DetectorFactory.seed = 0  # its guesses on short texts are random otherwise
    return bool(detect(text) == language)


def _has_marked_paragraphs(text: str, N: int) -> bool:  # noqa: N803
    """Count the texts between `* * *`, none of which may be empty."""
    lines = "\n".join(line.strip() for line in text.splitlines()).strip()
    paragraphs = lines.split(PARAGRAPH_MARK)
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def _has_words(text: str, N: int, quantifier: str) -> bool:  # noqa: N803
    """Count words; `around` allows a difference of a tenth, or one word."""
    return _is_near(len(text.split()), N, quantifier, max(round(N * 0.1), 1))


def _has_sentences(text: str, N: int, quantifier: str) -> bool:  # noqa: N803
    return _is_near(len(SENTENCE_END.split(text)), N, quantifier, 1)


def _has_paragraph_start(text: str, N: int, first_word: str, i: int) -> bool:  # noqa: N803
    """Require N paragraphs between empty lines, the i-th of which starts with a word."""
    paragraphs = text.split("\n\n")
    return len(paragraphs) == N and paragraphs[i - 1].strip().startswith(first_word)


def _has_postscript(text: str, postscript_marker: str) -> bool:
    """Require text after the first marker."""
    start = text.find(postscript_marker)
    return start >= 0 and len(text[start:].strip()) > len(postscript_marker)


def _has_placeholders(text: str, N: int) -> bool:  # noqa: N803
    return len(re.findall(r"\[.*?\]", text)) >= N


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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _starts_with_prompt(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def _has_two_answers(text: str) -> bool:
    """Require two different answers around the only `******`."""
    first, _, second = text.partition(ANSWER_MARK)
    return text.count(ANSWER_MARK) == 1 and first.strip() != second.strip()


def _is_uppercase(text: str) -> bool:
    return text == text.upper()


def _is_lowercase(text: str) -> bool:
    return text == text.lower()


def _has_capital_words(text: str, N: int, quantifier: str) -> bool:  # noqa: N803
    return _is_near(len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, 0)


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


def _is_quoted(text: str) -> bool:
    return text.startswith('"') and text.endswith('"')


def _lacks_commas(text: str) -> bool:
    return "," not in text


LANGUAGE = "validate_response_language"
CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "verify_keywords": _has_keywords,
    "verify_keyword_frequency": _has_word_total,
    "validate_forbidden_words": _lacks_words,
    "verify_letter_frequency": _has_letter_count,
    LANGUAGE: _is_language,
    "verify_paragraph_count": _has_marked_paragraphs,
    "validate_word_constraint": _has_words,
    "verify_sentence_constraint": _has_sentences,
    "validate_paragraphs": _has_paragraph_start,
    "verify_postscript": _has_postscript,
    "validate_placeholders": _has_placeholders,
    "verify_bullet_points": _has_bullets,
    "validate_title": _has_title,
    "validate_choice": _is_in_option,
    "validate_highlighted_sections": _has_highlights,
    "validate_sections": _has_sections,
    "validate_json_format": _is_json,
    "validate_repeat_prompt": _starts_with_prompt,
    "validate_two_responses": _has_two_answers,
    "validate_uppercase": _is_uppercase,
    "validate_lowercase": _is_lowercase,
    "validate_frequency_capital_words": _has_capital_words,
    "validate_end": _ends_with,
    "validate_quotation": _is_quoted,
    "validate_no_commas": _lacks_commas,
}
"""Functions `(text, **arguments) -> bool` by the `func_name` of a row."""
