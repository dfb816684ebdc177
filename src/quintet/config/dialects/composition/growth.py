"""How long values become that are put together from others: `a: ${b}${b}`, `b: ${c}${c}`, and so on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.faults import source_of
from quintet.errors import ConfigError

__all__ = ["check_grammar", "check_growth"]

LONGEST = 1_000_000
"""Letters of a value, with all that it leads to."""
DEEPEST = 64
"""Values that follow each other."""
LONGEST_TEXT, LONGEST_TEXTS, DEEPEST_TEXT = 2_000, 40_000, 16
"""Letters of a value with `${…}` and of all of a file together, and `${…}` inside each other: the parser is slow."""
WHOLE = re.compile(r"\$\{\s*(?:oc\.(?:select|dict\.keys|dict\.values|create|deprecated):)?\s*([^${}:,\s]*)[^${}:]*\}")
BEGUN = re.compile(r"\$\{\s*([\w.]+)\.\$\{")


def check_growth(tree: Any, sources: Mapping[str, str]) -> None:
    """Refuse values that would fill the memory.

    Raises:
        ConfigError: there is one.
    """
    texts = dict(_texts(tree, ""))
    sizes: dict[str, int] = {}
    for key in texts:
        if _size(key, texts, sizes, 0) > LONGEST:
            source = source_of(key, sources)
            message = f"{key} ({source}) is put together from others into more than {LONGEST:,} letters"
            raise ConfigError(message, key=key, source=source, hint="write the values out")


def check_grammar(tree: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse `${…}` that can't be parsed, or not soon.

    Raises:
        ConfigError: there is one.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    total = 0
    for key, text in _texts(tree, ""):
        source, total = source_of(key, sources), total + len(text)
        problem = "is too long" if len(text) > LONGEST_TEXT or total > LONGEST_TEXTS else None
        problem = (
            "is nested too deeply" if text.count("${") > 8 * DEEPEST_TEXT or _depth(text) > DEEPEST_TEXT else problem
        )
        try:
            if problem is None:
                OmegaConf.create({"text": text})
                continue
        except OmegaConfBaseException as error:
            problem = f"can't be read: {next(iter(str(error).splitlines()), '')}"
        message = f"{key} ({source}): its ${{…}} {problem}"
        raise ConfigError(message, key=key, value=text, source=source, hint="mend the ${…} in it")


def _depth(text: str) -> int:
    depth = deepest = 0
    for found in re.finditer(r"\$\{|\}", text):
        depth += 1 if found[0] == "${" else -1
        deepest = max(depth, deepest)
    return deepest


def _texts(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """The values that lead to others."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _texts(value, f"{prefix}.{number}")
    elif isinstance(tree, str) and "${" in tree:
        yield prefix, tree


def _size(key: str, texts: Mapping[str, str], sizes: dict[str, int], depth: int) -> int:
    """With all that it leads to; a circle counts once, it is told to who reads it."""
    if key in sizes:
        return sizes[key]
    sizes[key] = 0
    if depth > DEEPEST:
        raise ConfigError(f"{key} follows from more than {DEEPEST} others", key=key, hint="write the value out")
    total = len(texts[key])
    for target in _targets(key, texts[key]):
        inside = (other for other in texts if other == target or other.startswith(f"{target}."))
        total += sum(_size(other, texts, sizes, depth + 1) for other in inside)
    sizes[key] = min(total, LONGEST + 1)
    return sizes[key]


def _targets(key: str, text: str) -> Iterator[str]:
    for found in (*WHOLE.finditer(text), *BEGUN.finditer(text)):
        name = found[1]
        dots = len(name) - len(name.lstrip("."))
        above = key.split(".")[: len(key.split(".")) - dots] if dots else []
        yield ".".join([*above, name.lstrip(".")]).replace("[", ".").replace("]", "")
