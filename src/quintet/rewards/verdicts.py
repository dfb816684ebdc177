"""Verdicts of language models that judge: where a reply states them, and how they are read.

A verdict counts only where a judge states one: in brackets, in JSON, behind a label such as `Score:`, or as the first
word or the last line of the reply. Words and numbers elsewhere, such as quotations of the answer, do not count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from quintet.package_files import read_yaml
from quintet.rewards.thoughts import text_after_thoughts

Parser = Callable[[str], float | None]

MAX_SCORE: Final = 10.0
"""Maximum of a score that names none."""
MAX_JSON_STARTS: Final = 256
"""Number of braces at which JSON may begin."""
JSON_NAMES: Final = tuple(read_yaml(__file__)["json_names"])
"""Entries of a JSON reply that have the verdict, the first one that is there."""
MAXIMUM_NAMES: Final = ("max_score", "maximum", "max", "out_of", "scale")

_MARKUP = re.compile(r"[*`\u200b]|__|\\(?=[\[\]])|<\|\w{1,20}\|>|</s>")
_TAGS = re.compile(r"</?(?:answer|verdict|score|rating|judge?ment)>", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\{(?:\\text\{)?([^{}]*)\}{1,2}")
_RIGHT = frozenset({"yes", "true", "correct"})
_WORD = "(yes|no|true|false|correct|incorrect)"
_LABEL = "(?:score|rating|verdict|grade|decision|judge?ment|conclusion|result|final)"
_RANGE = r"(?:\s*\([^()\n]{1,30}\))?"
_IS = r"\s*(?:is|of|[:=-])?\s*:?\s*"
_LINE_START = r"^[#>\s-]*(?:(?:my|the|final|overall|total)\s+)*"
_NUMBER = r"([-+]?\d+(?:[.,]\d+)?)(?!\w|[.,]\d|\s*[-–]\s*\d)"
_QUOTED_TAG = re.compile(r"((?:^|(?<=[\s(]))[\"'“‘«`])\s*</?(?:seed:)?think(?:ing)?>", re.MULTILINE)
"""A tag of thoughts that a judge quotes from the answer."""
_JSON_START = re.compile(rf"(?:(?:^|\n)[^\S\n]*(?:json\s*)?|\b{_LABEL}\W*(?:is\W*)?)\Z", re.IGNORECASE)
_SCALE = re.compile(r"\[\[\s*\d+\s*\]\]\s*(?:to|-|–|—)\s*\[\[\s*\d+\s*\]\]")
_MAXIMUM_IN_BRACKETS = re.compile(r"(\d\s*(?:/|\bout of\b)\s*)\[\[\s*(\d+(?:[.,]\d+)?)\s*\]\]")
_BRACKETS = re.compile(
    r"\[\[\s*([^\[\]]{1,20}?)\s*\]\](?:\s*(?:/|\bout of\b)\s*(?:\[\[\s*)?(\d+(?:[.,]\d+)?)(?:\s*\]\])?)?"
)
_OUT_OF = re.compile(rf"{_NUMBER}\s*(?:(%)|(?:/|\bout of\b)\s*(\d+(?:[.,]\d+)?))?", re.IGNORECASE)
_LABELED_NUMBER = rf"(?<![\"'“‘«])\b(?:score|rating|verdict|grade)\b{_RANGE}{_IS}\[?{_OUT_OF.pattern}"
_LABELED = re.compile(_LABELED_NUMBER, re.IGNORECASE)
_LINE_LABELED = re.compile(f"{_LINE_START}{_LABELED_NUMBER}", re.IGNORECASE | re.MULTILINE)
_LINE_LABEL = re.compile(rf"{_LINE_START}{_LABEL}\b{_RANGE}{_IS}(\S.*)$", re.IGNORECASE | re.MULTILINE)
_STARTS_WITH_LABEL = re.compile(rf"{_LABEL}\s*[:=]\s*", re.IGNORECASE)
_ENDS_WITH_LABEL = re.compile(rf"\b{_LABEL}\W*(?:is\W*)?$", re.IGNORECASE)
_ONLY_ANSWER = re.compile(rf"(?:the\s+)?(?:final\s+)?answer\b{_IS}(\S.*)", re.IGNORECASE)
"""The only line of a reply: further lines may quote the answer that is judged."""
_FIRST_WORD = re.compile(
    rf"\W*{_WORD}(?:[\"'”’\]]?\s*(?:[.,;:!()\n—–#]|-\s|\Z)|\s+(?=(?:the|it|this|that|they|these|because|since|as|both)\b))",
    re.IGNORECASE,
)
_LAST_WORD = re.compile(
    rf"(?:[.?!\n]|\b(?:therefore|thus|hence|so|verdict|conclusion)\b[,:]?)[\s\"'(]*{_WORD}[\s.!)\"']*\Z", re.IGNORECASE
)
_LEAD = re.compile(
    r"\W*(?:(?:definitely|absolutely|certainly|clearly|sure|hm+|well|ok(?:ay)?|assistant|I(?:['’]d|\s+would)\s+say"
    r"|I\s+(?:think|believe)(?:\s+it\s+is)?|it(?:['’]s|\s+is)\s+an?)\b[\s,.:!–—]+)+",
    re.IGNORECASE,
)
"""What may precede the verdict as the first word."""
_CONTRADICTED = re.compile(
    r"\W*(?:yes|correct|true)\b[^.!?\n]*\b(?:(?:is|are|was|were)\s+(?:incorrect|wrong|false|not\s+(?:correct|right|equivalent))"
    r"|(?:does|do)(?:n['’]t|\s+not)\s+(?:agree|match))\b",
    re.IGNORECASE,
)
_AND_OTHER = re.compile(rf"\W*{_WORD}[\s,/&-]*(?:and|or|but|then|nor)?[^\S\n]*{_WORD}\b", re.IGNORECASE)


def parse_score(reply: str) -> float | None:
    """Return the score of a judge, 0 to 1; None if it is not unambiguous.

    In this order: `[[7]]`, `[[7/10]]` or `[[yes]]`; JSON with a verdict; `Score: 7` or "score of 7/10"; a reply that is
    only a number or such a fraction; yes or no, see `parse_yes_no`. Numbers without a maximum are out of 10.

    >>> parse_score("Nearly right. [[7]]"), parse_score("No, it isn't."), parse_score("That is not correct")
    (0.7, 0.0, None)
    """
    text = _final_text(reply)
    if _BRACKETS.search(text):
        return _bracketed(text, _value)
    if (entry := _json_verdict(text)) is not None:
        return _json_value(*entry)
    if _LABELED.search(text):
        return _labeled(text)
    return _value(text)


def parse_yes_no(reply: str) -> float | None:
    """Return 1 for yes and 0 for no; None if the reply does not state one of them as its verdict.

    In this order: `[[yes]]`, JSON with a verdict, the first word, the last line or sentence, and what follows a label
    such as `Verdict:` at the start of a line. If the first word and the last line differ, there is no verdict.

    >>> parse_yes_no("NO. It was published yesterday."), parse_yes_no("Yes and no")
    (0.0, None)
    """
    text = _final_text(reply)
    if _BRACKETS.search(text):
        return _bracketed(text, _yes_no)
    if (entry := _json_verdict(text)) is not None:
        value = entry[0]
        verdict = float(value) if isinstance(value, bool) else _yes_no(str(value))
        last = _LAST_WORD.search(text)
        return verdict if last is None or float(_is_right(last[1])) == verdict else None
    return _yes_no(text)


def _final_text(reply: str) -> str:
    """Return a reply without thoughts, emphasis and end tokens, with the contents of tags and boxes on own lines."""
    plain = _MARKUP.sub("", text_after_thoughts(_QUOTED_TAG.sub(r"\1", reply)))
    plain = _MAXIMUM_IN_BRACKETS.sub(r"\1\2", _SCALE.sub("", plain))
    return _BOX.sub(r"\n\1\n", _TAGS.sub("\n", plain)).strip()


def _bracketed(text: str, parse: Parser) -> float | None:
    """Return the verdict in brackets: the only one, the one that ends the text, or the only one behind a label.

    Brackets in quotation marks do not count, and there is no verdict if the text begins with another one than it ends
    with: a judge may quote what the answer demands.
    """
    verdicts = [match for match in _BRACKETS.finditer(text) if not _is_quoted(text, match)]
    if not verdicts:
        return None
    values = {_bracket_text(match) for match in verdicts}
    if len(values) > 1 and text[verdicts[-1].end() :].strip(" .\n"):
        labeled = {_bracket_text(match) for match in verdicts if _ENDS_WITH_LABEL.search(text[: match.start()])}
        return parse(labeled.pop()) if len(labeled) == 1 else None
    if len(values) > 1 and not text[: verdicts[0].start()].strip() and not _stands_alone(text, verdicts[-1]):
        return None
    return parse(_bracket_text(verdicts[-1]))


def _is_quoted(text: str, match: re.Match[str]) -> bool:
    """Return whether a match is in quotation marks that enclose neither the whole text nor the verdict of a label."""
    before = text[: match.start()]
    return len(before) > 1 and before.endswith(tuple("\"'“‘«")) and not _ENDS_WITH_LABEL.search(before)


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    """Return whether a match begins its line, or a label stands before it."""
    before = text[: match.start()].rpartition("\n")[2]
    return not before.strip() or _ENDS_WITH_LABEL.search(before) is not None


def _bracket_text(match: re.Match[str]) -> str:
    return match[1] if match[2] is None else f"{match[1]}/{match[2]}"


def _json_verdict(text: str) -> tuple[Any, Any] | None:
    """Return the verdict of the last JSON object that has one, and its maximum.

    The object has to begin a line and to end one; others are quotations.
    """
    for value in _json_objects(text):
        lowered = {str(name).lower(): entry for name, entry in value.items()}
        name = next((name for name in JSON_NAMES if name in lowered), None)
        if name is not None:
            return lowered[name], next((lowered[name] for name in MAXIMUM_NAMES if name in lowered), None)
    return None


def _json_objects(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a text that are in no other, the last one first."""
    decoder, end = json.JSONDecoder(), 0
    objects: list[Mapping[str, Any]] = []
    for match in islice(re.finditer(r"\{", text), MAX_JSON_STARTS):
        if match.start() < end or not _JSON_START.search(text, 0, match.start()):
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if not text[end:].partition("\n")[0].strip():
            objects.append(value)
    yield from reversed(objects)


