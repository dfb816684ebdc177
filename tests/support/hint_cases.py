"""Errors with a hint, each with inputs that do what the hint says."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hints import SRC, followed, hint_sites, printed_hints, recorded_sites

from quintet.config.schema import documented_key, keys
from quintet.errors import UserError


@dataclass(frozen=True)
class HintCase:
    """An action that fails on one input, and succeeds on the inputs that its hint leads to."""

    action: Callable[[Any], object]
    failing: Any
    hint: str
    """Beginning of the hint."""
    following: tuple[Any, ...]
    """An input for each alternative of the hint."""

    def check(self) -> None:
        """Fail if the hint is another one, or is false."""
        with pytest.raises(UserError) as error:
            self.action(self.failing)
        assert f"\n  {self.hint}" in str(error.value), str(error.value)
        _check_names(str(error.value))
        for value in self.following or _changed(error.value, self.failing):
            self.action(value)


def _check_names(text: str) -> None:
    """Fail if the hints name keys or pages that do not exist."""
    for hint in printed_hints(text).values():
        assigned = {documented_key(key) for key in re.findall(r"(?<![\w./])[a-z_]+(?:\.\w+)+(?==)", hint)}
        pages = re.findall(r"docs/[\w-]+\.md", hint)
        assert assigned <= {key.name for key in keys()}, hint
        assert all((SRC.parents[1] / page).is_file() for page in pages), hint


def _changed(error: UserError, words: Sequence[str]) -> list[list[str]]:
    """The overrides `KEY=VALUE` after the changes that the hint names."""
    ((message, hint),) = printed_hints(str(error)).items()
    return list(followed(message, hint, words))


def case(action: Callable[[Any], object], failing: Any, hint: str, *following: Any) -> HintCase:
    """An entry; without inputs that follow the hint, the assignments in it are made."""
    return HintCase(action, failing, hint, following)


def name_of(entry: HintCase) -> str:
    """The name of a test."""
    return f"{getattr(entry.action, '__name__', 'action')}-{entry.hint[:40]}"


def sites_without_case(package: str, cases: Sequence[HintCase], exempt: Collection[str]) -> list[str]:
    """Places of a package that give a hint, that no case reaches, and that are not exempt; and exempt ones that are
    reached, or that do not exist.

    Those that are exempt are directories, files, and functions as `FILE FUNCTION`.
    """
    with recorded_sites() as places:
        for entry in cases:
            with suppress(UserError):
                entry.action(entry.failing)
    missed = [site for site in hint_sites(SRC / package) if not any((site.path, line) in places for line in site.lines)]
    left = [site for site in missed if not f"{site.path} {site.function}".startswith(tuple(exempt))]
    unneeded = {name for name in exempt if " " in name} - {f"{site.path} {site.function}" for site in missed}
    return [*map(str, left), *(f"exempt, but reached or missing: {name}" for name in unneeded)]
