"""Overrides with plain values, such as `key=1e-6` or `key=[a,'b c']`, read without Hydra.

Hydra's parser takes 2 ms for each of the dozens of overrides of a run script, and 0.1 s to load. Whatever is not plain
(escapes, interpolations, functions, mappings, several values) is left to it.
"""

import re
from typing import Any

_KEY = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)=(.*)", re.ASCII)
_INTEGER = re.compile(r"[+-]?(0|[1-9]\d{0,17})", re.ASCII)
_FLOAT = re.compile(r"(?=.*[.eE])[+-]?(0|[1-9]\d*)(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_TEXT = re.compile(r"[A-Za-z_/][\w/.:-]*", re.ASCII)
_QUOTED = re.compile(r"'[^'\\$\x00-\x1f]*'|\"[^\"\\$\x00-\x1f]*\"")
_ITEMS = re.compile(
    rf"\[ *(?:(?:{_QUOTED.pattern}|[\w/.:+-]+)(?: *, *(?:{_QUOTED.pattern}|[\w/.:+-]+))*)? *\]", re.ASCII
)
_ITEM = re.compile(rf"{_QUOTED.pattern}|[\w/.:+-]+", re.ASCII)
_LITERALS = {"true": True, "false": False, "null": None}
_NOT_PLAIN = object()


def read_plain_override(text: str) -> tuple[str, Any] | None:
    """Return the key and the value of an override; None if it needs Hydra's parser.

    >>> read_plain_override("actor.optim.lr=1e-6")
    ('actor.optim.lr', 1e-06)
    """
    matched = _KEY.fullmatch(text)
    value = _value(matched[2]) if matched else _NOT_PLAIN
    return None if matched is None or value is _NOT_PLAIN else (matched[1], value)


def _value(text: str) -> Any:
    if _ITEMS.fullmatch(text):
        items = [_scalar(item) for item in _ITEM.findall(text)]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return _scalar(text)


def _scalar(text: str) -> Any:
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    return text if _TEXT.fullmatch(text) and text.lower() not in ("inf", "nan") else _NOT_PLAIN
