"""A dialect: a framework's configuration format, as the keys that its references document."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

import yaml

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import KeySpec, key_file_text, load_keys
from quintet.config.dialects.release_defaults import spec_of_release
from quintet.config.dialects.release_tables import ChosenRelease, load_release_tables
from quintet.config.dialects.value_types import ANYTHING, SECTION
from quintet.config.dotted import get_value, has_key, set_value

UnknownKeyPolicy = Literal["refuse", "ignore-fork", "warn"]
"""What is done with unknown keys: `warn` leaves all of them out, `ignore-fork` those of a fork that decide nothing."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The keys of one kind of file, as a document of the framework lists them."""

    name: str
    """Name of the document: `verl_ppo_trainer`."""
    load: Callable[[], tuple[KeySpec, ...]]
    text: Callable[[], str] | None = None
    """The text of its key file, if its keys are those of the file."""

    def mentions(self, names: Collection[str]) -> bool:
        """Return whether its keys may name one of the given foreign or native keys; loading them takes much longer."""
        text = None if self.text is None else self.text()
        return text is None or any(name in text for name in names)

    def mapped(self, change: Callable[[KeySpec], KeySpec]) -> "Reference":
        """Return the reference with each key changed."""
        return Reference(self.name, lambda: tuple(map(change, self.load())))

    def filtered(self, condition: Callable[[KeySpec], bool]) -> "Reference":
        """Return the reference with only those keys for which the condition holds."""
        return Reference(self.name, lambda: tuple(filter(condition, self.load())))


@dataclass(frozen=True, slots=True)
class Dialect:
    """A framework's configuration format."""

    name: str
    references: tuple[Reference, ...]
    marks: tuple[str, ...]
    """Sections and keys by which its files are recognised."""
    shared_sections: Mapping[str, str] = field(default_factory=dict)
    """Sections that take the keys of another section, the longest first: `critic` those of `actor_train`."""
    base: "Dialect | None" = None
    """The dialect whose keys it also takes; its keys have precedence."""
    name_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Sections whose keys are names joined by commas, with these names: `cluster.component_placement`."""
    undocumented: frozenset[str] = frozenset()
    """Valid keys without an entry in the ledger, to which other keys' defaults refer."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Values, as a tree, to which its files refer by `${…}` and which other files set."""
    trainers: tuple[str, ...] = ()
    """Modules of its trainers: `python -m MODULE`."""
    programs: str = ""
    """Regular expression for the names of its trainers' files, without `.py`."""
    program_files: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """By a trainer's module or program: the configuration file that it uses unless another one is named, relative to
    the program, whose directory is searched, and keys that it sets."""
    framework_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Configuration files that come with the framework, with the values in which they differ from the reference."""
    narrow: Callable[["Dialect", Mapping[str, Any]], "Dialect"] = lambda dialect, tree: dialect
    """Selects the references for a configuration tree."""
    sections_of_files: Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]] = lambda tree: {}
    """Returns the sections that follow from files which a configuration tree names, by their source."""
    sections_of_program: Callable[[str, Sequence[str]], Mapping[str, Any]] = lambda module, arguments: {}
    """Returns the sections that follow from a program which a script runs before the trainer, given its module and
    arguments."""
    newer_values: Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, str]]] = lambda tree: {}
    """Returns the values by which a tree of an early release is read as one of a newer release, by key, each with the
    key from which it follows."""
    waits_for: Callable[["Dialect", Callable[[str], Any], str], Capability | None] = lambda dialect, value, key: None
    """Returns the capability that an undocumented key of the framework waits for, given the values of other keys: that
    of the simulator, policy or algorithm to which it belongs."""
    process_keys: tuple[str, str] = ("trainer.nnodes", "trainer.n_gpus_per_node")
    """Keys of the nodes and of the devices of a node, which torchrun decides for trainers that it starts."""
    missing_trainers: tuple[tuple[re.Pattern[str], Capability], ...] = ()
    """Patterns for modules of trainers that this version lacks, with the capabilities that their runs wait for."""
    choices: Mapping[str, str | None] = field(default_factory=dict)
    """Groups of the framework's own files, such as `engine` of `engine=megatron`, with the key that has the name of the
    chosen file; None if the name follows from others."""
    configurations: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = ()
    """Names of the framework's own configurations in `defaults.json`, with keys of the files that are of one; null
    stands for any value, and `_module` for the trainer of a script. The first entry whose keys a file has counts."""
    run_defaults: tuple[str, ...] = ()
    """Keys whose defaults follow from other keys of a file, and not from its release."""
    implied: tuple[Mapping[str, Any], ...] = ()
    """Rules for keys that releases lack: `defaults` apply up to the release `until`, unless a key has its value in
    `unless`. Of a checkout whose `code` is known, they apply if it `has` a pattern and `lacks` a text."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Dataclasses with the defaults of the framework's configurations, by the names of these."""
    class_files: tuple[str, ...] = ()
    """Patterns of the modules of the framework with these classes."""
    planned_for_forks: Mapping[str, Any] = field(default_factory=dict)
    """Values with which a run is planned in place of one that only a fork has, where it is not the default."""
    release: ChosenRelease | None = None
    """The release whose defaults the references have."""
    _specs: dict[str, KeySpec] = field(default_factory=dict, init=False, repr=False, compare=False)

    def specs(self) -> Mapping[str, KeySpec]:
        """Return every key of all references; of two references with the same key, the first wins."""
        if not self._specs:
            self._specs.update({} if self.base is None else self.base.specs())
            documented: dict[str, KeySpec] = {}
            for reference in self.references:
                for spec in reference.load():
                    documented.setdefault(spec.key, spec)
            self._specs.update(documented)
        return self._specs

    def documented(self, key: str) -> str:
        """Return the documented key for a key of a similar section or for a list of names; otherwise the key itself."""
        for section, other in self.shared_sections.items():
            if key.startswith(f"{section}."):
                return (other + key.removeprefix(section)).removeprefix(".")
        section, _, names = key.rpartition(".")
        if {name.strip() for name in names.split(",")} <= set(self.name_lists.get(section, ())):
            return next((spec for spec in self.specs() if spec.rpartition(".")[0] == section), key)
        return key

    def spec(self, key: str) -> KeySpec | None:
        """Return the documentation of a key, also of one in a similar section; None if it is not documented."""
        return self.specs().get(key) or self.specs().get(self.documented(key))

    def default_tree(self) -> dict[str, Any]:
        """Return the defaults of the references as a tree, with the values to which they refer."""
        tree: dict[str, Any] = deepcopy(dict(self.context))
        for spec in self.specs().values():
            set_value(tree, spec.key, spec.default)
        return tree

    def known_keys(self) -> frozenset[str]:
        """Return the keys of the framework's releases that no key file documents, with those of its base.

        A section stands for all keys in it.
        """
        keys = known_names(self.name)
        return keys if self.base is None else (keys | self.base.known_keys()) - self.specs().keys()

    def reference(self, name: str) -> "Reference":
        """Return the reference with that name."""
        return next(reference for reference in self.references if reference.name == name)

    def narrowed(self, tree: Mapping[str, Any]) -> "Dialect":
        """Return the dialect with only the references that apply to such a configuration.

        A file for supervised fine-tuning, for instance, has other keys than one for reinforcement learning.
        """
        return self.narrow(self, tree)

    def missing_trainer(self, module: str) -> Capability | None:
        """Return the capability that a trainer of the framework waits for; None if the module is none of them."""
        return next((capability for pattern, capability in self.missing_trainers if pattern.fullmatch(module)), None)

    def configurations_of(self, tree: Mapping[str, Any], module: str) -> Sequence[str]:
        """Return the names of the framework's own configurations that such a file of a trainer can be of."""
        tree = {**tree, "_module": module}
        for names, marks in self.configurations:
            if all(has_key(tree, key) and value in (None, get_value(tree, key)) for key, value in marks.items()):
                return names
        return ()

    def of_release(self, release: ChosenRelease) -> "Dialect":
        """Return the dialect with the defaults of a release."""
        documented = {name: spec.key for spec in self.specs().values() for name in (*spec.aliases, spec.key)}

        def changed(spec: KeySpec) -> KeySpec:
            follows_run = spec.key in self.run_defaults
            return spec if follows_run else spec_of_release(spec, release.table, documented)

        base = None if self.base is None else self.base.of_release(release)
        references = tuple(reference.mapped(changed) for reference in self.references)
        return replace(self, references=references, base=base, release=release)

    def is_until(self, release: str) -> bool:
        """Return whether the release whose defaults apply is not newer than another one."""
        tables = load_release_tables(self.release.framework) if self.release else None
        if tables is None or self.release is None:
            return False
        order = tables.releases()
        return release in order and order.index(self.release.name) >= order.index(release)

    def with_references(self, *references: Reference) -> "Dialect":
        """Return the dialect with other references."""
        return replace(self, references=references)


