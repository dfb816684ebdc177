"""Limits of interpolation, against values that grow exponentially: `a: ${b}${b}`, `b: ${c}${c}`, and so on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.problems import source_of
from quintet.errors import ConfigError

MAX_LENGTH = 1_000_000
"""Characters of a value after interpolation."""
MAX_CHAIN = 64
"""Length of a chain of interpolations."""
MAX_TEXT, MAX_FILE_TEXT, MAX_NESTING = 2_000, 40_000, 16
"""Characters of one text with `${…}` and of all in a file, and nesting of `${…}`: OmegaConf's parser is slow."""
REFERENCE = re.compile(
    r"\$\{\s*(?:oc\.(?:select|dict\.keys|dict\.values|create|deprecated):)?\s*([^${}:,\s]*)[^${}:]*\}"
)
REFERENCE_START = re.compile(r"\$\{\s*([\w.]+)\.\$\{")


def check_growth(tree: Any, sources: Mapping[str, str]) -> None:
    """Refuse values that would fill the memory.

    Raises:
        ConfigError: a value is too long after interpolation.
    """
    texts = dict(_interpolations(tree, ""))
    sizes: dict[str, int] = {}
    for key in texts:
        if _length(key, texts, sizes, 0) > MAX_LENGTH:
            source = source_of(key, sources)
            message = f"{key} ({source}) has more than {MAX_LENGTH:,} characters after interpolation"
            raise ConfigError(message, key=key, source=source, hint="write the values out")


def check_grammar(tree: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse `${…}` that cannot be parsed in a short time.

    Raises:
        ConfigError: a text is malformed, too long or nested too deeply.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    total = 0
    for key, text in _interpolations(tree, ""):
        source, total = source_of(key, sources), total + len(text)
        problem = "is too long" if len(text) > MAX_TEXT or total > MAX_FILE_TEXT else None
        problem = (
            "is nested too deeply" if text.count("${") > 8 * MAX_NESTING or _depth(text) > MAX_NESTING else problem
        )
        try:
            if problem is None:
                OmegaConf.create({"text": text})
                continue
        except OmegaConfBaseException as error:
            problem = f"cannot be parsed: {next(iter(str(error).splitlines()), '')}"
        message = f"{key} ({source}): its ${{…}} {problem}"
        raise ConfigError(message, key=key, value=text, source=source, hint="fix the ${…} in it")


def _depth(text: str) -> int:
    depth = deepest = 0
    for found in re.finditer(r"\$\{|\}", text):
        depth += 1 if found[0] == "${" else -1
        deepest = max(depth, deepest)
    return deepest


def _interpolations(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the values with interpolations."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _interpolations(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _interpolations(value, f"{prefix}.{number}")
    elif isinstance(tree, str) and "${" in tree:
        yield prefix, tree


def _length(key: str, texts: Mapping[str, str], sizes: dict[str, int], depth: int) -> int:
    """Return the length of a value after interpolation; a cycle counts once and is reported when the key is read."""
    if key in sizes:
        return sizes[key]
    sizes[key] = 0
    if depth > MAX_CHAIN:
        raise ConfigError(f"{key} follows from more than {MAX_CHAIN} others", key=key, hint="write the value out")
    total = len(texts[key])
    for target in _targets(key, texts[key]):
        inside = (other for other in texts if other == target or other.startswith(f"{target}."))
        total += sum(_length(other, texts, sizes, depth + 1) for other in inside)
    sizes[key] = min(total, MAX_LENGTH + 1)
    return sizes[key]


def _targets(key: str, text: str) -> Iterator[str]:
    for found in (*REFERENCE.finditer(text), *REFERENCE_START.finditer(text)):
        name = found[1]
        dots = len(name) - len(name.lstrip("."))
        above = key.split(".")[: len(key.split(".")) - dots] if dots else []
        yield ".".join([*above, name.lstrip(".")]).replace("[", ".").replace("]", "")
