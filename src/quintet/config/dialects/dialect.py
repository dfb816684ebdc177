"""The dialects: which references each has, which keys are legal in them, and whose configuration a file is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from quintet.config.dialects.ledger import Row

__all__ = ["DIALECTS", "Dialect", "Reference", "detect"]


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


def detect(tree: Mapping[str, Any]) -> list[str]:
    """The dialects whose marks the configuration bears, the one with most of them first; none for a native one."""
    found = {name: sum(_has(tree, mark) for mark in dialect.marks) for name, dialect in DIALECTS.items()}
    return sorted((name for name, marks in found.items() if marks), key=lambda name: -found[name])


def _has(tree: Mapping[str, Any], dotted: str) -> bool:
    place: Any = tree
    for part in dotted.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return False
        place = place[part]
    return True
