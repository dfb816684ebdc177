"""Values that only the code of a fork knows, such as the name of its own reward manager."""

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from quintet.config.dialects.composition.foreign_config import MergedConfig
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.typos import is_misspelt
from quintet.config.dotted import set_value
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

MAX_FILES, MAX_SIZE = 5_000, 1 << 20
"""Modules of a checkout that are searched, and bytes of one."""
OTHER_CODE = frozenset({"test", "tests", "docs"})
"""Directories without code that a run executes."""
QUOTED = r"""["']{name}["']"""
BEFORE_NAME = (
    r"[=!]=",
    r"\bregister\w*\(",
    r"\bcase\b",
    r"\b[A-Z][A-Z0-9_]*\s*=(?!=)",
    r"\bin\s*[\[({][^\])}\n]{0,200}",
)
"""Code before a name that it compares, registers, has as a constant or lists."""
DECIDED = rf"(?:{'|'.join(BEFORE_NAME)})\s*{QUOTED}|{QUOTED}\s*:"
"""A name by which code decides."""


def fork_value_problems(
    values: ForeignValues, illegal: Iterable[ConfigProblem], checkout: Path | None
) -> Iterator[ConfigProblem]:
    """Yield, of the illegal values, the names that the code of a checkout has: they wait for that code."""
    for problem in illegal:
        names = _unknown_names(values, problem.key)
        spec = values.dialect.spec(problem.key)
        choices = () if spec is None else spec.value_type.choices
        modules = [None if checkout is None else _module_with(name, checkout, choices) for name in names]
        if names and None not in modules:
            planned = format_value(replacement(values, problem.key))
            message = f"{values.describe(problem.key)} waits: value of this fork ({modules[0]}); planned as {planned}"
            yield replace(problem, message=message, remedy=f"set {problem.key} to {planned}")


def _unknown_names(values: ForeignValues, key: str) -> list[str]:
    """Return the names in a value that are none of the choices of a key; empty if it has no choices or other values."""
    spec, value = values.dialect.spec(key), values[key]
    names = value if isinstance(value, list) else [value]
    if spec is None or not spec.value_type.choices or not all(isinstance(name, str) for name in names):
        return []
    return [name for name in names if name not in spec.value_type.choices]


def replacement(values: ForeignValues, key: str) -> Any:
    """Return the value with which a run is planned in place of one of a fork: of a list, the names that are known."""
    spec, value = values.dialect.spec(key), values[key]
    if isinstance(value, list):
        return [name for name in value if name not in _unknown_names(values, key)]
    default = None if spec is None else values.merged.interpolated(spec.default)
    return values.dialect.planned_for_forks.get(key, default)


def without_fork_values(values: ForeignValues, keys: Iterable[str]) -> ForeignValues:
    """Return the values with others in place of those of a fork."""
    plain: dict[Any, Any] = deepcopy(dict(values.merged.plain))
    for key in keys:
        set_value(plain, key, replacement(values, key))
    return replace(values, merged=MergedConfig(plain, values.merged.sources))


def _module_with(name: str, checkout: Path, choices: Iterable[Any]) -> Path | None:
    """Return the first module of a checkout that has a name in quotes.

    A name like one of the framework's choices may be misspelt, and has to be one by which code decides.
    """
    is_slip = any(is_misspelt(name, str(choice)) for choice in choices)
    pattern = re.compile((DECIDED if is_slip else QUOTED).replace("{name}", re.escape(name)))
    for file in islice(sorted(checkout.rglob("*.py")), MAX_FILES):
        if OTHER_CODE.isdisjoint(file.relative_to(checkout).parts) and _is_small_file(file):
            text = file.read_text(encoding="utf-8", errors="replace")
            if name in text and pattern.search(text):
                return file
    return None


def _is_small_file(file: Path) -> bool:
    return file.is_file() and file.stat().st_size <= MAX_SIZE
