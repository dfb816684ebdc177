"""If these fail, somebody who mistypes a key isn't told which one they meant."""

from __future__ import annotations

import random
import string
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.key_checks import unknown_keys
from quintet.config.dialects.loader import merge_with_reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.typos import closest_keys
from quintet.config.dotted import flatten

KEYS = Path(__file__).parent / "keys"

REFERENCES = [reference for dialect in DIALECTS.values() for reference in dialect.references]


def edited(key: str, rng: random.Random, *, anywhere: bool = False) -> str:
    """The key with one slip in its last word, or in any: a letter dropped, swapped, added or changed; its case
    changed; another separator."""
    words = key.split(".")
    number = rng.choices(range(len(words)), [len(word) for word in words])[0] if anywhere else len(words) - 1
    return ".".join([*words[:number], _slip(words[number], rng), *words[number + 1 :]])


def _slip(word: str, rng: random.Random) -> str:
    place = rng.randrange(len(word))
    letter = rng.choice([c for c in string.ascii_lowercase if c != word[place]])
    slips = {
        "drop": word[:place] + word[place + 1 :],
        "swap": word[:place] + word[place : place + 2][::-1] + word[place + 2 :],
        "add": word[:place] + letter + word[place:],
        "change": word[:place] + letter + word[place + 1 :],
        "case": word.title() if "_" in word else word.upper(),
        "separator": word.replace("_", "-") if "_" in word else f"{word[:place]}_{word[place:]}",
    }
    possible = [slip for slip in slips.values() if slip not in ("", word)]
    return rng.choice(possible)


@pytest.mark.parametrize("seed", range(3))
def test_one_slip_in_any_documented_key_is_traced_to_it(seed: int) -> None:
    rng = random.Random(seed)
    asked, wrong = 0, []
    for dialect in DIALECTS.values():
        legal = list(dialect.specs())
        for key in legal:
            slip = edited(key, rng)
            if slip in legal:
                continue
            asked += 1
            found = closest_keys(slip, legal)
            if not found or found[0] != key:
                wrong.append((slip, key, found))
    assert asked > 550
    assert len(wrong) <= 0.02 * asked, wrong


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("actor_rollout_ref.rollout.gpu-memory-utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("actor_rollout_ref.actor.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("data.trainBatchSize", "data.train_batch_size"),
        ("DATA.TRAIN_BATCH_SIZE", "data.train_batch_size"),
        ("data/train_batch_size", "data.train_batch_size"),
        ("train_batch_size", "data.train_batch_size"),
        ("zebra.crossing", None),
        ("actor_rollout_ref.rollout.zebra", None),
        ("actor_rollout_ref.rollout.m", "actor_rollout_ref.rollout.n"),
    ],
)
def test_what_is_near_is_named_and_what_is_far_isnt(written: str, right: str | None) -> None:
    found = closest_keys(written, list(DIALECTS["verl"].specs()))
    assert (found[0] if found else None) == right


FRAMES: dict[str, dict[str, Any]] = {
    "verl_ppo_trainer": {"actor_rollout_ref": {}},
    "verl_megatron_optim": {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}},
    "verl_sft_trainer": {"model": {}, "optim": {}},
    "verl_evaluation": {"data": {"path": "answers.parquet"}},
    "ragen_agent": {"es_manager": {"train": {"env_groups": 8}}},
    "vagen": {"rollout_manager": {}},
    "vagen_env_config": {"env1": {"env_name": "frozenlake"}},
    "rlinf_math": {"runner": {"task_type": "math"}},
    "rlinf_embodied": {"runner": {"task_type": "embodied"}, "env": {}},
    "rlinf_env": {"env_type": "libero"},
}
"""What makes a file one of that document."""
NAMED_BY_USERS = ("ragen_custom_envs",)
"""Documents whose keys contain a name of the user: another name is no slip."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted({path.stem for path in KEYS.glob("*.yaml")} - {*NAMED_BY_USERS}))
def test_a_slip_in_a_file_is_refused_and_the_key_that_was_meant_comes_first(name: str, seed: int) -> None:
    """In every document's own kind of file, whatever part of the key it falls on; none is accepted."""
    rng, wrong, asked = random.Random(f"{name}{seed}"), [], 0
    dialect = DIALECTS[name.split("_")[0]]
    for row in dialect.reference(name).load():
        key = f"actor_rollout_ref.actor.{row.key}" if name == "verl_megatron_optim" else row.key
        slip = edited(key, rng, anywhere=True)
        tree = nested(flatten(FRAMES.get(name, {})) | {slip: row.default}, FRAMES.get(name, {}))
        values, _ = merge_with_reference(config_from_tree(tree), dialect)
        if slip in values.dialect.specs():
            continue
        asked += 1
        found = [each for each in unknown_keys(values, dialect.known_keys()) if each.key == slip]
        assert found, f"{slip} was accepted"
        if found[0].suggestion != key:
            wrong.append((slip, key, found[0]))
    assert len(wrong) <= max(1, 0.02 * asked), wrong


def nested(values: dict[str, Any], frame: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = deepcopy(frame)
    for key, value in values.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree
