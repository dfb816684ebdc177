"""Keys of a configuration that the framework's references do not have: misspelt ones, undocumented ones, and those of
forks."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from quintet.config.capabilities import Capability
from quintet.config.dialects.composition.foreign_config import ForeignConfig
from quintet.config.dialects.composition.hydra_composition import RUN_KEYS
from quintet.config.dialects.composition.plain_composition import HYDRA
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.dialect import Dialect, UnknownKeyPolicy
from quintet.config.dialects.passthrough import engine_argument
from quintet.config.dialects.release_tables import stored_name
from quintet.config.dialects.releases import documented_names
from quintet.config.dialects.typos import closest_keys, is_misspelt, is_typo, slip_of
from quintet.config.dialects.value_types import SECTION
from quintet.config.dotted import is_inside, sections_around
from quintet.config.problems import ConfigProblem
from quintet.config.schema import is_key
from quintet.config.yaml_reader import COMMAND_LINE

DECIDES_NOTHING = re.compile(
    r"(.*_)?(n_val|val|validation|eval|test|debug|verbose|logging|logger|save|dump|wandb|swanlab)(_(?!only).*)?"
)
"""Names of keys that a fork reads for validation, logs and files."""
TURNED_OFF: tuple[object, ...] = (None, False, "", [], {})
"""Values with which a fork does what its framework does."""


class UnknownReason(StrEnum):
    """Why a key is unknown, as the end of a sentence with the name of the framework."""

    TYPO = "looks like a typo"
    UNDOCUMENTED = "exists in {framework} but is not documented in its reference"
    OTHER_RUNS = "is not read by runs of this kind"
    NOWHERE = "does not exist in {framework}"
    FORK = "is a key of this fork"
    """The trainer's own file in the checkout has it."""
    NEW = "does not exist in {framework}, and is read as a key of a fork"
    """It is not similar to any key, or added by `+`."""


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that is missing in the dialect's references."""

    key: str
    source: str
    reason: UnknownReason
    framework: str
    suggestion: str | None = None
    place: str = ""
    """Where the trainer's own file in the checkout has it."""

    def __str__(self) -> str:
        suggestion = f"; did you mean {self.suggestion}?" if self.suggestion else ""
        return f"{self.key} ({self.source}) {self.reason.format(framework=self.framework)}{suggestion}"

    @property
    def is_of_fork(self) -> bool:
        return self.reason in (UnknownReason.FORK, UnknownReason.NEW)


def unknown_keys(
    values: ForeignValues, framework: Dialect | None = None, written: ForeignConfig | None = None
) -> list[UnknownKey]:
    """Return the undocumented keys of a configuration.

    `framework` is the dialect with all its references, for keys of other releases and other runs, and `written` the
    configuration as it was composed, which tells keys of forks.
    """
    names = _Names(values, frozenset() if framework is None else framework.known_keys())
    keys = [key for key in values.merged.leaves() if key not in RUN_KEYS and not names.are_documented(key)]
    of_other_runs = documented_names(framework) if framework is not None and keys else frozenset()
    of_trainer = {**written.trainer_keys(), **dict(_class_keys(keys, values))} if written is not None and keys else {}
    appended = () if written is None else written.appended
    dialect, waits_for = values.dialect, values.dialect.waits_for

    def describe(key: str) -> UnknownKey:
        reason, suggestion = UnknownReason.FORK, None
        if key in of_other_runs and (key not in of_trainer or waits_for(dialect, values.__getitem__, key)):
            reason, suggestion = UnknownReason.OTHER_RUNS, names.beside(key)
        elif names.are_known(key):
            reason = UnknownReason.UNDOCUMENTED
        elif key not in of_trainer:
            reason, suggestion = names.judge(key, is_appended=any(is_inside(key, name) for name in appended))
        return UnknownKey(key, values.source(key), reason, values.dialect.name, suggestion, of_trainer.get(key, ""))

    # with the defaults of its own file, a fork does what its authors call its framework
    by_default = frozenset() if written is None else written.evidence.trainer_file_keys
    of_file = (UnknownReason.FORK, UnknownReason.UNDOCUMENTED)
    return [key for key in map(describe, keys) if not (key.reason in of_file and key.key in by_default)]


def _class_keys(keys: Iterable[str], values: ForeignValues) -> Iterator[tuple[str, str]]:
    """Yield those keys that the classes of a configuration have in the checkout, with where they are."""
    release = values.dialect.release
    if release is not None and release.is_of_checkout:
        yield from (
            (key, "its configuration classes") for key in keys if stored_name(release.table, key) in release.table
        )


@dataclass(frozen=True)
class _Names:
    """Names of a framework's keys and sections, to which those of a configuration are compared."""

    values: ForeignValues
    known: frozenset[str]
    """Keys of the framework's releases that no reference documents; a section stands for all keys in it."""

    @property
    def dialect(self) -> Dialect:
        return self.values.dialect

    @cached_property
    def sections(self) -> set[str]:
        return {section for key in self.dialect.specs() for section in sections_around(key)}

    @cached_property
    def free_sections(self) -> set[str]:
        return {key for key, spec in self.dialect.specs().items() if spec.value_type is SECTION}

    @cached_property
    def legal(self) -> list[str]:
        specs = self.dialect.specs()
        return [*specs, *self.sections, *keys_of_similar_sections(specs, self.dialect.shared_sections)]

    @cached_property
    def with_keys(self) -> set[str]:
        """Sections in which a reference has any key; empty text stands for the top level."""
        return {key.rpartition(".")[0] for key in self.legal}

    @cached_property
    def waiting(self) -> set[str]:
        return {key for key, spec in self.dialect.specs().items() if spec.state == "pending"}

    def are_documented(self, key: str) -> bool:
        """Return whether a reference has the key, or a section that takes any keys."""
        dialect, specs = self.dialect, self.dialect.specs()
        names = (key, dialect.documented(key))
        argument = engine_argument(key, self.values)
        if (argument is not None and argument.is_known) or key in dialect.undocumented:
            return True
        if key.endswith("._target_") and str(self.values[key]).startswith((f"{dialect.name}.", "verl.")):
            return True  # the framework's own class of the section
        is_free = any(is_inside(name, section) for name in names for section in self.free_sections)
        return is_free or any(name in specs or name in self.sections for name in names)

    def are_known(self, key: str) -> bool:
        """Return whether the framework's releases have the key, unless it is a slip of another one."""
        is_listed = key in self.known or any(name.startswith(f"{key}.") for name in self.known)
        is_inside_listed = any(section in self.known for section in sections_around(key))
        return is_listed or (is_inside_listed and slip_of(key, self.legal) is None)

    def closest(self, key: str) -> list[str]:
        """Return the keys that an unknown one is closest to, the closest first."""
        argument = engine_argument(key, self.values)
        of_engine = () if argument is None else argument.closest_keys
        further = (*_corrected_name_lists(key, self.dialect), *closest_keys(key, self.legal, rare=self.waiting))
        return [name for name in (*of_engine, *further) if not key.startswith(f"{name}.")]

    def beside(self, key: str) -> str | None:
        """Return the key of the same section for which a key may have been meant."""
        section = key.rpartition(".")[0]
        beside = (name for name in self.closest(key) if name.rpartition(".")[0] == section)
        return next((name for name in beside if is_typo(key, name, in_known_section=True)), None)

    def judge(self, key: str, *, is_appended: bool) -> tuple[UnknownReason, str | None]:
        """Return whether a key that the framework lacks is a typo or that of a fork, and the key that it is like."""
        section = key.rpartition(".")[0]
        closest = self.closest(key)

        def is_slip(name: str) -> bool:
            if is_appended:
                return section == name.rpartition(".")[0] and is_misspelt(key, name)
            return is_typo(key, name, in_known_section=section in self.with_keys)

        if meant := next(filter(is_slip, closest), None):
            return UnknownReason.TYPO, meant
        similar = next(iter(closest), None)
        outermost = section.partition(".")[0]
        is_native = outermost in self.sections and is_key(key)  # a native key in a file of a framework
        is_closed = outermost == HYDRA or section in self.dialect.name_lists or is_native
        if is_closed or (self.values.source(key) == COMMAND_LINE and not is_appended):
            return UnknownReason.NOWHERE, similar
        return UnknownReason.NEW, similar


def _corrected_name_lists(key: str, dialect: Dialect) -> Iterator[str]:
    """Yield a list of names with its misspelt names corrected, if each is close to a legal name."""
    section, _, names = key.rpartition(".")
    legal = dialect.name_lists.get(section, ())
    corrected = [name if name in legal else next(iter(closest_keys(name, legal)), name) for name in names.split(",")]
    if set(corrected) <= set(legal):
        yield f"{section}.{','.join(corrected)}"


def keys_of_similar_sections(keys: Iterable[str], shared_sections: Mapping[str, str]) -> Iterator[str]:
    """Yield documented keys as they are written in other sections that take them, too."""
    for section, other in shared_sections.items():
        prefix = f"{other}." if other else ""
        yield from (f"{section}.{key.removeprefix(prefix)}" for key in keys if key.startswith(prefix))


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """The unknown keys of a configuration by what is done with them."""

    waiting: Mapping[str, ConfigProblem]
    """Problems of keys that wait for a missing capability, for the code of a fork, or for a key to be documented."""
    left_out: tuple[UnknownKey, ...]
    refused: tuple[UnknownKey, ...]
    of_fork: tuple[UnknownKey, ...]
    """Those that wait for the code of a fork."""

    def remarks(self) -> Iterator[str]:
        """Yield what is left out, and how to leave out keys of a fork."""
        yield from (f"unknown key left out: {key}" for key in self.left_out if not key.is_of_fork)
        if left_out := [f"{key.key} ({key.source})" for key in self.left_out if key.is_of_fork]:
            yield f"unknown keys left out, which a fork reads: {', '.join(left_out)}"
        if self.of_fork:
            options = "--ignore-fork-keys those that cannot decide what is trained"
            yield f"keys of a fork wait: ~{self.of_fork[0].key} leaves out one, {options}"


def sort_keys(values: ForeignValues, unknown: Iterable[UnknownKey], policy: UnknownKeyPolicy) -> SortedKeys:
    """Return what is done with each unknown key."""
    waiting: dict[str, ConfigProblem] = {}
    left_out, refused, of_fork = [], [], []
    for key in unknown:
        capability = _capability(values, key)
        if capability is not None and values[key.key] is not None:
            message = f"{values.describe(key.key)} {capability.refusal()}"
            waiting[key.key] = ConfigProblem(key.key, values[key.key], key.source, message, capability=capability)
        elif capability is not None or policy == "warn" or (key.is_of_fork and _changes_nothing(key, values, policy)):
            left_out.append(key)
        elif key.reason is UnknownReason.UNDOCUMENTED:
            if _is_default(key, values):
                left_out.append(key)
            else:
                waiting[key.key] = _undocumented_problem(values, key)
        elif key.is_of_fork:
            of_fork.append(key)
            waiting[key.key] = _fork_problem(values, key)
        else:
            refused.append(key)
    return SortedKeys(waiting, tuple(left_out), tuple(refused), tuple(of_fork))


def _capability(values: ForeignValues, key: UnknownKey) -> Capability | None:
    """Return the capability that an undocumented key of the framework waits for, as its simulator or algorithm does."""
    if key.reason not in (UnknownReason.UNDOCUMENTED, UnknownReason.OTHER_RUNS):
        return None
    return values.dialect.waits_for(values.dialect, values.__getitem__, key.key)


def _changes_nothing(key: UnknownKey, values: ForeignValues, policy: UnknownKeyPolicy) -> bool:
    """Return whether a key of a fork has a value with which the fork does what its framework does, or, as far as the
    policy allows to judge by its name, does not decide what is trained on which data."""
    value = values[key.key]
    is_off = any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in TURNED_OFF)
    return is_off or (policy == "ignore-fork" and not _decides(key))


def _is_default(key: UnknownKey, values: ForeignValues) -> bool:
    """Return whether a key has the value that its release gives it, or null."""
    value, release = values[key.key], values.dialect.release
    return value is None or (release is not None and release.table.get(stored_name(release.table, key.key)) == value)


def _undocumented_problem(values: ForeignValues, key: UnknownKey) -> ConfigProblem:
    """Return the problem of a key of the framework whose effect is not known here."""
    message = f"{values.describe(key.key)} waits: key of {key.framework} that its reference does not document"
    hint = f"without it: ~{key.key} (it may decide what is trained)"
    return ConfigProblem(key.key, values[key.key], key.source, message, hint, capability=Capability.FURTHER_KEYS)


def _decides(key: UnknownKey) -> bool:
    return DECIDES_NOTHING.fullmatch(key.key.rpartition(".")[2]) is None


def _fork_problem(values: ForeignValues, key: UnknownKey) -> ConfigProblem:
    """Return the problem of a key that only the code of a fork reads."""
    place = f"this fork ({key.place})" if key.place else f"a fork, since {key.framework} has no such key"
    similar = f"; the most similar one is {key.suggestion}" if key.suggestion else ""
    hint = f"without it: ~{key.key}"
    hint = f"{hint} (it may decide what is trained)" if _decides(key) else f"{hint} or --ignore-fork-keys"
    message = f"{values.describe(key.key)} waits: key of {place}{similar}"
    return ConfigProblem(key.key, values[key.key], key.source, message, hint, capability=Capability.FORK)
