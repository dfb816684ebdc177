"""Constraints on the form of a response, as IFEval defines them (Zhou et al. 2023), with the names and arguments that
rows for open-instruct and ROLL have.

Where the implementations of IFEval and open-instruct differ, these follow the wording of the instruction: words are
whole words, empty parts do not count, and JSON may be fenced.
"""

# ruff: noqa: N803 - arguments are named as in the rows
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature

SENTENCE_END = re.compile(r"(?<=[.?!])(?<!\w\.\w[.?!])(?<![A-Z][a-z]\.)\s+")
BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-(?!-))(?![ \t]*(?:[*-][ \t]*)*$)", re.MULTILINE)
"""Not a line of asterisks or hyphens, which is a divider, and not bold text."""
HIGHLIGHT = re.compile(r"\*\*[^\n*]*[^\s*][^\n*]*\*\*|\*[^\n*]*[^\s*][^\n*]*\*")
FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.IGNORECASE | re.DOTALL)
DIVIDER = re.compile(r"\* \* \*|^[ \t]*\*\*\*[ \t]*$", re.MULTILINE)
"""IFEval's rows ask for `***`, rows of open-instruct for `* * *`."""
ANSWER_MARK = "******"


def is_near(count: int, number: int, quantifier: str, tolerance: int) -> bool:
    """Return whether a count is at least, at most or around a number."""
    if quantifier == "at least":
        return count >= number
    if quantifier == "at most":
        return count <= number
    return quantifier == "around" and abs(count - number) <= tolerance


def _count_words(text: str, word: str) -> int:
    """Count whole words or phrases, in upper or lower case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def has_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    """Require all keywords, also as parts of words, in upper or lower case."""
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def is_language(text: str, language: str) -> bool:
    """Require the language that `langdetect` finds."""
    from langdetect import DetectorFactory, detect

    DetectorFactory.seed = 0  # its guesses on short texts are random otherwise
    return bool(detect(text) == language)


def _has_divided_paragraphs(text: str, N: int) -> bool:
    """Count the texts between dividers, none of which may be empty; the text may begin and end with a divider."""
    paragraphs = _without_empty_ends(DIVIDER.split(text))
    return len(paragraphs) == N and all(paragraphs)


def _without_empty_ends(parts: Sequence[str]) -> list[str]:
    """Return parts without surrounding space, and without an empty first and last one."""
    stripped = [part.strip() for part in parts]
    start, end = not stripped[0], len(stripped) - (not stripped[-1])
    return stripped[start:end]


def has_words(text: str, N: int, quantifier: str) -> bool:
    """Count words; `around` allows a difference of a tenth, or one word."""
    return is_near(len(text.split()), N, quantifier, _tenth(N))


def _tenth(number: int) -> int:
    return max(round(number * 0.1), 1)


def _has_paragraph_start(text: str, N: int, first_word: str, i: int) -> bool:
    """Require N paragraphs between empty lines, the i-th of which starts with a word."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return len(paragraphs) == N and _begins_with_word(paragraphs[i - 1], first_word)


def _begins_with_word(text: str, word: str) -> bool:
    return re.match(rf"\W*{re.escape(word.strip())}(?!\w)", text, re.IGNORECASE) is not None


def _has_postscript(text: str, postscript_marker: str) -> bool:
    """Require text after the first marker, which may be in lower case and have spaces after its periods."""
    marker = re.sub(r"\\\.(?=.)", r"\\.\\s?", re.escape(postscript_marker.strip()))
    return re.search(rf"{marker}\s*\S", text, re.IGNORECASE) is not None


def is_json(text: str) -> bool:
    """Require JSON and nothing else."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_fenced_json(text: str) -> bool:
    fenced = FENCED.fullmatch(text.strip())
    return is_json(text if fenced is None else fenced[1])


def _has_two_answers(text: str) -> bool:
    """Require two different answers with `******` between them; the text may begin and end with it."""
    answers = _without_empty_ends(text.split(ANSWER_MARK))
    return len(answers) == 2 and all(answers) and answers[0] != answers[1]


def _is_quoted(text: str) -> bool:
    quoted = text.strip()
    return len(quoted) > 1 and quoted.startswith('"') and quoted.endswith('"')


LANGUAGE = "validate_response_language"
CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "verify_keywords": has_keywords,
    "verify_keyword_frequency": lambda text, word, N: _count_words(text, word) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(_count_words(text, word) for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: len(letter) == 1 and text.count(letter) == N,
    LANGUAGE: is_language,
    "verify_paragraph_count": _has_divided_paragraphs,
    "validate_word_constraint": has_words,
    "verify_sentence_constraint": lambda text, N, quantifier: is_near(
        len(SENTENCE_END.split(text.strip())), N, quantifier, 1
    ),
    "validate_paragraphs": _has_paragraph_start,
    "verify_postscript": _has_postscript,
    "validate_placeholders": lambda text, N: len(re.findall(r"\[.*?\]", text)) >= N,
    "verify_bullet_points": lambda text, N: len(BULLET.findall(text)) == N,
    "validate_title": lambda text: re.search(r"<<[^\n<>]*[^\s<>][^\n<>]*>>", text) is not None,
    "validate_choice": lambda text, options: any(
        _count_words(text, option) or option.strip() == text.strip() for option in options
    ),
    "validate_highlighted_sections": lambda text, N: len(HIGHLIGHT.findall(text)) >= N,
    # counts headings such as `Section 1`.
    "validate_sections": lambda text, N, section_splitter: (
        len(re.findall(rf"(?<!\w){re.escape(section_splitter.strip())}\s?\d+", text, re.IGNORECASE)) >= N
    ),
    "validate_json_format": _is_fenced_json,
    "validate_repeat_prompt": lambda text, original_prompt: (
        " ".join(text.split()).casefold().startswith(" ".join(original_prompt.split()).casefold())
    ),
    "validate_two_responses": _has_two_answers,
    "validate_uppercase": str.isupper,
    "validate_lowercase": str.islower,
    "validate_frequency_capital_words": lambda text, N, quantifier: is_near(
        len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, _tenth(N)
    ),
    "validate_end": lambda text, end_phrase: (
        text.strip().strip('"').rstrip().casefold().endswith(end_phrase.strip().casefold())
    ),
    "validate_quotation": _is_quoted,
    "validate_no_commas": lambda text: "," not in text,
}
"""Functions `(text, **arguments) -> bool` by the `func_name` of a row."""
QUANTIFIERS = ("at least", "at most", "around")
ARGUMENTS = {name: tuple(signature(constraint).parameters)[1:] for name, constraint in CONSTRAINTS.items()}
"""Arguments of the constraints besides the text, with the names that rows have."""
LISTS = frozenset({"keyword_list", "forbidden_words", "options"})
INTEGERS = frozenset({"N", "i"})
"""Arguments that are lists of texts, and whole numbers; others are texts."""
