"""Lists of overrides: text files with one `key=value` per line, as VAGEN's documentation shows them, and trees as such
lists."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quintet.config.dotted import flatten, unflatten
from quintet.errors import ConfigError

LINE = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w.@/:-]*\s*=.*|~[\w.@/:-]+", re.DOTALL)
SECOND_OVERRIDE = re.compile(r"\s(\+{0,2}|~)[A-Za-z_]\w*(\.\w+)*=")
UNCOMMENTED = re.compile(r"""(?:[^'"#]|'[^']*'?|"[^"]*"?|(?<=\S)#)*""")
"""A line up to a comment, which begins after a blank."""
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]")


def is_override_list(text: str) -> bool:
    """Whether every line is an override, a comment or blank."""
    lines = [line for _, line in _lines(text)]
    return bool(lines) and all(map(LINE.fullmatch, lines))


def read_override_list(path: Path, text: str) -> list[tuple[str, str]]:
    """Return the overrides of a list, each with its source `FILE:LINE`.

    Raises:
        ConfigError: a line has two overrides.
    """
    overrides = []
    for number, line in _lines(text):
        source = f"{path}:{number}"
        if SECOND_OVERRIDE.search(QUOTED.sub("", line)):
            raise ConfigError(
                f"{source}: two overrides on one line", value=line, source=source, hint="write one per line"
            )
        overrides.append((re.sub(r"\s*=\s*", "=", line, count=1), source))
    return overrides


def key_of(override: str) -> str:
    """Return the key of an override."""
    return override.partition("=")[0].strip().lstrip("+~")


def keys_as_tree(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the keys of overrides as nested sections, to detect the dialect."""
    return unflatten({key: {} for key in sorted(map(key_of, overrides))})


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        uncommented = UNCOMMENTED.match(line)
        if uncommented and (content := uncommented[0].strip().removesuffix("\\").strip()):
            yield number, content


def as_overrides(tree: Mapping[str, Any], source: Callable[[str], str]) -> list[tuple[str, str]]:
    """Return a tree as overrides with their sources, given the source of each key."""
    return [(f"{key}={_hydra_value(value)}", source(key)) for key, value in flatten(tree).items()]


def _hydra_value(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _quoted(text: str) -> str:
    if "'" not in text and "\\" not in text:
        return f"'{text}'"
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()