@cache
def tables(framework: str) -> Mapping[str, Any]:
    """Return the tables of a framework's converter, from `FRAMEWORK/tables.yaml`."""
    text = (files("quintet.config.dialects") / framework / "tables.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    return document


def capabilities_by_pattern(table: Iterable[Sequence[str]]) -> tuple[tuple[re.Pattern[str], Capability], ...]:
    """Return the capabilities of a table of `[PATTERN, CAPABILITY]`."""
    return tuple((re.compile(pattern), Capability[name.upper()]) for pattern, name in table)


@cache
def known_names(file: str) -> frozenset[str]:
    """Return the names in `known/FILE.txt`: keys of a framework, or arguments of an engine."""
    text = (files("quintet.config.dialects") / "known" / f"{file}.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def without_effect(spec: KeySpec, **changes: Any) -> KeySpec:
    """Return a key that sets nothing, with other changes."""
    return spec.model_copy(update={"native": (), "computed": False} | changes)


def free_key(key: str, effect: str, value: Any = MappingProxyType({})) -> KeySpec:
    """Return a key that may be anything, or a free-form section if a file has a section as its value."""
    kind = SECTION if isinstance(value, Mapping) else ANYTHING
    return KeySpec(key=key, effect=effect, value_type=kind, default=None)


def any_keys(tree: Mapping[str, Any]) -> Reference:
    """Return the keys of a run that waits as a whole, which may be any."""
    effect = "Setting of a run that this version lacks."
    return Reference("other runs", lambda: tuple(free_key(str(name), effect, value) for name, value in tree.items()))


def key_files(framework: str, names: Iterable[str]) -> tuple[Reference, ...]:
    """Return a reference for each key file of a framework; it is loaded on first use."""
    return tuple(
        Reference(name, partial(load_keys, framework, name), partial(key_file_text, framework, name)) for name in names
    )
