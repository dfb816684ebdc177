"""Run rollouts and updates on the CPU or on a simulated GPU, and write their numbers.

    python gpu_steps.py {engine|learners|robots} POLICY {cpu|gpu} RESULT_FILE

In a process of its own, because torch cannot forget the simulated device.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loss_grid import near_batch
from robot_policies import build_action_policy, observe, robot_experiment

from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling
from quintet.policies.model_loading import load_model
from quintet.records import Request
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.runtime.device import move_to_engine_device
from quintet.runtime.embodied.robot_learner import build_policy_learner
from quintet.runtime.learners.local_learners import LocalLearners
from quintet.training.parallel.process_group import RankGroup

SHARED = tuple(range(40, 60))


def engine(policy: Path, device: str) -> dict[str, Any]:
    """Generate with a shared prefix and every sampling parameter."""
    model = move_to_engine_device(load_model(policy), experiment(policy))
    assert model.device.type == device
    samplings: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.01}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
    hf = HfEngine(model, max_num_seqs=8, max_model_len=128)
    for number in range(12):
        prompt = (*SHARED, *range(100 + number, 103 + 2 * number))
        hf.add_request(Request(number, prompt, 6, seed=number, **samplings[number % len(samplings)]))
    generations = []
    while hf.busy:
        generations += hf.step()
    hf.close()
    generations.sort(key=lambda generation: generation.id)
    return {
        "tokens": [list(generation.tokens) for generation in generations],
        "numbers": [list(generation.logprobs) for generation in generations],
    }


def learners(policy: Path, device: str) -> dict[str, Any]:
    """Update actor and critic, with a reference."""
    config = experiment(policy)
    group = LocalLearners.build(config, policy)
    actor, critic, reference = group.actor, group.create_critic(), group.snapshot_reference()
    assert actor.strategy.device.type == device
    batch = near_batch(actor.scorer)
    values = critic.compute_values(batch)
    batch = replace(batch, values=values, returns=values + batch.rewards)
    objective = PolicyObjective(config.algorithm)
    steps = [actor.update(batch, objective, "token-mean", 1e-3, reference=reference) for _ in range(2)]
    value_step = critic.update(batch, CriticObjective(config.critic), "token-mean", 1e-3)
    log_probs = actor.scorer.compute_log_probs(batch)
    return {"numbers": [list(step.values()) for step in (*steps, value_step)] + [log_probs.tolist(), values.tolist()]}


def robots(policy: Path, device: str) -> dict[str, Any]:
    """Sample and clone actions."""
    config = robot_experiment({"preset": "arm-vla", "kind": "openvla_oft", "vla": {"action_chunk": 2}})
    learner = build_policy_learner(config, build_action_policy(config), config.actor.optimizer, RankGroup())
    assert learner.strategy.device.type == device
    inputs = learner.policy.prepare(observe(4))
    uniforms = torch.rand(4, 2, learner.policy.action_dim, generator=torch.Generator().manual_seed(0))
    sample = learner.sample(inputs, uniforms, ActionSampling())
    assert sample.values is not None
    return {
        "tokens": sample.actions.flatten().tolist(),
        "numbers": [sample.logprobs.flatten().tolist(), sample.values.flatten().tolist()],
    }


def experiment(policy: Path) -> Experiment:
    return Experiment.model_validate(
        {
            "policy": {"preset": None, "path": str(policy)},
            "warm_start": None,
            "training": {"threads": 1},
            "algorithm": {"advantage": {"name": "gae"}, "kl": {"coefficient": 0.1, "estimator": "full"}},
        }
    )


def main(case: str, policy: str, device: str, result: str) -> None:
    context: Any = nullcontext()
    if device == "gpu":
        from simulated_gpu import simulated_gpu

        load_model(policy)  # transformers initializes no buffers if it is imported on the simulated device
        context = simulated_gpu()
    with context:
        numbers = {"engine": engine, "learners": learners, "robots": robots}[case](Path(policy), device)
    Path(result).write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
