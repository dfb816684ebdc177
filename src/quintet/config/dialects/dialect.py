"""The dialects: which references each has, which keys are legal in them, and whose configuration a file is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from quintet.config.capability import Capability
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.rlinf.words import COMPONENTS

__all__ = ["DIALECTS", "Dialect", "Reference", "detect", "narrowed"]


@dataclass(frozen=True, slots=True)
class Reference:
    """One document of a dialect: the keys of one kind of file."""

    name: str
    """As the document is called: `verl_ppo_trainer`."""
    load: Callable[[], tuple[Row, ...]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A framework's way to say what a run is."""

    name: str
    references: tuple[Reference, ...]
    marks: tuple[str, ...]
    """Sections and keys by which its files are told from the others'."""
    alike: Mapping[str, str]
    """Sections that take the keys of another, the longest first: `critic` those of `actor_train`."""
    over: str | None = None
    """The dialect whose keys it takes as well, below its own."""
    listed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Sections whose keys are names joined by commas, any of these: `cluster.component_placement`."""
    also: frozenset[str] = frozenset()
    """Legal keys that no row describes: other keys' values in its documents refer to them."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Values, as a tree, that its files refer to by `${…}` and that other files give."""
    _table: dict[str, Row] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rows(self) -> Mapping[str, Row]:
        """Every key of all its references; where two documents have the same key, the first says what it takes."""
        if not self._table:
            own: dict[str, Row] = {}
            for reference in self.references:
                for row in reference.load():
                    own.setdefault(row.key, row)
            self._table.update({} if self.over is None else DIALECTS[self.over].rows())
            self._table.update(own)
        return self._table

    def documented(self, key: str) -> str:
        """The documented key that a key of a like section, or a list of names, stands for; else the key itself."""
        for section, other in self.alike.items():
            if key.startswith(f"{section}."):
                return (other + key.removeprefix(section)).removeprefix(".")
        section, _, names = key.rpartition(".")
        if {name.strip() for name in names.split(",")} <= set(self.listed.get(section, ())):
            return next((row for row in self.rows() if row.rpartition(".")[0] == section), key)
        return key

    def reference(self, name: str) -> Reference:
        """One of its documents."""
        return next(reference for reference in self.references if reference.name == name)


def _rows(*places: str) -> Callable[[], tuple[Row, ...]]:
    """Tables by `module:CONSTANT`, loaded when asked for."""

    def load() -> tuple[Row, ...]:
        found: list[Row] = []
        for place in places:
            module, _, name = place.partition(":")
            found += getattr(import_module(f"quintet.config.dialects.{module}"), name)
        return tuple(found)

    return load


def _references(**places: Iterable[str]) -> tuple[Reference, ...]:
    return tuple(Reference(name, _rows(*of)) for name, of in places.items())


_CRITIC = {
    "critic.model.fsdp_config": "actor_rollout_ref.actor.fsdp_config",
    "critic.model": "actor_rollout_ref.model",
    "critic": "actor_rollout_ref.actor",
}
"""verl documents the critic's keys as those of the actor."""

_OPTIONS = "strategy_args.strategy_config"
_ROLL_WORKERS = {
    f"reference.{_OPTIONS}": f"actor_train.{_OPTIONS}",
    "reference.model_args": "actor_train.model_args",
    "actor_infer.model_args": "actor_train.model_args",
    "critic": "actor_train",
}
"""ROLL documents options that several kinds of workers take once."""

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "ragen",
            _references(ragen=["ragen.keys:RAGEN_KEYS"]),
            marks=(
                *("rl_or_sft", "system.n_gpus", "training.n_rollout", "training.max_turns", "optimization"),
                *("sft.env_type", "sft.data_generation", "sft.training", "model.base_model"),
                *("training.ppo_batch_size", "training.train_batch_size", "training.train_data_num"),
            ),
            alike={},
        ),
        Dialect(
            "vagen",
            _references(
                vagen=["vagen.keys:VAGEN_KEYS"],
                vagen_env_config=["vagen.world_keys:VAGEN_ENV_KEYS"],
            ),
            marks=("rollout_manager", "algorithm.high_level_gamma", "data.max_trajectory_length", "env1"),
            alike=_CRITIC,
            over="verl",
        ),
        Dialect(
            "verl",
            _references(
                verl_ppo_trainer=["verl.keys:VERL_TRAINER_KEYS", "verl.actor_keys:VERL_ACTOR_KEYS"],
                verl_megatron_optim=["verl.other_keys:VERL_MEGATRON_OPTIM_KEYS"],
                verl_sft_trainer=["verl.other_keys:VERL_SFT_KEYS"],
                verl_evaluation=["verl.other_keys:VERL_EVALUATION_KEYS"],
            ),
            marks=("actor_rollout_ref", "model.partial_pretrain", "custom_reward_function"),
            alike=_CRITIC,
        ),
        Dialect(
            "rlinf",
            _references(
                rlinf_basic=["rlinf.basic_keys:RLINF_BASIC_KEYS"],
                rlinf_math=["rlinf.math_keys:RLINF_MATH_KEYS"],
                rlinf_embodied=["rlinf.embodied_keys:RLINF_EMBODIED_KEYS"],
                rlinf_env=["rlinf.embodied_keys:RLINF_ENV_KEYS"],
            ),
            marks=("cluster", "runner", "env_type", "actor.group_name"),
            alike={"env.train": "", "env.eval": ""},
            listed={"cluster.component_placement": COMPONENTS},
        ),
        Dialect(
            "roll",
            _references(roll=["roll.keys:ROLL_KEYS"]),
            marks=("actor_train", "actor_infer", "num_return_sequences_in_group", "reference.strategy_args"),
            alike=_ROLL_WORKERS,
        ),
    )
}


