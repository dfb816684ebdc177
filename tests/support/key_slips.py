"""Slips of the hand in the keys of every kind of file, and what the check of unknown keys suggests for them."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from quintet.config.compose import load_experiment
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.loader import merge_with_reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.releases import documented_names
from quintet.config.dialects.unknown_keys import keys_of_similar_sections, unknown_keys
from quintet.config.dialects.value_types import SECTION
from quintet.config.dotted import is_inside, sections_around, set_value
from quintet.config.schema import keys, valid_keys
from quintet.errors import ConfigError

__all__ = ["FILES", "NATIVE", "SLIPS", "Slip", "file_keys", "make_slips", "native_suggestions", "suggested_keys"]

ROBOTS = {"runner": {"task_type": "embodied"}, "env": {"train": {"env_type": "libero"}, "eval": {"env_type": "libero"}}}
ROLL_POLICY = {"actor_train": {"model_args": {}}, "actor_infer": {"generating_args": {}}}
FILES: dict[str, dict[str, Any]] = {
    "ragen: before May 2025": {"training": {"n_rollout": 4}},
    "ragen": {"es_manager": {"train": {"env_groups": 8}}, "custom_envs": {"Sokoban": {"env_type": "sokoban"}}},
    "verl: ppo_trainer": {"actor_rollout_ref": {}},
    "verl: ppo_megatron_trainer": {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}},
    "verl: sft_trainer": {"model": {}, "optim": {}},
    "verl: evaluation": {"data": {"path": "answers.parquet"}},
    "vagen": {"rollout_manager": {}, "env1": {"env_name": "sokoban"}},
    "rlinf: reasoning": {"runner": {"task_type": "math"}},
    "rlinf: robots": ROBOTS,
    "rlinf: simulator": {"env_type": "libero"},
    "roll: RLVR": {**ROLL_POLICY, "rewards": {"math_rule": {}}},
    "roll: agentic": {**ROLL_POLICY, "train_env_manager": {}, "custom_envs": {"Lake": {"env_type": "frozen_lake"}}},
    "roll: SFT": {"sft_train": {}},
    "roll: DPO": {"actor_train": {}, "chosen_key": "chosen"},
    "roll: distillation": {"student": {}, "teacher_pretrain": "some/model"},
}
"""The sections and values by which a file is one of that kind; its name begins with that of the dialect."""
USERS_NAMES = {"custom_envs": ("Sokoban", "SimpleSokoban", "FrozenLake", "Lake"), "rewards": ("math_rule",)}
"""Sections whose keys begin with a name that the user chooses, with the names here: another name is no slip."""

NATIVE = "native"
NATIVE_ENTRY = "envs.lake"
"""The entry of native files with several environments; another name in its place is no slip."""
NATIVE_MESSAGE = re.compile(r"unknown key (?P<key>\S+) = .*\n  did you mean (?P<suggestion>[^\s?]+)")

NAMED_TEACHERS = "distillation.teacher_models"
"""Section of verl whose sections are teachers with names that the user chooses."""


def file_dialect(name: str) -> Dialect:
    return DIALECTS[name.partition(":")[0]]


def file_keys(name: str) -> list[str]:
    """Return the documented keys of a kind of file."""
    return [*file_dialect(name).narrowed(FILES[name]).specs()]


@dataclass(frozen=True)
class Slip:
    """A key as it was meant, and as it was typed."""

    kind: str
    key: str
    typed: str


def _in_word(change: Callable[[str, int, str], str]) -> Callable[[list[str], random.Random], list[str] | None]:
    """Return a slip in one character of one word."""

    def slip(words: list[str], rng: random.Random) -> list[str] | None:
        number = rng.choices(range(len(words)), [len(word) for word in words])[0]
        word, place = words[number], rng.randrange(len(words[number]))
        letter = rng.choice([letter for letter in string.ascii_lowercase if letter != word[place]])
        changed = change(word, place, letter)
        return [*words[:number], changed, *words[number + 1 :]] if changed else None

    return slip


def _without_section(words: list[str], rng: random.Random) -> list[str] | None:
    if len(words) < 2:
        return None
    number = rng.randrange(len(words) - 1)
    return words[:number] + words[number + 1 :]


def _doubled_section(words: list[str], rng: random.Random) -> list[str] | None:
    if len(words) < 2:
        return None
    number = rng.randrange(len(words) - 1)
    return [*words[: number + 1], *words[number:]]


def _with_hyphens(words: list[str], rng: random.Random) -> list[str] | None:
    joined = [number for number, word in enumerate(words) if "_" in word.strip("_")]
    if not joined:
        return None
    number = rng.choice(joined)
    return [*words[:number], words[number].replace("_", "-"), *words[number + 1 :]]


SLIPS: Mapping[str, Callable[[list[str], random.Random], list[str] | None]] = {
    "deletion": _in_word(lambda word, place, letter: word[:place] + word[place + 1 :]),
    "insertion": _in_word(lambda word, place, letter: word[:place] + letter + word[place:]),
    "substitution": _in_word(lambda word, place, letter: word[:place] + letter + word[place + 1 :]),
    "transposition": _in_word(
        lambda word, place, letter: word[:place] + word[place : place + 2][::-1] + word[place + 2 :]
    ),
    "case": _in_word(lambda word, place, letter: word.title() if "_" in word else word.upper()),
    "missing section": _without_section,
    "doubled section": _doubled_section,
    "hyphen": _with_hyphens,
}
"""One slip in the words of a key; None if the key cannot have it."""


def make_slips(name: str, keys: Iterable[str], rng: random.Random, kinds: Iterable[str] = SLIPS) -> Iterator[Slip]:
    """Yield a slip of each kind in each key.

    Left out are those that give another valid key, and missing sections that several keys have in common.
    """
    narrowed = file_dialect(name).narrowed(FILES[name])
    valid = _is_valid(file_dialect(name), narrowed)
    legal = {*narrowed.specs(), *keys_of_similar_sections(narrowed.specs(), narrowed.shared_sections)}
    yield from _slips(keys, legal, rng, kinds, lambda key, typed: valid(typed) or _has_other_users_name(key, typed))


def _slips(
    keys: Iterable[str],
    legal: Iterable[str],
    rng: random.Random,
    kinds: Iterable[str],
    is_no_slip: Callable[[str, str], bool],
) -> Iterator[Slip]:
    lacking = _keys_without_a_section(legal)
    for key in keys:
        for kind in kinds:
            words = SLIPS[kind](key.split("."), rng)
            typed = key if words is None else ".".join(words)
            if typed != key and not is_no_slip(key, typed) and (kind != "missing section" or lacking[typed] == 1):
                yield Slip(kind, key, typed)


def _keys_without_a_section(legal: Iterable[str]) -> Counter[str]:
    """Return how many keys become each key if one of their sections is left out."""
    words = (key.split(".") for key in legal)
    return Counter(
        typed for each in words for typed in {".".join(each[:n] + each[n + 1 :]) for n in range(len(each) - 1)}
    )


def _has_other_users_name(key: str, typed: str) -> bool:
    if typed.startswith(f"{NAMED_TEACHERS}."):
        return typed.split(".")[2:3] != key.split(".")[2:3]
    section, *rest = typed.split(".")
    names = USERS_NAMES.get(section, ())
    chosen = [name for name in key.split(".")[1:2] if name in USERS_NAMES.get(key.partition(".")[0], ())]
    return (bool(names) and rest[:1] != chosen) or any(name not in typed.split(".") for name in chosen)


def _is_valid(dialect: Dialect, narrowed: Dialect) -> Callable[[str], bool]:
    """Return whether a key is one of the framework's: documented, known, an older name, or in a section of any keys."""
    specs, known = narrowed.specs(), dialect.known_keys() | documented_names(dialect)
    names = {*specs, *dialect.specs(), *known, *narrowed.undocumented}
    names |= {alias for spec in specs.values() for alias in spec.aliases}
    names |= {section for key in (*specs, *known) for section in sections_around(key)}
    free = [key for key, spec in specs.items() if spec.value_type is SECTION]

    def valid(key: str) -> bool:
        documented = narrowed.documented(key)
        return key in names or documented in names or any(is_inside(documented, section) for section in free)

    return valid


