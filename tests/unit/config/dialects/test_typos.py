"""If these fail, somebody who mistypes a key isn't told which one they meant."""

from __future__ import annotations

import random
import string

import pytest

from quintet.config.dialects.dialect import DIALECTS
from quintet.config.dialects.typos import meant

REFERENCES = [reference for dialect in DIALECTS.values() for reference in dialect.references]


def edited(key: str, rng: random.Random) -> str:
    """The key with one slip in its last word that has letters enough for it: a letter dropped, swapped, added or
    changed; its case changed; another separator."""
    head, dot, word = key.rpartition(".")
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
    return f"{head}{dot}{rng.choice(possible)}"


@pytest.mark.parametrize("seed", range(3))
def test_one_slip_in_any_documented_key_is_traced_to_it(seed: int) -> None:
    rng = random.Random(seed)
    asked, wrong = 0, []
    for dialect in DIALECTS.values():
        legal = list(dialect.rows())
        for key in legal:
            slip = edited(key, rng)
            if slip in legal:
                continue
            asked += 1
            found = meant(slip, legal)
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
    ],
)
def test_what_is_near_is_named_and_what_is_far_isnt(written: str, right: str | None) -> None:
    found = meant(written, list(DIALECTS["verl"].rows()))
    assert (found[0] if found else None) == right
