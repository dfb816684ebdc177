"""The keys of VAGEN's env_config.yaml: those that its reference shows, and the worlds' own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quintet.config.dialects.ledger import Capability, Row, row
from quintet.config.dialects.takes import BOOLEAN, POSITIVE, TEXT, Takes, choice, integer, number
from quintet.config.dialects.vagen.keys import PROOF
from quintet.config.dialects.verl.keys import VERL_TRAINER_KEYS

__all__ = ["VAGEN_ENV_KEYS", "VAGEN_OVER_VERL", "VAGEN_WORLD_KEYS", "WORLD", "world_keys"]

WORLD = "env1"
"""The section of a world in the reference; people give it any name."""
FORMATS = ("grounding", "worldmodeling", "grounding_worldmodeling")
FORMS = ("structured", "symbolic")


def _cells(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(integer(least=4, most=16).accepts, value))


VAGEN_ENV_KEYS: tuple[Row, ...] = (
    row(
        "env1.env_name",
        choice("frozenlake", "sokoban", "svg", "navigation", "primitive_skill", "alfworld", "blackjack"),
        "frozenlake",
        "World that is played; further sections (env2, …) mix in other worlds.",
        native="world.name",
        pending=Capability.WORLDS,
        noop=("frozenlake", "sokoban"),
        computed=True,
    ),
    row(
        "env1.env_config.render_mode",
        choice("text", "vision"),
        "text",
        "How observations reach the policy: as text or as an image.",
        pending=Capability.VISION,
        noop=("text",),
        native="world.render",
        computed=True,
    ),
    row(
        "env1.train_size",
        POSITIVE,
        10000,
        "Start states made for training; a run that plays more begins with them again. Each of several worlds is played"
        " as its part of all start states says.",
        native=("training.start_states", "worlds.*.share", "worlds.*.start_states"),
        computed=True,
        unit="start states",
        proof=PROOF,
    ),
    row(
        "env1.test_size",
        POSITIVE,
        512,
        "Start states made for validation, one game each.",
        native=("validation.games", "worlds.*.validation_games"),
        proof=PROOF,
        computed=True,
        unit="games",
    ),
)
"""One section of env_config.yaml; env1 stands for any name."""

_ANY_WORLD: tuple[Row, ...] = (
    row(
        "env1.env_config.prompt_format",
        choice("free_think", "no_think", *FORMATS, *(f"{name}_{form}" for name in FORMATS for form in FORMS)),
        "free_think",
        "What a reply holds besides its actions: thoughts, nothing, or a description of what is seen and expected.",
        native=("rollout.think", "rollout.thoughts"),
        pending=Capability.WORLDS,
        noop=("free_think", "no_think"),
    ),
    row(
        "env1.env_config.max_actions_per_step",
        POSITIVE,
        3,
        "Actions executed from one reply; the rest is dropped.",
        native="rollout.max_actions_per_turn",
        proof=PROOF,
        unit="actions",
    ),
    row(
        "env1.env_config.action_sep",
        TEXT,
        ",",
        "Between the actions of one reply.",
        native="rollout.action_separator",
        proof=PROOF,
    ),
    row(
        "env1.env_config.format_reward",
        number(least=0),
        0.5,
        "Added to the reward of a turn whose reply has the right form and names legal actions.",
        native="rollout.format_reward",
        pending=Capability.WORLDS,
        noop=(0,),
    ),
)
_LAKE: tuple[Row, ...] = (
    row(
        "env1.env_config.size",
        integer(least=2, most=32),
        4,
        "Cells a side of the lake.",
        native="world.size",
        proof=PROOF,
        unit="cells",
    ),
    row(
        "env1.env_config.p",
        number(above=0, most=1),
        0.8,
        "Share of the lake's cells that are frozen rather than holes.",
        native="world.floor_density",
        proof=PROOF,
        unit="share",
    ),
    row(
        "env1.env_config.is_slippery",
        BOOLEAN,
        False,
        "The ice moves the agent sideways now and then.",
        native="world.slippery",
        proof=PROOF,
    ),
)
_SOKOBAN: tuple[Row, ...] = (
    row(
        "env1.env_config.dim_room",
        Takes("a list of two integers ≥ 4 and ≤ 16", _cells),
        [6, 6],
        "Height and width of the room in cells, walls included.",
        native=("world.height", "world.width"),
        proof=PROOF,
        unit="cells",
    ),
    row(
        "env1.env_config.num_boxes",
        integer(least=1, most=6),
        1,
        "Boxes, and as many targets.",
        native="world.boxes",
        proof=PROOF,
    ),
    row(
        "env1.env_config.max_steps",
        POSITIVE,
        100,
        "Actions until the world itself ends the game; VAGEN's source goes on.",
        native="world.max_steps",
        proof=PROOF,
        unit="actions",
    ),
    row(
        "env1.env_config.search_depth",
        POSITIVE,
        30,
        "Moves of the reverse play that makes a puzzle from its solution.",
        native="world.pull_steps",
        proof=PROOF,
        unit="moves",
    ),
)
VAGEN_WORLD_KEYS = {"frozenlake": _LAKE, "sokoban": _SOKOBAN}
"""Keys of each world's `env_config` that its own configuration class has and this reference doesn't show."""

_HERE = {
    "trainer.total_epochs": "training.steps",
    "algorithm.kl_penalty": "algorithm.kl.estimator",
    "algorithm.kl_ctrl.type": "algorithm.kl.target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl.horizon",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target",
}
"""Keys of verl whose effect here follows from other keys than there, and what they feed."""


def _here(one: Row) -> Row:
    changed = replace(one, native=(_HERE[one.key],), computed=True, only_if=None)
    return replace(changed, pending=None, proof=PROOF) if one.key == "trainer.total_epochs" else changed


VAGEN_OVER_VERL: tuple[Row, ...] = tuple(_here(one) for one in VERL_TRAINER_KEYS if one.key in _HERE)


def world_keys(names: Iterable[str]) -> tuple[Row, ...]:
    """The keys of such worlds' own configuration, and those of verl that count otherwise here."""
    own = (one for name in dict.fromkeys(names) for one in VAGEN_WORLD_KEYS.get(name, ()))
    return (*_ANY_WORLD, *own, *VAGEN_OVER_VERL)