def suggested_keys(name: str, slips: Iterable[Slip]) -> Iterator[tuple[Slip, str | None, bool]]:
    """Yield each slip with the suggested key, and whether the slip was refused.

    Slips are put into as few files as possible, since most of the time is the reference's.
    """
    waiting = list(slips)
    while waiting:
        tree, typed, later = deepcopy(FILES[name]), [], []
        for slip in waiting:
            (typed if _put(tree, slip.typed) else later).append(slip)
        values, _ = merge_with_reference(config_from_tree(tree), file_dialect(name))
        unknown = unknown_keys(values, file_dialect(name))
        suggestions = {each.key: each.suggestion for each in unknown}
        refused = {each.key for each in unknown if not each.is_of_fork}
        yield from ((slip, suggestions.get(slip.typed), slip.typed in refused) for slip in typed)
        waiting = later


def _put(tree: dict[str, Any], key: str) -> bool:
    """Set a key of a tree to null; return False if the tree has a value or a section there."""
    *sections, last = key.split(".")
    place: Any = tree
    for section in sections:
        place = place.setdefault(section, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last in place:
        return False
    place[last] = None
    return True


def native_suggestions(rng: random.Random, share: float = 1.0) -> Iterator[tuple[Slip, str | None, bool]]:
    """Yield slips in native keys, or in a random share of them, with the suggested key, and whether they were refused.

    Each key is in a file that chooses its environment, advantage or loss; named domains and verifiers are left out.
    """
    names: set[str] = set()
    for choice in _native_choices():
        tree: dict[str, Any] = {}
        for override in choice:
            set_value(tree, *override.split("="))
        valid = [key for key in valid_keys(tree) if "*" not in key.name]
        legal = {key.name for key in valid}
        new = [key.name for key in valid if not key.is_section and key.name not in names]
        names |= legal
        sample = rng.sample(new, min(len(new), round(share * len(new)) or 1))
        free = [key.name for key in valid if not key.is_section and "mapping" in key.value_type]
        for slip in _slips(sample, legal, rng, SLIPS, partial(_is_native, legal, free)):
            yield slip, *_native_suggestion(choice, slip.typed)


def _native_choices() -> Iterator[list[str]]:
    yield []
    for choice, names in dict.fromkeys(key.choice for key in keys() if key.choice and "*" not in key.choice[0]):
        yield [f"{choice}={names.split(' | ')[0]}"]
    yield [f"{NATIVE_ENTRY}.env.name=sokoban"]


def _is_native(legal: Collection[str], free: Sequence[str], key: str, typed: str) -> bool:
    is_other_entry = typed.startswith("envs.") and typed.split(".")[1] != NATIVE_ENTRY.partition(".")[2]
    return typed in legal or is_other_entry or any(is_inside(typed, section) for section in free)


def _native_suggestion(choice: Sequence[str], typed: str) -> tuple[str | None, bool]:
    """Return the key that is suggested first, and whether the key was refused; keys stay in a suggested section."""
    try:
        load_experiment(None, [*choice, f"{typed}=null"])
    except ConfigError as error:
        problem = NATIVE_MESSAGE.search(str(error))
        return problem and problem["suggestion"] + typed.removeprefix(problem["key"]), True
    return None, False
