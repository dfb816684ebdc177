"""If these fail, somebody who mistypes a key isn't told which one they meant."""

from __future__ import annotations

import random

import pytest
from key_slips import FILES, SLIPS, file_keys, make_slips, native_suggestions, suggested_keys

from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.typos import closest_keys, slip_of

KEYS_PER_FILE = 24
"""Number of keys sampled from each kind of file; `benchmarks/typos.py` takes all."""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_slip_in_a_file_is_refused_and_the_key_that_was_meant_comes_first(dialect: str) -> None:
    """In every kind of file, whatever part of the key it falls on."""
    results = []
    for name in (name for name in FILES if name.partition(":")[0] == dialect):
        rng, keys = random.Random(name), file_keys(name)
        sample = rng.sample(keys, min(KEYS_PER_FILE, len(keys)))
        results += suggested_keys(name, make_slips(name, sample, rng))
    assert len(results) > KEYS_PER_FILE * len(SLIPS) / 2
    assert not [slip for slip, _, is_refused in results if not is_refused]
    wrong = [(slip, suggestion) for slip, suggestion, _ in results if suggestion != slip.key]
    assert len(wrong) <= 0.02 * len(results), wrong


def test_a_slip_in_a_native_key_is_refused_and_the_key_that_was_meant_comes_first() -> None:
    """Also of an environment, an advantage and a loss, and on the name of a section."""
    results = [*native_suggestions(random.Random(0), share=0.04)]
    assert len(results) > KEYS_PER_FILE * len(SLIPS)
    assert not [slip for slip, _, is_refused in results if not is_refused]
    wrong = [(slip, suggestion) for slip, suggestion, _ in results if suggestion != slip.key]
    assert len(wrong) <= 0.03 * len(results), wrong


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
        ("actor_rollout_ref.rollout.tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("actor_rollout_ref.rollout.tensor_parallel", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("actor_rollout_ref.rollout.moe_tensor_paralel_size", "actor_rollout_ref.rollout.moe_tensor_parallel_size"),
    ],
)
def test_what_is_near_is_named_and_what_is_far_isnt(written: str, right: str | None) -> None:
    specs = DIALECTS["verl"].narrowed({}).specs()
    found = closest_keys(written, list(specs), rare={key for key, spec in specs.items() if spec.state == "pending"})
    assert (found[0] if found else None) == right


def test_a_key_that_only_lacks_a_section_is_closer_than_the_same_name_elsewhere() -> None:
    legal = ["critic.optim.lr", "actor_rollout_ref.ref.lr", "actor_rollout_ref.actor.optim.lr"]
    assert closest_keys("actor.optim.lr", legal)[0] == "actor_rollout_ref.actor.optim.lr"
    assert closest_keys("actor_rollout_ref.actor_rollout_ref.ref.lr", legal)[0] == "actor_rollout_ref.ref.lr"
    assert closest_keys("optim.lr", ["b.optim.lr", "a.optim.lr"]) == ["b.optim.lr", "a.optim.lr"], "the first of legal"


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("actor.megatron.tensor_modle_size", "actor.megatron.tensor_model_size"),
        ("actor.megatron.tensor-model-size", "actor.megatron.tensor_model_size"),
        ("actor.megatron.megatron.tensor_model_size", "actor.megatron.tensor_model_size"),
        ("actor.megatron.adam_beta3", None),
        ("actor.megatron.extra.tensor_model_size", None),
        ("actor.megatron.tensor_size", None),
    ],
)
def test_in_sections_with_further_keys_only_a_slip_is_a_typing_error(written: str, right: str | None) -> None:
    """Other releases have further keys in them, which are not taken for misspelt ones."""
    assert slip_of(written, ["actor.megatron.tensor_model_size", "actor.megatron.adam_beta2"]) == right
