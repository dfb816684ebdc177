"""If these fail, a reference or critic with other parallel sizes than the actor scores or learns something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron_layouts
import pytest
from megatron.core import parallel_state
from megatron_steps import batch

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
def on_four_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of four processes tells of all cases, one after the other."""
    root = tmp_path_factory.mktemp("ranks")
    cases = json.dumps([case[:3] for case in CASES])
    start = [sys.executable, "-W", "ignore", megatron_layouts.__file__, models, root / "told"]
    given = ["4", root / "meeting", cases]
    processes = [subprocess.Popen([*start, str(rank), *given], stderr=subprocess.PIPE) for rank in range(4)]
    try:
        for process in processes:
            _, said = process.communicate(timeout=400)
            assert process.returncode == 0, said.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
    return [json.loads((root / f"told.{rank}.json").read_text()) for rank in range(4)]


def alone(policy: Path, estimator: str) -> dict[str, Any]:
    """What learners of one process do without Megatron."""
    config = megatron_layouts.experiment({})
    setup = LearnerSetup(budget=MicroBatchBudget(60))
    actor = ActorLearner(load_model(policy), config.actor.optimizer, setup)
    critic = CriticLearner(ValueModel(load_model(policy)), config.critic.optimizer, setup)
    reference, given = PolicyScorer(load_model(policy), setup), batch(actor.model.config.vocab_size)
    return megatron_layouts.work(actor, critic, reference, given, estimator)


def same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name in theirs:
            same(ours[name], theirs[name], f"{where} {name}")
    else:
        assert ours == pytest.approx(theirs, rel=1e-5, abs=5e-6), where


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case[0] for case in CASES])
def test_learners_of_other_sizes_on_four_ranks_do_what_those_of_one_process_do(
    models: Path, on_four_ranks: list[list[dict[str, Any]]], number: int
) -> None:
    kind, _, estimator, data_ranks = CASES[number]
    expected = alone(models / kind, estimator)
    for told in on_four_ranks:
        assert told[number].pop("data-parallel ranks") == data_ranks
        same(told[number], expected, kind)


def test_an_error_leaves_no_groups_behind() -> None:
    ranks = initialize_process_groups(ParallelConfig(), MegatronConfig())
    with ranks.active():
        assert parallel_state.model_parallel_is_initialized()
    with pytest.raises(KeyError), ranks.active():
        raise KeyError
    assert not parallel_state.model_parallel_is_initialized()
