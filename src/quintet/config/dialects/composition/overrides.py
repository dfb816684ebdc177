"""Overrides as Hydra reads them: `key=value`, `+key=value`, `~key`, each with the place where it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quintet.config.source import COMMAND_LINE
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

__all__ = ["Said", "dotted_keys", "parsed"]

LONGEST, MOST, DEEPEST = 20_000, 500, 24
"""Letters of an override, commas in it, and brackets inside each other: Hydra's parser is slow."""
KEY = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w$-]*([./][\w$-]+)*(@[\w.:]+)?")
OF_HYDRA = ("hydra.searchpath", "hydra.run.dir", "hydra.output_subdir")
"""What is taken of words that configure Hydra itself."""
HINT = "write key=value, +key=value or ~key"


@dataclass(frozen=True, slots=True)
class Said:
    """One override."""

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
        """Its key as it was written, with the package where it has one."""
        return self.word.lstrip("+~").partition("=")[0]

    @property
    def takes_away(self) -> bool:
        return bool(self.override.is_delete())

    @property
    def forced(self) -> str:
        """As one that also sets what the files leave to the reference; whether there is such a key is asked
        later, of all keys at once."""
        return self.word if self.takes_away or self.override.is_hydra_override() else f"++{self.word.lstrip('+')}"

    def note(self, sources: dict[str, str]) -> None:
        """Put the place of each key that it sets into `sources`, and take out those that it takes away. A section
        is laid over what is there of it."""
        if self.takes_away:
            _forget(self.key, sources)
            return
        for key, is_section in dotted_keys(self.key, self.override.value()):
            if not is_section:
                _forget(key, sources)
            sources[key] = self.place


def parsed(words: Sequence[str], places: Sequence[str] = ()) -> list[Said]:
    """Parse overrides; those beyond `places` come from the command line. Words that only say how a program of
    Hydra's begins are left out.

    Raises:
        ConfigError: one can't be read; the message shows it with its place.
    """
    said = []
    for number, word in enumerate(words):
        one = _parse(word, places[number] if number < len(places) else COMMAND_LINE)
        if not one.override.is_hydra_override() or one.key in OF_HYDRA:
            said.append(one)
    return said


def _parse(word: str, place: str) -> Said:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shown = word if len(word) <= 60 else f"{word[:59]}…"
    _check_size(word, shown, place)
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except (HydraException, ValueError, ArithmeticError, RecursionError) as error:
        message = f"can't read the override {shown!r} ({place}): {_problem(error)}"
        raise ConfigError(message, value=word, source=place, hint=_hint(word)) from None
    if not override.key_or_group:
        raise ConfigError(f"{shown!r} ({place}) names no key", value=word, source=place, hint=HINT)
    if override.is_sweep_override():
        message = f"{shown} ({place}) names several values"
        hint = f"write {override.key_or_group}=[…] for a list, or quotes around a text; a run has one value a key"
        raise ConfigError(message, key=override.key_or_group, value=word, source=place, hint=hint)
    return Said(override, place)


def _check_size(word: str, shown: str, place: str) -> None:
    depth = deepest = 0
    for letter in word:
        depth += (letter in "[{(") - (letter in "]})")
        deepest = max(depth, deepest)
    long = len(word) > LONGEST or word.count(",") > MOST
    if long or deepest > DEEPEST:
        problem = "too long for an override" if long else "nested too deeply"
        raise ConfigError(f"{shown!r} ({place}) is {problem}", value=word, source=place, hint="write it into a file")


def _problem(error: Exception) -> str:
    said = next(iter(str(error).splitlines()), "")
    if isinstance(error, ValueError | ArithmeticError) and "digits" in said:
        return "no number has that many digits"
    return "it isn't an override" if not said or said.startswith(("Lexer", "Error parsing")) else said


def _hint(word: str) -> str:
    key, sign, value = word.partition("=")
    if sign and KEY.fullmatch(key) and not value.strip().startswith(("'", '"')):
        return f"text with other signs than letters, digits and / - . _ : stands in quotes: {key}='\"…\"'"
    return HINT


def dotted_keys(key: str, value: Any) -> Iterator[tuple[str, bool]]:
    """A key and those inside its value, each with whether it is a section."""
    yield key, isinstance(value, Mapping)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from dotted_keys(f"{key}.{name}", inner)


def _forget(key: str, sources: dict[str, str]) -> None:
    for below in [other for other in sources if other == key or other.startswith(f"{key}.")]:
        del sources[below]
