"""The worlds of VAGEN's env_config.yaml: a section each, mixed by how many start states each has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from quintet.config.capability import Capability
from quintet.config.dialects.conversion import Native, Values, foreign_word, native_word
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.vagen.world_keys import VAGEN_ENV_KEYS, WORLD, world_keys
from quintet.config.faults import Fault
from quintet.config.native.mixture import OWN_RULES
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.native import Experiment, PlayedWorld
    from quintet.config.translate import Foreign

__all__ = ["WORLDS", "Section", "convert_worlds", "express_worlds", "sections", "world_faults", "world_frame"]

FILES = ("data.train_files", "data.val_files")
WORLDS = ("frozenlake", "sokoban", "svg", "navigation", "primitive_skill")
"""Those that have a native counterpart."""
MADE = 10_000
"""Start states that the reference makes for training."""
FORM = "env_config.prompt_format"
PLAIN = ("free_think", "no_think")
"""Forms of a reply that each world may choose for itself."""


@dataclass(frozen=True, slots=True)
class Section:
    """One world's section."""

    name: str
    values: Values
    several: bool
    """There are others beside it."""

    def key(self, key: str) -> str:
        """One of its keys as it was given; else that of the reference."""
        own = f"{self.name}.{key}"
        return own if self.values.given(own) else f"{WORLD}.{key}"

    def __getitem__(self, key: str) -> Any:
        own = f"{self.name}.{key}"
        if self.values.given(own):
            return self.values[own]
        return self.values.dialect.rows()[f"{WORLD}.{key}"].default

    @property
    def kind(self) -> str:
        """Which world it is."""
        return str(self["env_name"])

    @property
    def native(self) -> str:
        """The native key of its world."""
        return f"worlds.{self.name}.world" if self.several else "world"


def sections(values: Values) -> list[Section]:
    """The sections of worlds that somebody gave; the reference's where nobody did."""
    named = [key.removesuffix(".env_name") for key in values.written.sources if key.endswith(".env_name")]
    names = [name for name in named if "." not in name] or [WORLD]
    return [Section(name, values, len(names) > 1) for name in names]


def _rows(kind: str) -> dict[str, Row]:
    """The keys of such a world's section, without its name."""
    start = f"{WORLD}."
    rows = (*VAGEN_ENV_KEYS, *world_keys([kind]))
    return {row.key.removeprefix(start): row for row in rows if row.key.startswith(start)}


def world_faults(values: Values) -> Iterator[Fault]:
    """Worlds that there aren't, options that they haven't, and what can't be mixed."""
    found = sections(values)
    for one in found:
        if one.kind not in WORLDS:
            problem = f"this world waits for {Capability.WORLDS}"
            yield values.fault(one.key("env_name"), problem, f"play {', '.join(WORLDS[:-1])} or {WORLDS[-1]}")
    if not any(values.given(f"{one.name}.env_name") for one in found):
        for key in filter(values.given, FILES):
            problem = "the rows of that file name worlds, and no section with an env_name says which"
            yield values.fault(key, problem, "give the env_config.yaml from which the file was made, too")
    if len(found) > 1:
        yield from _strangers(values, found)
        yield from _one_for_all(values, found)


def _strangers(values: Values, found: list[Section]) -> Iterator[Fault]:
    """Keys of another world than their section's."""
    for one in found:
        legal = _rows(one.kind)
        for key in values.written.sources:
            name, _, rest = key.partition(".")
            if name == one.name and rest.startswith("env_config.") and rest not in legal:
                yield values.fault(key, f"{one.kind} has no such option", "leave it out")


def _one_for_all(values: Values, found: list[Section]) -> Iterator[Fault]:
    """What a run has once, whatever worlds it plays."""
    for key in ("env_config.format_reward", FORM):
        said = {_once(key, one[key]): one for one in found}
        if len(said) > 1:
            told = ", ".join(f"{one.name}.{key} = {one[key]}" for one in said.values())
            last = found[-1].key(key)
            problem = f"one run has one for all its worlds, and here it is {told}"
            yield values.fault(last, problem, "give all sections the same")


def _once(key: str, value: Any) -> Any:
    return PLAIN if key == FORM and value in PLAIN else value


