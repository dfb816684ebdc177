"""The release of a framework that a configuration is of, whose table has the defaults of keys that it leaves out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.registry import FRAMEWORK_FILES
from quintet.config.dialects.release_tables import (
    ChosenRelease,
    ReleaseEvidence,
    ReleaseTables,
    Table,
    TableNames,
    load_release_tables,
    matches_code,
)
from quintet.config.dotted import flatten, get_value
from quintet.errors import ConfigError, nearest

MIN_COPIED_SHARE = 0.6
"""Share of the keys of a release from which on a file counts as a copy of the release's own."""
HINT = "--release names another"
_OF_FILES = frozenset(key for tree in FRAMEWORK_FILES.values() for key in flatten(tree))
"""Keys that stand for a framework's file that a script names, whose values are of no release in particular."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A configuration of a release, as far as it can be the one that a file is of."""

    release: str
    table: Table

    def accepted(self, keys: Iterable[str], added: frozenset[str]) -> list[str]:
        """Return the keys that the release has; of those with `+`, the ones that Hydra can add."""
        names = TableNames(self.table)
        return [
            key
            for key in keys
            if (not names.has(key) or self.table.get(key) in (None, {}) if key in added else names.has(key))
        ]

    def likeness(self, values: Mapping[str, Any]) -> tuple[int, int]:
        """Return how close a copy of its file is: the keys that the copy lacks, negative, and the equal values."""
        lacking = sum(key not in values for key in self.table)
        return -lacking, sum(self.table.get(key) == value for key, value in values.items())

    def agreement(self, table: Table) -> int:
        """Return the number of keys with equal values in another table, less those that only one of the two has."""
        equal = sum(1 for key, value in table.items() if key in self.table and self.table[key] == value)
        return equal - len({*self.table} ^ {*table})

    def is_copied(self, values: Mapping[str, Any]) -> bool:
        return sum(key in values for key in self.table) >= MIN_COPIED_SHARE * len(self.table)


def choose_release(
    dialect: Dialect, tree: Mapping[str, Any], keys: Sequence[str], evidence: ReleaseEvidence
) -> ChosenRelease | None:
    """Return the newest release that has all keys of a configuration, or most of them; None if none is recorded.

    A copy of a release's own file is of the release to which it is closest.

    Raises:
        ConfigError: the named release is not recorded.
    """
    tables = load_release_tables(dialect.name)
    configurations = () if tables is None else dialect.configurations_of(tree, evidence.module)
    if tables is None or not configurations:
        if evidence.named is not None:
            message = f"--release {evidence.named}: no releases of this kind of run of {dialect.name} are recorded"
            raise ConfigError(message, key="--release", value=evidence.named, hint="leave it out")
        return None
    releases = _named_releases(dialect.name, tables, configurations, evidence.named)
    releases = [name for name in releases if name in tables.modules.get(evidence.module, (name,))] or releases
    candidates = (
        _Candidate(name, tables.table(configuration, name))
        for name in releases
        for configuration in configurations
        if name in tables.recorded.get(configuration, {})
    )
    keys = [key for key in keys if key not in _OF_FILES]
    values = {key: get_value(tree, key) for key in keys}
    in_checkout = next((evidence.tables[name] for name in configurations if name in evidence.tables), None)
    if evidence.named is not None:
        candidate, reason = _closest(candidates, keys, values, evidence)[0], "named by --release"
    elif in_checkout is not None:
        closest = max(candidates, key=lambda each: each.agreement(in_checkout))
        candidate, reason = replace(closest, table=in_checkout), f"closest to the classes in the checkout; {HINT}"
    else:
        candidate, reason = _closest(candidates, keys, values, evidence)
    table = dict(candidate.table) | dict(_implied(dialect, tables, candidate, tree, evidence.code))
    is_of_checkout = evidence.named is None and in_checkout is not None
    return ChosenRelease(dialect.name, candidate.release, reason, table, evidence.code, is_of_checkout)


def _is_excluded(rule: Mapping[str, Any], tree: Mapping[str, Any], table: Table) -> bool:
    return any(get_value(tree, key, table.get(key)) == value for key, value in rule["unless"].items())


def _implied(
    dialect: Dialect,
    tables: ReleaseTables,
    candidate: _Candidate,
    tree: Mapping[str, Any],
    code: Mapping[str, str],
) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of keys that a release lacks, as its code behaves; that of a checkout counts if known."""
    order = tables.releases()
    for rule in dialect.implied:
        applies = matches_code(rule.get("code"), code)
        if applies is None:
            applies = order.index(candidate.release) >= order.index(rule["until"])
        if applies and not _is_excluded(rule, tree, candidate.table):
            yield from rule["defaults"].items()


def _named_releases(
    framework: str, tables: ReleaseTables, configurations: Iterable[str], named: str | None
) -> list[str]:
    """Return the releases of such configurations, newest first, or only the newest one of the name `0.4`."""
    releases = [*tables.releases(configurations)]
    if named is None:
        return releases
    text = named.removeprefix("v")
    matching = [name for name in releases if name == text or name.startswith((f"{text}.", f"{text}-", f"main ({text}"))]
    if not matching:
        close = nearest(text, releases)
        hint = (f"did you mean {close}? " if close else "") + f"valid: {', '.join(reversed(releases))}"
        message = f"--release {named}: {framework} has no such release of this kind of run"
        raise ConfigError(message, key="--release", value=named, hint=hint)
    return matching[:1]


def _closest(
    candidates: Iterator[_Candidate], keys: Sequence[str], values: Mapping[str, Any], evidence: ReleaseEvidence
) -> tuple[_Candidate, str]:
    """Return the candidate that a configuration is of, and the reason; the first ones are the newest."""
    newest = next(candidates)
    is_copy = newest.is_copied(values)
    if not is_copy and len(keys) == len(newest.accepted(keys, evidence.added)):
        return newest, f"the newest release that has all keys of the file; {HINT}"
    all_candidates = [newest, *candidates]
    accepted = [frozenset(each.accepted(keys, evidence.added)) for each in all_candidates]
    known = frozenset[str]().union(*accepted)
    max_accepted = max(map(len, accepted))
    best = [each for each, has in zip(all_candidates, accepted, strict=True) if len(has) == max_accepted]
    copied = [each for each in best if each.is_copied(values)]
    if copied:
        chosen = max(copied, key=lambda each: each.likeness(values))
        return chosen, f"the file is a copy of its own, or close to it; {HINT}"
    share = "all keys" if max_accepted == len(known) else f"{max_accepted} of the {len(known)} keys"
    return best[0], f"the newest release that has {share} of the file; {HINT}"
