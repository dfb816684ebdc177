"""Overrides in Hydra's grammar: `key=value`, `+key=value` and `~key`, each with its source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quintet.config.yaml_reader import COMMAND_LINE
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MAX_LENGTH, MAX_COMMAS, MAX_NESTING = 20_000, 500, 24
"""Characters, commas and nesting of brackets in an override: Hydra's parser is slow."""
KEY = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w$-]*([./][\w$-]+)*(@[\w.:]+)?")
HYDRA_OVERRIDES = ("hydra.searchpath", "hydra.run.dir", "hydra.output_subdir")
"""Overrides of the `hydra` section that are applied; others are ignored."""
HINT = "write key=value, +key=value or ~key"


@dataclass(frozen=True, slots=True)
class ParsedOverride:
    """A parsed override and its source."""

    override: Override
    place: str
    """`run.sh:12` or `command line`."""

    @property
    def word(self) -> str:
        return str(self.override.input_line)

    @property
    def key(self) -> str:
        return str(self.override.key_or_group)

    @property
    def name(self) -> str:
        """The key as it was written, with its package if it has one."""
        return self.word.lstrip("+~").partition("=")[0]

    @property
    def removes_key(self) -> bool:
        return bool(self.override.is_delete())

    @property
    def forced(self) -> str:
        """The override with `++`, which also sets keys that the files do not have; unknown keys are reported later."""
        return self.word if self.removes_key or self.override.is_hydra_override() else f"++{self.word.lstrip('+')}"

    def note(self, sources: dict[str, str]) -> None:
        """Add the keys that it sets to `sources`, and delete those that it removes; sections are merged."""
        if self.removes_key:
            _delete(self.key, sources)
            return
        for key, is_section in nested_keys(self.key, self.override.value()):
            if not is_section:
                _delete(key, sources)
            sources[key] = self.place


def parse_overrides(words: Sequence[str], places: Sequence[str] = ()) -> list[ParsedOverride]:
    """Parse overrides, without those that only configure Hydra's own start of a program.

    `places` are the sources of the first overrides; the others come from the command line.

    Raises:
        ConfigError: an override cannot be parsed.
    """
    said = []
    for number, word in enumerate(words):
        one = _parse(word, places[number] if number < len(places) else COMMAND_LINE)
        if not one.override.is_hydra_override() or one.key in HYDRA_OVERRIDES:
            said.append(one)
    return said


def _parse(word: str, place: str) -> ParsedOverride:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shown = word if len(word) <= 60 else f"{word[:59]}…"
    _check_size(word, shown, place)
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except (HydraException, ValueError, ArithmeticError, RecursionError) as error:
        message = f"cannot parse the override {shown!r} ({place}): {_problem(error)}"
        raise ConfigError(message, value=word, source=place, hint=_hint(word)) from None
    if not override.key_or_group:
        raise ConfigError(f"{shown!r} ({place}) names no key", value=word, source=place, hint=HINT)
    if override.is_sweep_override():
        message = f"{shown} ({place}) names several values"
        hint = f"write {override.key_or_group}=[…] for a list, or quotes around a text; a run has one value per key"
        raise ConfigError(message, key=override.key_or_group, value=word, source=place, hint=hint)
    return ParsedOverride(override, place)


def _check_size(word: str, shown: str, place: str) -> None:
    depth = deepest = 0
    for letter in word:
        depth += (letter in "[{(") - (letter in "]})")
        deepest = max(depth, deepest)
    long = len(word) > MAX_LENGTH or word.count(",") > MAX_COMMAS
    if long or deepest > MAX_NESTING:
        problem = "too long for an override" if long else "nested too deeply"
        raise ConfigError(f"{shown!r} ({place}) is {problem}", value=word, source=place, hint="write it into a file")


def _problem(error: Exception) -> str:
    said = next(iter(str(error).splitlines()), "")
    if isinstance(error, ValueError | ArithmeticError) and "digits" in said:
        return "no number has that many digits"
    return "it is not an override" if not said or said.startswith(("Lexer", "Error parsing")) else said


def _hint(word: str) -> str:
    key, sign, value = word.partition("=")
    if sign and KEY.fullmatch(key) and not value.strip().startswith(("'", '"')):
        return f"text with characters other than letters, digits and / - . _ : needs quotes: {key}='\"…\"'"
    return HINT


def nested_keys(key: str, value: Any) -> Iterator[tuple[str, bool]]:
    """Yield a key and the keys in its value, each with whether it is a section."""
    yield key, isinstance(value, Mapping)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from nested_keys(f"{key}.{name}", inner)


def _delete(key: str, sources: dict[str, str]) -> None:
    for below in [other for other in sources if other == key or other.startswith(f"{key}.")]:
        del sources[below]