def convert_worlds(values: Values, native: Native) -> None:
    """One section is the run's world, several are its worlds, each with its share of the start states."""
    found = sections(values)
    rules: dict[str, dict[str, tuple[Any, str]]] = {}
    for one in found:
        _convert_world(one, native, rules)
    for field, said in rules.items():
        _rule(field, said, native)
    sizes = {one.name: one["train_size"] for one in found}
    unit = math.gcd(*sizes.values())
    for one in found if len(found) > 1 else ():
        native.put(f"worlds.{one.name}.share", float(sizes[one.name] // unit), one.key("train_size"))
        native.put(f"worlds.{one.name}.validation_games", one["test_size"], one.key("test_size"))
    native.put("validation.games", sum(one["test_size"] for one in found), *(one.key("test_size") for one in found))
    native.put("rollout.format_penalty", 0.0)
    native.put("rollout.fold_case", False)
    native.put("rollout.strip_special_tokens", True)


def _convert_world(one: Section, native: Native, rules: dict[str, dict[str, tuple[Any, str]]]) -> None:
    """A section's world; what it says of how it is played goes into `rules`, by native key and section."""
    name = one.key("env_name")
    native.put(one.native, {"name": one.kind}, name, *FILES)
    native.put(f"{one.native}.render", one["env_config.render_mode"], one.key("env_config.render_mode"))
    for rest, row in _rows(one.kind).items():
        field, value = row.native[0], one[rest]
        if row.direct and field.startswith("world."):
            native.put(one.native + field.removeprefix("world"), native_word(row, value), one.key(rest))
        elif row.direct:
            rules.setdefault(field, {})[one.name] = (native_word(row, value), one.key(rest))
    form = one[FORM]
    rules.setdefault("rollout.think", {})[one.name] = (form != "no_think", one.key(FORM))
    rules.setdefault("rollout.thoughts", {})[one.name] = (None if form in PLAIN else form, one.key(FORM))
    if one.kind == "sokoban":
        room = "env_config.dim_room"
        for side, cells in zip(("height", "width"), one[room], strict=True):
            native.put(f"{one.native}.{side}", cells, one.key(room))
    if one.kind in ("frozenlake", "sokoban"):
        native.put(f"{one.native}.observation", "grid")


def _rule(field: str, said: Mapping[str, tuple[Any, str]], native: Native) -> None:
    """A rule that all worlds have is the run's; else each has its own."""
    own = field.removeprefix("rollout.")
    if own not in OWN_RULES or len({value for value, _ in said.values()}) == 1:
        native.put(field, next(iter(said.values()))[0], *dict.fromkeys(key for _, key in said.values()))
        return
    for name, (value, key) in said.items():
        native.put(f"worlds.{name}.{own}", value, key)


def world_frame(experiment: Experiment, taken: set[str]) -> dict[str, Any]:
    """A section for each world; `taken` are names of sections that are something else.

    Raises:
        ConfigError: VAGEN has no such world, or can't call it so.
    """
    for one in experiment.played:
        if one.config.name not in WORLDS:
            message = f"VAGEN's reference has no world {one.config.name}"
            raise ConfigError(message, key=f"{one.key}.name", hint=f"it has {', '.join(WORLDS)}")
        if experiment.worlds and one.name in taken:
            told = f"worlds.{one.name}: VAGEN has another section of that name"
            raise ConfigError(told, key="worlds", value=one.name, hint="give the world another name")
    return {_name(one, experiment): {"env_name": one.config.name} for one in experiment.played}


def _name(one: PlayedWorld, experiment: Experiment) -> str:
    return one.name if experiment.worlds else WORLD


def express_worlds(foreign: Foreign) -> None:
    """Every world's section."""
    run = foreign.experiment
    for key in [key for key in foreign.values if key.startswith(f"{WORLD}.")]:
        del foreign.values[key]
    for one, size in zip(run.played, _sizes(run), strict=True):
        section = _name(one, run)
        for rest, row in _rows(one.config.name).items():
            place, _, field = row.native[0].partition(".")
            value = foreign_word(row, getattr(one.config if place == "world" else one.rollout, field, None))
            if row.direct and row.takes.accepts(value):
                foreign.put(f"{section}.{rest}", value)
        foreign.put(f"{section}.env_config.render_mode", getattr(one.config, "render", "text"))
        form = one.rollout.thoughts or ("free_think" if one.rollout.think else "no_think")
        foreign.put(f"{section}.{FORM}", form)
        if one.config.name == "sokoban":
            foreign.put(f"{section}.env_config.dim_room", [one.config.height, one.config.width])
        foreign.put(f"{section}.train_size", size)
        foreign.put(f"{section}.test_size", one.validation_games)


def _sizes(run: Experiment) -> list[int]:
    """Start states of each world: those that it has, or by share as many as the run draws, and no fewer than the
    reference makes."""
    shares = [Fraction(one.share).limit_denominator(MADE) for one in run.played]
    unit = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * unit) for share in shares]
    common = math.gcd(*parts)
    parts = [part // common for part in parts]
    drawn = max(MADE, run.training.steps * run.training.groups_per_step)
    times = -(-drawn // sum(parts))
    return [one.start_states or part * times for one, part in zip(run.played, parts, strict=True)]
