"""Interpolation of `${…}` in the frameworks' files: resolvers, hints for failures, and limits.

The limits are against values that grow exponentially: `a: ${b}${b}`, `b: ${c}${c}`, and so on.
"""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers.oc import env

from quintet.config.dotted import is_inside
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


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


RESOLVERS: Mapping[str, Any] = {
    "multiply": lambda a, b: _number(a) * _number(b),
    "int_div": lambda a, b: _number(a) // _number(b),
    "subtract": lambda a, b: _number(a) - _number(b),
    "not": lambda a: not a,
    # the name of a type remains text, so that torch is not imported
    "torch.dtype": str,
}
BUILT_IN = ("oc.env", "oc.select", "oc.decode", "oc.create", "oc.dict.keys", "oc.dict.values")


def register_resolvers(environment: Mapping[str, str]) -> None:
    """Register the resolvers with OmegaConf; `${oc.env:…}` looks into `environment` first."""

    def look_up(key: str, *default: Any) -> Any:
        if key == "PWD" and key not in environment:
            return os.getcwd()  # an inherited PWD may be that of another directory
        return environment[key] if key in environment else env(key, *default)

    for name, resolver in {**RESOLVERS, "oc.env": look_up, "env": look_up}.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def first_line(error: BaseException) -> str:
    """Return the message of an error of Hydra or OmegaConf in one line."""
    if isinstance(error, RecursionError):
        return "it refers to itself, or is nested too deeply"
    message = str(error).strip() or str(error.__cause__ or "").strip()
    lines = re.sub(r"\w+ raised while resolving interpolation: ", "", message).splitlines()
    if not lines:
        return type(error).__name__
    return lines[0].strip('"') if not lines[0].endswith(":") else " ".join(lines[:2])


def hint_for(problem: str) -> str:
    """Return a hint for a failed interpolation."""
    if "Unsupported interpolation type" in problem:
        return f"there are {', '.join([*RESOLVERS, *BUILT_IN])}"
    if problem.startswith("Environment variable"):
        return "set it, or write ${oc.env:NAME,DEFAULT}"
    return "fix the ${…} in it"


def nesting_depth(text: str, brackets: str, closing: str) -> int:
    """Return how deeply brackets are nested in a text; `brackets` is a pattern, some of its matches are `closing`.

    >>> nesting_depth("[[1], [2]]", r"[\\[\\]]", "]")
    2
    """
    steps = (-1 if bracket in closing else 1 for bracket in re.findall(brackets, text))
    return max(accumulate(steps, initial=0))


def check_grammar(tree: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse `${…}` that cannot be parsed in a short time.

    Raises:
        ConfigError: a text is malformed, too long or nested too deeply.
    """
    total = 0
    for key, text in _interpolations(tree, ""):
        total += len(text)
        if problem := _grammar_problem(text, total):
            source = source_of(key, sources)
            message = f"{key} ({source}): its ${{…}} {problem}"
            raise ConfigError(message, key=key, value=text, source=source, hint="fix the ${…} in it")


def _grammar_problem(text: str, total: int) -> str | None:
    if text.count("${") > 8 * MAX_NESTING or nesting_depth(text, r"\$\{|\}", "}") > MAX_NESTING:
        return "is nested too deeply"
    if len(text) > MAX_TEXT or total > MAX_FILE_TEXT:
        return "is too long"
    try:
        OmegaConf.create({"text": text})
    except OmegaConfBaseException as error:
        return f"cannot be parsed: {next(iter(str(error).splitlines()), '')}"
    return None


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
        total += sum(_length(other, texts, sizes, depth + 1) for other in texts if is_inside(other, target))
    sizes[key] = min(total, MAX_LENGTH + 1)
    return sizes[key]


def _targets(key: str, text: str) -> Iterator[str]:
    """Yield the keys to which a value refers; those with leading dots are relative to its section."""
    for match in (*REFERENCE.finditer(text), *REFERENCE_START.finditer(text)):
        name = match[1].lstrip(".")
        dots = len(match[1]) - len(name)
        above = key.split(".")[:-dots] if dots else []
        yield ".".join([*above, name]).replace("[", ".").replace("]", "")
