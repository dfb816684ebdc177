"""The dialects: which references each has, which keys are legal in them, and whose configuration a file is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from quintet.config.dialects.ledger import Row

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

    def rows(self) -> dict[str, Row]:
        """Every key of all its references; where two documents have the same key, the first says what it takes."""
        table: dict[str, Row] = {}
        for reference in self.references:
            for row in reference.load():
                table.setdefault(row.key, row)
        return table if self.over is None else {**DIALECTS[self.over].rows(), **table}

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


_CRITIC = {"critic.model": "actor_rollout_ref.model", "critic": "actor_rollout_ref.actor"}
"""verl documents the critic's keys as those of the actor."""

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "ragen",
            _references(ragen=["ragen_keys:RAGEN_KEYS"]),
            marks=("rl_or_sft", "system.n_gpus", "training.n_rollout", "training.max_turns", "optimization", "sft"),
            alike={},
        ),
        Dialect(
            "vagen",
            _references(
                vagen=["vagen_keys:VAGEN_KEYS"],
                vagen_env_config=["vagen_keys:VAGEN_ENV_KEYS"],
            ),
            marks=("rollout_manager", "algorithm.high_level_gamma", "data.max_trajectory_length", "env1"),
            alike=_CRITIC,
            over="verl",
        ),
        Dialect(
            "verl",
            _references(
                verl_ppo_trainer=["verl_keys:VERL_TRAINER_KEYS", "verl_actor_keys:VERL_ACTOR_KEYS"],
                verl_megatron_optim=["verl_other_keys:VERL_MEGATRON_OPTIM_KEYS"],
                verl_sft_trainer=["verl_other_keys:VERL_SFT_KEYS"],
                verl_evaluation=["verl_other_keys:VERL_EVALUATION_KEYS"],
            ),
            marks=("actor_rollout_ref", "model.partial_pretrain", "custom_reward_function"),
            alike=_CRITIC,
        ),
        Dialect(
            "rlinf",
            _references(
                rlinf_basic=["rlinf_basic_keys:RLINF_BASIC_KEYS"],
                rlinf_math=["rlinf_math_keys:RLINF_MATH_KEYS"],
                rlinf_embodied=["rlinf_embodied_keys:RLINF_EMBODIED_KEYS"],
                rlinf_env=["rlinf_embodied_keys:RLINF_ENV_KEYS"],
            ),
            marks=("cluster", "runner", "env_type", "actor.group_name"),
            alike={"env.train": "", "env.eval": ""},
        ),
        Dialect(
            "roll",
            _references(roll=["roll_keys:ROLL_KEYS"]),
            marks=("actor_train", "actor_infer", "num_return_sequences_in_group", "reference"),
            alike={"critic": "actor_train"},
        ),
    )
}


def narrowed(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """The dialect with those of its references that such a file is written by: a file for supervised
    fine-tuning has other keys than one for reinforcement learning."""
    choose = {"verl": _verl, "vagen": _vagen, "rlinf": _rlinf}.get(dialect.name)
    return choose(dialect, tree) if choose else dialect


def _verl(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    if _has(tree, "actor_rollout_ref"):
        names = ["verl_ppo_trainer"]
    elif _has(tree, "data.path") or _has(tree, "data.response_key"):
        names = ["verl_evaluation"]
    elif _has(tree, "model") or _has(tree, "optim"):
        names = ["verl_sft_trainer"]
    else:
        names = ["verl_ppo_trainer"]
    chosen = tuple(map(dialect.reference, names))
    if names == ["verl_ppo_trainer"] and _get(tree, "actor_rollout_ref.actor.strategy") == "megatron":
        chosen = _with_megatron(dialect, chosen)
    return replace(dialect, references=chosen)


def _with_megatron(dialect: Dialect, chosen: tuple[Reference, ...]) -> tuple[Reference, ...]:
    """Megatron's optimizer section takes the place of FSDP's."""
    section = "actor_rollout_ref.actor"
    optim, ppo = dialect.reference("verl_megatron_optim"), chosen[0]

    def moved() -> tuple[Row, ...]:
        return tuple(replace(row, key=f"{section}.{row.key}") for row in optim.load())

    def rest() -> tuple[Row, ...]:
        return tuple(row for row in ppo.load() if not row.key.startswith(f"{section}.optim."))

    return (Reference(optim.name, moved), Reference(ppo.name, rest))


def _vagen(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """verl's keys below its own; each world has a section of a name that people choose."""
    below = _verl(DIALECTS["verl"], {"actor_rollout_ref": {}} | dict(tree))
    worlds = [name for name, section in tree.items() if isinstance(section, Mapping) and "env_name" in section]
    alike = {name: "env1" for name in worlds if name != "env1"}
    references = dialect.references + below.references
    return replace(dialect, references=references, over=None, alike=alike | dict(dialect.alike))


def _rlinf(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    if not _has(tree, "runner") and not _has(tree, "actor") and _has(tree, "env_type"):
        names = ["rlinf_env"]
    elif str(_get(tree, "runner.task_type")).startswith("embodied") or _has(tree, "env"):
        names = ["rlinf_embodied", "rlinf_basic", "rlinf_env"]
    else:
        names = ["rlinf_math", "rlinf_basic"]
    chosen = [dialect.reference(name) for name in names]
    if names[-1] == "rlinf_env" and len(names) > 1:
        chosen[-1] = Reference("rlinf_env", lambda: _in_worlds(dialect.reference("rlinf_env").load()))
    return replace(dialect, references=tuple(chosen), alike={})


def _in_worlds(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The keys of a world's own file where a run keeps them: in training and in validation."""
    return tuple(replace(row, key=f"env.{place}.{row.key}") for place in ("train", "eval") for row in rows)


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