def _json_value(value: Any, maximum: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float) and isinstance(maximum, int | float):
        return _share(float(value), float(maximum))
    return _share(float(value), MAX_SCORE) if isinstance(value, int | float) else _value(str(value))


def _labeled(text: str) -> float | None:
    """Return the labeled number: the last whose label begins a line, or else the only one."""
    at_lines = list(_LINE_LABELED.finditer(text))
    labeled = at_lines or list(_LABELED.finditer(text))
    is_unique = at_lines or len({match.groups() for match in labeled}) == 1
    return _number(labeled[-1]) if is_unique else None


def _value(text: str) -> float | None:
    """Parse a number, a fraction, or yes or no, also behind a label."""
    text = _STARTS_WITH_LABEL.sub("", text.strip())
    if number := _OUT_OF.fullmatch(text.rstrip(".")):
        return _number(number)
    return _yes_no(text)


def _number(match: re.Match[str]) -> float | None:
    value, percent, maximum = match.groups()
    limit = 100.0 if percent else float(maximum.replace(",", ".")) if maximum else MAX_SCORE
    return _share(float(value.replace(",", ".")), limit)


def _share(value: float, maximum: float) -> float | None:
    return value / maximum if math.isfinite(maximum) and maximum > 0 and 0 <= value <= maximum else None


def _yes_no(text: str) -> float | None:
    text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
    if _CONTRADICTED.match(text):
        return None
    if (both := _AND_OTHER.match(text)) and _is_right(both[1]) != _is_right(both[2]):
        return None
    first, last = _FIRST_WORD.match(text), _LAST_WORD.search(text)
    lines = _ONLY_ANSWER.findall(text) if _ONLY_ANSWER.fullmatch(text) else _LINE_LABEL.findall(text)
    labels = [word for line in lines if (word := _FIRST_WORD.match(line))]
    stated = {_is_right(match[1]) for match in (first, last, *(labels[-1:] if first is None else ())) if match}
    return float(stated.pop()) if len(stated) == 1 else None


def _is_right(word: str) -> bool:
    return word.lower() in _RIGHT
