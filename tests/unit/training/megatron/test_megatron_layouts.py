"""If these fail, a reference or critic with other parallel sizes than the actor scores or learns something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_layouts
import pytest
from megatron.core import parallel_state
from megatron_steps import build_batch
from rank_processes import run_ranks

from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.policies.causal_lm import ValueModel
from quintet.policies.model_loading import load_model
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.megatron.process_groups import initialize_process_groups
from quintet.training.packing import MicroBatchBudget
from quintet.training.scorer import PolicyScorer

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: list[tuple[str, dict[str, Any], str, list[int]]] = [
    (
        "llama",
        {"actor": {"parallel": {"tensor": 2, "pipeline": 2}}, "critic": {"parallel": {"context": 2}}},
        "k3",
        [1, 2, 4],
    ),
    (
        "deep",
        {
            "actor": {"parallel": {"tensor": 2, "sequence": True}, "megatron": OVERLAP},
            "critic": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
            "reference": {"parallel": {"pipeline": 4}},
        },
        "k3",
        [2, 2, 1],
    ),
    (
        "experts",
        {
            "actor": {"parallel": {"expert": 2}},
            "critic": {"parallel": {"pipeline": 2}},
            "reference": {"parallel": {"expert": 4}},
        },
        "k3",
        [4, 2, 4],
    ),
    ("qwen3", {"critic": {"parallel": {"tensor": 2}}}, "full", [4, 2, 4]),
]
"""Model, sections of the learners, estimator of the divergence, and data-parallel ranks of actor, critic and reference
among four."""


@pytest.fixture(scope="module")
def four_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Results of all cases on each of four ranks."""
    cases = json.dumps([case[:3] for case in CASES])
    outputs = run_ranks("megatron_layouts.py", 4, tmp_path_factory.mktemp("ranks"), models, cases)
    return [json.loads(output) for output in outputs]


def train_in_one_process(policy: Path, estimator: str) -> dict[str, Any]:
    """Return the results of the learners without Megatron, in one process."""
    config = megatron_layouts.experiment({})
    setup = LearnerSetup(budget=MicroBatchBudget(60))
    actor = ActorLearner(load_model(policy), config.actor.optimizer, setup)
    critic = CriticLearner(ValueModel(load_model(policy)), config.critic.optimizer, setup)
    reference = PolicyScorer(load_model(policy), setup)
    return megatron_layouts.train(actor, critic, reference, build_batch(actor.model.config.vocab_size), estimator)


def assert_close(actual: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), name
        for key in expected:
            assert_close(actual[key], expected[key], f"{name} {key}")
    else:
        assert actual == pytest.approx(expected, rel=1e-5, abs=5e-6), name


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case[0] for case in CASES])
def test_learners_with_different_parallel_sizes_agree_with_one_process(
    models: Path, four_ranks: list[list[dict[str, Any]]], number: int
) -> None:
    kind, _, estimator, data_ranks = CASES[number]
    expected = train_in_one_process(models / kind, estimator)
    for results in four_ranks:
        assert results[number].pop("data-parallel ranks") == data_ranks
        assert_close(results[number], expected, kind)


def test_an_error_leaves_no_groups_behind() -> None:
    ranks = initialize_process_groups(ParallelConfig(), MegatronConfig())
    with ranks.active():
        assert parallel_state.model_parallel_is_initialized()
    with pytest.raises(KeyError), ranks.active():
        raise KeyError
    assert not parallel_state.model_parallel_is_initialized()
