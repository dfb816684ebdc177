"""Hints of printed errors, followed literally: what they say to set or to leave out is set or left out."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quintet import errors
from quintet.config.problems import ConfigProblem
from quintet.errors import UserError

SRC = Path(__file__).parents[2] / "src/quintet"
ERRORS = errors.__file__
VALUE = r"""\[[^]]*\]|\{[^}]*\}|\$\{[^}]*\}|list\([^)]*\)\)|'[^']*'|"[^"]*"|[^\s,;()?]+"""
ASSIGNMENT = re.compile(rf"(?<![\w.,])([a-z_][\w.,]*)=({VALUE})")
OMISSION = re.compile(r"leave (it|the key|`?[\w.,]+`?(?: and [\w.,]+)*) out")
SUGGESTION = re.compile(r"did you mean ([\w./-]+(?: or [\w./-]+)*)\?")
CHOICE = re.compile(r"it belongs to ([\w.]+)=(\w+(?: or \w+)*)")


def printed_hints(text: str) -> dict[str, str]:
    """The hint below each message of an error, or at its end."""
    lines = text.removeprefix("quintet: ").split("\n")
    hints = {line: hint.strip() for line, hint in pairwise([*lines, ""]) if hint.startswith("  ")}
    return hints | {line: line for line in lines if "; did you mean" in line}


def followed(message: str, hint: str, words: Sequence[str]) -> Iterator[list[str]]:
    """The arguments `KEY=VALUE` after each alternative of a hint."""
    key = re.match(r"(?:unknown key )?([\w.,]+)", message)
    for alternative in hint.split(", or "):
        yield from _changed(alternative, key[1] if key else "", words, is_name=message.startswith("unknown key"))


def _changed(alternative: str, key: str, words: Sequence[str], *, is_name: bool) -> Iterator[list[str]]:
    if choice := CHOICE.search(alternative):
        yield from (_with(words, choice[1], name) for name in choice[2].split(" or "))
        return
    if suggestion := SUGGESTION.search(alternative):
        for name in suggestion[1].split(" or "):
            is_sibling = "." in name and name.rpartition(".")[0] == key.rpartition(".")[0]
            yield _renamed(words, key, name) if is_name or is_sibling else _with(words, key, name)
        return
    if alternative.startswith("set it to "):
        return  # a description of values
    changed, omission, assignments = list(words), OMISSION.search(alternative), ASSIGNMENT.findall(alternative)
    assert omission or assignments, f"a hint that cannot be followed: {alternative}"
    for name in omission[1].replace("`", "").split(" and ") if omission else ():
        changed = _without(changed, key if name in ("it", "the key") else name)
    if alternative.startswith("set the keys in it"):
        changed = _without(changed, key)
    for name, value in assignments:
        changed = _with(changed, name, value)
    yield changed


def _with(words: Sequence[str], key: str, value: str) -> list[str]:
    quoted = len(value) > 2 and value[0] == value[-1] == "'"
    return [*_without(words, key), f"{key}={value[1:-1] if quoted else value}"]


def _without(words: Sequence[str], key: str) -> list[str]:
    return [word for word in words if not re.match(rf"{re.escape(key)}[.=]", word)]


def _renamed(words: Sequence[str], key: str, name: str) -> list[str]:
    return [name + word.removeprefix(key) if word.startswith((f"{key}=", f"{key}.")) else word for word in words]


CONSTRUCTORS = {
    "ConfigProblem": 4,
    "setting_problem": 4,
    "problem": 2,
    "nearest_problem": 0,
    "divisor_problems": 0,
    "multiple_problems": 0,
    "MachineError": 1,
    "UserError": 1,
    "ConfigError": 9,
    "TemplateLimitError": 9,
    "_unsupported": 0,
    "_invalid_column": 4,
    "image_error": 3,
    "read_error": 1,
    "_raise_option_error": 3,
}
"""Functions that make an error with a hint, and the position of the hint; 0 if there is always one."""


@dataclass(frozen=True)
class Site:
    """A place in the source that gives a hint."""

    path: str
    function: str
    lines: range

    def __str__(self) -> str:
        return f"{self.path}:{self.lines.start} {self.function}"


def hint_sites(directory: Path) -> list[Site]:
    """All places below a directory that give a hint."""
    return [site for path in sorted(directory.rglob("*.py")) for site in _sites(path)]


def _sites(path: Path) -> Iterator[Site]:
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and function.name not in CONSTRUCTORS:
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and _gives_hint(call):
                    lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
                    yield Site(str(path.relative_to(SRC)), function.name, lines)


def _gives_hint(call: ast.Call) -> bool:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name not in CONSTRUCTORS:
        return False
    position, keywords = CONSTRUCTORS[name], {keyword.arg for keyword in call.keywords}
    return position == 0 or len(call.args) > position or "hint" in keywords


@contextmanager
def recorded_sites() -> Iterator[set[tuple[str, int]]]:
    """Files and lines of the places that give hints meanwhile."""
    places: set[tuple[str, int]] = set()

    def note() -> None:
        frame = sys._getframe(2)
        while frame.f_back and (frame.f_code.co_name in CONSTRUCTORS or frame.f_code.co_filename == ERRORS):
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SRC):
            places.add((str(path.relative_to(SRC)), frame.f_lineno))

    with pytest.MonkeyPatch.context() as patch:
        for cls in (ConfigProblem, UserError):
            patch.setattr(cls, "__init__", _noting(cls.__init__, note))
        yield places


def _noting(init: Any, note: Any) -> Any:
    def noting(self: Any, *values: Any, **named: Any) -> None:
        init(self, *values, **named)
        note()

    return noting