def narrowed(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """The dialect with those of its references that such a file is written by: a file for supervised
    fine-tuning has other keys than one for reinforcement learning."""
    choose = {"ragen": _ragen, "verl": _verl, "vagen": _vagen, "rlinf": _rlinf, "roll": _roll}.get(dialect.name)
    return choose(dialect, tree) if choose else dialect


def _ragen(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """The stages of `sft` count where reinforcement learning is to follow them, too."""
    if _get(tree, "training.use_sft") is not True:
        return dialect
    return replace(dialect, references=(Reference("ragen", _rows("ragen.keys:RAGEN_KEYS_OF_BOTH")),))


def _verl(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    if _has(tree, "actor_rollout_ref"):
        names = ["verl_ppo_trainer"]
    elif _has(tree, "model") or _has(tree, "optim"):
        names = ["verl_sft_trainer"]
    elif _has(tree, "data.path") or _has(tree, "data.response_key"):
        names = ["verl_evaluation"]
    else:
        names = ["verl_ppo_trainer"]
    chosen = tuple(map(dialect.reference, names))
    if names == ["verl_sft_trainer"]:
        chosen = (*chosen, Reference("verl_sft_run", _rows("verl.sft_run_keys:VERL_SFT_RUN_KEYS")))
    if names == ["verl_ppo_trainer"] and _get(tree, "actor_rollout_ref.actor.strategy") == "megatron":
        chosen = _with_megatron(dialect, chosen)
    if names == ["verl_ppo_trainer"]:
        chosen = (*chosen, Reference("verl_newer", _rows("verl.newer_keys:VERL_NEWER_KEYS")))
    return replace(dialect, references=chosen)


def _with_megatron(dialect: Dialect, chosen: tuple[Reference, ...]) -> tuple[Reference, ...]:
    """Megatron's optimizer section takes the place of FSDP's."""
    section = "actor_rollout_ref.actor"
    optim, ppo = dialect.reference("verl_megatron_optim"), chosen[0]

    def inside(key: str) -> str:
        return f"{section}.{key}" if key.startswith("optim.") else key

    def moved() -> tuple[Row, ...]:
        return tuple(
            replace(
                row,
                key=inside(row.key),
                aliases=tuple(map(inside, row.aliases)),
                only_if=row.only_if and (inside(row.only_if[0]), row.only_if[1]),
            )
            for row in optim.load()
        )

    def rest() -> tuple[Row, ...]:
        return tuple(row for row in ppo.load() if not row.key.startswith(f"{section}.optim."))

    return (Reference(optim.name, moved), Reference(ppo.name, rest))


def _vagen(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """The worlds' own keys, and verl's, below its own; each world has a section of a name that people choose."""
    worlds = {
        str(name): str(section["env_name"])
        for name, section in tree.items()
        if isinstance(section, Mapping) and "env_name" in section
    }
    played = tuple(worlds.values()) or ("frozenlake",)

    def of_worlds() -> tuple[Row, ...]:
        found: tuple[Row, ...] = import_module("quintet.config.dialects.vagen.world_keys").world_keys(played)
        return found

    own = (*dialect.references, Reference("vagen_worlds", of_worlds))
    older = {alias for reference in dialect.references for row in reference.load() for alias in row.aliases}
    below = _verl(DIALECTS["verl"], {"actor_rollout_ref": {}} | dict(tree)).references
    alike = {name: "env1" for name in worlds if name != "env1"}
    references = (*own, *(_beside_worlds(_without(reference, older)) for reference in below))
    return replace(dialect, references=references, over=None, alike=alike | dict(dialect.alike))


def _beside_worlds(reference: Reference) -> Reference:
    """verl's document where worlds are played: what concerns prompts from files, and rules that judge answers, has
    no effect there yet."""

    def changed(row: Row) -> Row:
        if not row.key.startswith(_OF_PROMPTS) or not row.native[0].startswith(("data.", "reward")):
            return row
        return replace(row, pending=Capability.WORLDS, proof=None, noop=(row.default, *row.noop))

    return Reference(reference.name, lambda: tuple(map(changed, reference.load())))


_OF_PROMPTS = ("data.", "reward_model.", "custom_reward_function.")


def _without(reference: Reference, keys: Iterable[str]) -> Reference:
    """A document without some of its keys."""
    gone = frozenset(keys)
    return Reference(reference.name, lambda: tuple(row for row in reference.load() if row.key not in gone))


def _roll(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Its reference leaves out what names a run and its model; no file of ROLL's is without it."""
    return replace(
        dialect, references=(*dialect.references, Reference("roll_run", _rows("roll.run_keys:ROLL_RUN_KEYS")))
    )


def _rlinf(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """A run on text or on simulators, each with what it shares with the other, or a simulator's own file."""
    math, basic, embodied, env = map(dialect.reference, ("rlinf_math", "rlinf_basic", "rlinf_embodied", "rlinf_env"))
    if not _has(tree, "runner") and not _has(tree, "actor") and _has(tree, "env_type"):
        return replace(dialect, references=(env,), alike={}, listed={}, context=_AROUND_A_WORLD)
    if str(_get(tree, "runner.task_type")).startswith("embodied") or _has(tree, "env"):

        def basics() -> tuple[Row, ...]:
            return tuple(
                replace(row, default="embodied") if row.key == "runner.task_type" else row for row in basic.load()
            )

        chosen = [embodied, Reference(basic.name, basics), Reference(env.name, lambda: _in_worlds(env.load()))]
        chosen.append(_part(math, "actor.fsdp_config."))
    else:
        newer = Reference("rlinf_newer", _rows("rlinf.newer_keys:RLINF_NEWER_KEYS"))
        chosen = [math, basic, _part(embodied, "rollout.backend"), newer]
    also = frozenset(["algorithm.auto_reset", "algorithm.ignore_terminations"] if chosen[0] is embodied else [])
    return replace(dialect, references=tuple(chosen), alike={}, also=also)


def _part(reference: Reference, start: str) -> Reference:
    """Those of its keys that begin so."""
    return Reference(reference.name, lambda: tuple(row for row in reference.load() if row.key.startswith(start)))


_AROUND_A_WORLD = {
    "algorithm": {"auto_reset": False, "ignore_terminations": False, "group_size": 1},
    "runner": {"logger": {"log_path": "logs"}},
}
"""What the reference of RLinf's environment files refers to."""

_IN_VALIDATION = {
    "world": "validation.simulator",
    "tracking.video": "tracking.validation_video",
    "training.groups_per_step": "validation.games",
    "training.samples_per_group": "validation.sampling.samples",
}
"""Native keys by which a world's own file says how validation plays, where training has others."""


def _in_worlds(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The keys of a world's own file where a run keeps them: in training and in validation."""
    return tuple(_in_world(row, f"env.{place}") for place in ("train", "eval") for row in rows)


def _in_world(row: Row, section: str) -> Row:
    def native(key: str) -> str:
        if section == "env.train":
            return key
        theirs = next(theirs for theirs in _IN_VALIDATION if key == theirs or key.startswith(f"{theirs}."))
        return _IN_VALIDATION[theirs] + key.removeprefix(theirs)

    return replace(
        row,
        key=f"{section}.{row.key}",
        native=tuple(map(native, row.native)),
        aliases=tuple(f"{section}.{alias}" for alias in row.aliases),
        only_if=row.only_if and (f"{section}.{row.only_if[0]}", row.only_if[1]),
    )


def detect(tree: Mapping[str, Any]) -> list[str]:
    """The dialects whose marks the configuration bears, the one with most of them first; none for a native one."""
    found = {name: sum(_has(tree, mark) for mark in dialect.marks) for name, dialect in DIALECTS.items()}
    return sorted((name for name, marks in found.items() if marks), key=lambda name: -found[name])


def _has(tree: Mapping[str, Any], dotted: str) -> bool:
    return _get(tree, dotted, missing=_has) is not _has


def _get(tree: Mapping[str, Any], dotted: str, missing: Any = None) -> Any:
    place: Any = tree
    for part in dotted.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return missing
        place = place[part]
    return place
