"""Overrides in Hydra's grammar: `key=value`, `+key=value` and `~key`, each with its source."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from quintet.config.dialects.composition.interpolation import nesting_depth
from quintet.config.dialects.composition.plain_overrides import read_plain_override
from quintet.config.dotted import is_inside
from quintet.config.yaml_reader import COMMAND_LINE
from quintet.errors import ConfigError

MAX_LENGTH, MAX_COMMAS, MAX_NESTING = 20_000, 500, 24
"""Characters, commas and nesting of brackets in an override: Hydra's parser is slow."""
KEY = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w$-]*([./][\w$-]+)*(@[\w.:]+)?")
HYDRA_OVERRIDES = ("hydra.searchpath", "hydra.run.dir", "hydra.output_subdir")
"""Overrides of the `hydra` section that are applied; others are ignored."""
HINT = "write key=value, +key=value or ~key"


@dataclass(frozen=True, slots=True)
class ParsedOverride:
    """A parsed override and its source."""

    text: str
    key: str
    """The key, or the group of files."""
    value: Any
    source: str
    """`run.sh:12` or `command line`."""
    removes_key: bool = False
    package: str | None = None
    """The section for a file of the group: `actor` of `optim@actor=adam`."""

    @property
    def configures_hydra(self) -> bool:
        return self.key.startswith(("hydra.", "hydra/"))

    @property
    def sets_key(self) -> bool:
        """Whether it sets a key of the run, if no group of files has its name."""
        is_group = "/" in self.key or self.package is not None
        return not (self.removes_key or self.configures_hydra or is_group or self.key == "hydra")

    @property
    def name(self) -> str:
        """The key as it was written, with its package if it has one."""
        return self.text.lstrip("+~").partition("=")[0]

    @property
    def forced(self) -> str:
        """The override with `++`, which also sets keys that the files do not have; unknown keys are reported later."""
        return self.text if self.removes_key or self.configures_hydra else f"++{self.text.lstrip('+')}"

    def note(self, sources: dict[str, str]) -> None:
        """Add the keys that it sets to `sources`, and delete those that it removes; sections are merged."""
        if self.removes_key:
            _delete(self.key, sources)
            return
        for key, is_section in nested_keys(self.key, self.value):
            if not is_section:
                _delete(key, sources)
            sources[key] = self.source


def parse_overrides(texts: Sequence[str], sources: Sequence[str] = ()) -> list[ParsedOverride]:
    """Parse overrides, without those that only configure Hydra's own start of a program.

    `sources` are those of the first overrides; the others come from the command line.

    Raises:
        ConfigError: an override cannot be parsed.
    """
    parsed = [_parse(text, source) for text, source in zip_longest(texts, sources, fillvalue=COMMAND_LINE)]
    return [each for each in parsed if not each.configures_hydra or each.key in HYDRA_OVERRIDES]


def _parse(text: str, source: str) -> ParsedOverride:
    shown = text if len(text) <= 60 else f"{text[:59]}…"
    _check_size(text, shown, source)
    if (plain := read_plain_override(text)) is not None:
        return ParsedOverride(text, *plain, source)
    return _parse_by_hydra(text, shown, source)


def _parse_by_hydra(text: str, shown: str, source: str) -> ParsedOverride:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except (HydraException, ValueError, ArithmeticError, RecursionError) as error:
        message = f"cannot parse the override {shown!r} ({source}): {_problem(error)}"
        raise ConfigError(message, value=text, source=source, hint=_hint(text)) from None
    if not override.key_or_group:
        raise ConfigError(f"{shown!r} ({source}) names no key", value=text, source=source, hint=HINT)
    if override.is_sweep_override():
        message = f"{shown} ({source}) names several values"
        hint = f"write {override.key_or_group}=[…] for a list, or quotes around a text; a run has one value per key"
        raise ConfigError(message, key=override.key_or_group, value=text, source=source, hint=hint)
    key = str(override.key_or_group)
    value = override.value()
    package = override.package
    return ParsedOverride(text, key, value, source, override.is_delete(), package)


def _check_size(text: str, shown: str, source: str) -> None:
    is_long = len(text) > MAX_LENGTH or text.count(",") > MAX_COMMAS
    if is_long or nesting_depth(text, r"[\[{(\])}]", "]})") > MAX_NESTING:
        problem = "too long for an override" if is_long else "nested too deeply"
        raise ConfigError(f"{shown!r} ({source}) is {problem}", value=text, source=source, hint="write it into a file")


def _problem(error: Exception) -> str:
    message = next(iter(str(error).splitlines()), "")
    if isinstance(error, ValueError | ArithmeticError) and "digits" in message:
        return "no number has that many digits"
    return "it is not an override" if not message or message.startswith(("Lexer", "Error parsing")) else message


def _hint(text: str) -> str:
    key, sign, value = text.partition("=")
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
    for inner in [other for other in sources if is_inside(other, key)]:
        del sources[inner]
