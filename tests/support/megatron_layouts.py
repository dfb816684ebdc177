"""Actor, critic and reference with different parallel sizes; as a program, one rank of them.

python megatron_layouts.py RANK NUM_RANKS RENDEZVOUS_FILE MODELS CASES; prints the results of all cases as JSON.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron_steps import RATE, build_batch
from rank_processes import join_ranks, leave_group

from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import CriticConfig
from quintet.records import Batch

NAMES = ("actor", "critic", "reference")
OPTIMIZER = {"learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": 0.5, "epsilon": 1e-5}


def experiment(sections: dict[str, Any]) -> Experiment:
    """Return a run whose learners have these sections, by name of the learner."""
    budget = {"tokens": 60}
    learning = {"budget": budget, "inference_budget": {"tokens": 90}, "optimizer": OPTIMIZER}
    defaults: dict[str, dict[str, Any]] = {
        "actor": learning,
        "critic": learning,
        "reference": {"inference_budget": budget},
    }
    learners = {name: {"backend": "megatron", **defaults[name], **sections.get(name, {})} for name in NAMES}
    return Experiment.model_validate({**learners, "training": {"micro_batch_tokens": 60}})


def train(actor: Any, critic: Any, reference: Any, batch: Batch, estimator: Any) -> dict[str, Any]:
    """Update and score with the three learners in turns, and return all results as JSON values."""
    kl = KlConfig(apply_to="loss", estimator=estimator, coefficient=0.5)
    objective = PolicyObjective(AlgorithmConfig(kl=kl))
    ref_logprobs = reference.compute_log_probs(batch)
    results: dict[str, Any] = {"reference": ref_logprobs.tolist()}
    batch = replace(batch, ref_logprobs=ref_logprobs)
    for number in range(2):
        results[f"actor {number}"] = actor.update(batch, objective, "token-mean", RATE, reference=reference)
        results[f"critic {number}"] = critic.update(batch, CriticObjective(CriticConfig()), "token-mean", RATE)
        results[f"reference {number}"] = reference.compute_log_probs(batch).tolist()
        results[f"log-probs {number}"] = actor.scorer.compute_log_probs(batch).tolist()
        results[f"values {number}"] = critic.compute_values(batch).tolist()
    critics = critic.weights()
    sums: dict[str, float] = {}
    for name, tensor in actor.weights():
        next(critics, None)  # both are read at the same time: the groups of one are not in the way of the other
        sums[name] = float(tensor.double().square().sum())
    results["sums"] = sums
    reference.load_weights(dict(actor.weights()))
    results["copy"] = reference.compute_log_probs(batch).tolist()
    return results


def main(policy: Path, settings: dict[str, Any], estimator: str) -> dict[str, Any]:
    from quintet.training.megatron.core_package import require_megatron

    require_megatron()
    from megatron.core import parallel_state

    from quintet.training.megatron.build import (
        build_megatron_actor,
        build_megatron_critic,
        build_megatron_reference,
    )

    config = experiment(settings)
    actor, reference = build_megatron_actor(config, policy), build_megatron_reference(config, policy)
    critic = build_megatron_critic(config, policy)
    results = train(actor, critic, reference, build_batch(actor.model.config.vocab_size), estimator)
    assert not parallel_state.model_parallel_is_initialized()  # no groups stay behind
    return results | {
        "data-parallel ranks": [learner.ranks.data.size for learner in (actor, critic, reference.megatron_model)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks, (models, cases) = join_ranks()
    try:
        print(json.dumps([main(Path(models) / kind, *settings) for kind, *settings in json.loads(cases)]))
    finally:
        leave_group(ranks)
