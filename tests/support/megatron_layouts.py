"""Actor, critic and reference with different parallel sizes; as a program, one of the ranks that share them.

python megatron_layouts.py MODELS OUT RANK SIZE MEETING CASES
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron_steps import RATE, batch

from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import CriticConfig
from quintet.records import Batch
from quintet.training.parallel.process_group import RankGroup

NAMES = ("actor", "critic", "reference")
OPTIMIZER = {"learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": 0.5, "epsilon": 1e-5}


def experiment(sections: dict[str, Any]) -> Experiment:
    """The run whose learners have these sections, by their names."""
    budget = {"tokens": 60}
    learning = {"budget": budget, "inference_budget": {"tokens": 90}, "optimizer": OPTIMIZER}
    own: dict[str, dict[str, Any]] = {"actor": learning, "critic": learning, "reference": {"inference_budget": budget}}
    learners = {name: {"backend": "megatron", **own[name], **sections.get(name, {})} for name in NAMES}
    return Experiment.model_validate({**learners, "training": {"micro_batch_tokens": 60}})


def work(actor: Any, critic: Any, reference: Any, given: Batch, estimator: Any) -> dict[str, Any]:
    """What the learners do in turns, each with its own process groups."""
    kl = KlConfig(apply_to="loss", estimator=estimator, coefficient=0.5)
    objective = PolicyObjective(AlgorithmConfig(kl=kl))
    told: dict[str, Any] = {"reference": (kept := reference.compute_log_probs(given)).tolist()}
    given = replace(given, ref_logprobs=kept)
    for number in range(2):
        told[f"actor {number}"] = actor.update(given, objective, "token-mean", RATE, reference=reference)
        told[f"critic {number}"] = critic.update(given, CriticObjective(CriticConfig()), "token-mean", RATE)
        told[f"reference {number}"] = reference.compute_log_probs(given).tolist()
        told[f"log-probs {number}"] = actor.scorer.compute_log_probs(given).tolist()
        told[f"values {number}"] = critic.compute_values(given).tolist()
    critics = critic.weights()
    sums: dict[str, float] = {}
    for name, tensor in actor.weights():
        next(critics, None)  # both are read at the same time: the groups of one are not in the way of the other
        sums[name] = float(tensor.double().square().sum())
    told["sums"] = sums
    reference.load_weights(dict(actor.weights()))
    told["copy"] = reference.compute_log_probs(given).tolist()
    return told


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
    told = work(actor, critic, reference, batch(actor.model.config.vocab_size), estimator)
    assert not parallel_state.model_parallel_is_initialized()  # no groups stay behind
    return told | {
        "data-parallel ranks": [each.ranks.data.size for each in (actor, critic, reference.megatron_model)],
    }


if __name__ == "__main__":
    _, models, out, rank, size, meeting, cases = sys.argv
    torch.set_num_threads(1)
    ranks = RankGroup.join(int(rank), int(size), Path(meeting), 100.0)
    try:
        told = [main(Path(models) / kind, *settings) for kind, *settings in json.loads(cases)]
        Path(f"{out}.{rank}.json").write_text(json.dumps(told))
    finally:
        ranks.destroy()
