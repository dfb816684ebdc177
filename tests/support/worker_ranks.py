"""One of several ranks, as a program: rank 0 is the controller and prints the results, the others are workers.

RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python worker_ranks.py POLICY DIRECTORY [key=value …]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_listener import listen_at

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective, PolicyObjective
from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.torchrun import current_rank
from quintet.records import Batch, Generation, Request
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.runtime.calls.run_secret import RunSecret
from quintet.runtime.controller import Controller
from quintet.runtime.engines.engine_builders import engine_builder, load_checked_tokenizer
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.runtime.worker_process import run_worker
from quintet.training.checkpoint.async_save import AsyncCheckpointer
from quintet.training.parallel.rendezvous import rendezvous

OVERRIDES = (
    "training.micro_batch_tokens=40",
    "training.threads=1",
    "actor.balance_ranks=true",
    "algorithm.kl={place: loss, coefficient: 0.1, estimator: full}",
    "algorithm.advantage={name: gae}",
)

SECRET = RunSecret("the secret of this test")


def experiment(*overrides: str) -> Experiment:
    return load_experiment(None, [*OVERRIDES, *overrides]).experiment


def sequences() -> Batch:
    """Seven sequences of different lengths, each a prompt of four tokens and own words."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([9, 14, 7, 21, 12, 17, 8])
    size, starts = int(lengths.sum()), lengths.cumsum(0) - lengths
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    mask = positions >= 4
    ends = torch.zeros(size, dtype=torch.bool)
    ends[starts + lengths - 1] = True
    noise = torch.randn(4, size, generator=generator) * 0.1
    return Batch(
        tokens=torch.randint(0, 300, (size,), generator=generator),
        positions=positions,
        lengths=lengths,
        loss_mask=mask,
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=ends,
        trajectory=torch.arange(7),
        group=torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        logprobs=(noise[0] - 6) * mask,
        rewards=ends.float(),
        ref_logprobs=(noise[1] - 6) * mask,
        values=noise[2],
        advantages=noise[3] * 10,
        returns=noise[1] * 5,
    )


def responses(controller: Controller, learners: LearnerGroup, config: Experiment, policy: Path) -> dict[str, Any]:
    """Responses of the engines of all ranks with the learner's weights."""
    tokenizer = load_checked_tokenizer(config, policy, learners.actor.model.config.vocab_size)
    remote = controller.build_remote_engines(config, policy, learners)
    local = engine_builder(config, policy, learners, tokenizer)
    others = remote.engines()
    engines = RoutedEngines([RestartingEngine(local, remote.weights), *others])
    engines.load_weights(1, remote.weights)
    for number in range(6):
        engines.add_request(Request(number, tuple(range(5, 9 + number)), 4 + number, seed=number))
    assert len(engines.engines) == controller.world_size
    assert all(engine.busy for engine in engines.engines)
    generations: list[Generation] = []
    while engines.busy:
        generations += engines.step()
    assert {generation.weight_version for generation in generations} == {1}
    engines.close()
    responses = sorted(generations, key=lambda generation: generation.id)
    return {
        "response tokens": [token for response in responses for token in response.tokens],
        "response log-probs": [logprob for response in responses for logprob in response.logprobs],
    }


def work(controller: Controller, policy_directory: Path, directory: Path, *overrides: str) -> dict[str, Any]:
    """Everything that a run asks of learners and engines, and what came of it."""
    config, batch = experiment(*overrides), sequences()
    learners = controller.build_learners(config, policy_directory)
    policy, aggregation = PolicyObjective(config.algorithm), Aggregation("seq-mean-token-mean")
    practice = learners.actor_with_optimizer(OptimizerConfig(learning_rate=1e-2))
    results: dict[str, Any] = {"practice": practice.update(batch, CrossEntropyObjective(), "token-mean", 1e-3)}
    results |= responses(controller, learners, config, policy_directory)
    critic, reference = learners.create_critic(), learners.snapshot_reference()
    batch = replace(
        batch, ref_logprobs=reference.compute_log_probs(batch), logprobs=learners.actor.scorer.compute_log_probs(batch)
    )
    for number in range(2):
        results[f"actor {number}"] = learners.actor.update(
            batch, policy, aggregation, 1e-3, reference=reference, seed=1
        )
        results[f"critic {number}"] = critic.update(
            batch, CriticObjective(config.critic), aggregation, 1e-3, batch.advantages > 0
        )
    results["divergence"] = learners.actor.scorer.compute_divergence(batch, reference).tolist()
    results["squared_mass"] = learners.actor.scorer.compute_sum_squared_probs(batch).tolist()
    results["values"] = critic.compute_values(batch).tolist()
    results["weights"] = {name: float(tensor.double().square().sum()) for name, tensor in learners.actor.weights()}
    next(iter(learners.actor.weights()))  # nobody takes the rest
    saver = AsyncCheckpointer(directory, keep=1, other_ranks=[str(rank) for rank in range(1, controller.world_size)])
    saver.save(1, {}, learners.save)
    results["after saving"] = learners.actor.update(batch, policy, aggregation, 1e-3, reference=reference, seed=2)
    saver.wait()
    saver.close()
    learners.load(directory / "global_step_1", ("model", "optimizer"), {})
    reference = learners.reference
    results["again"] = learners.actor.update(batch, policy, aggregation, 1e-3, reference=reference, seed=2)
    return results


def main() -> None:
    torch.set_num_threads(1)
    policy, directory, overrides, rank_info = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], current_rank()
    group = rendezvous(rank_info, "the same", 60.0)
    if rank_info.rank:
        run_worker(group, SECRET)
    else:
        controller = Controller.on_ranks(group, listen_at(group, SECRET))
        devices = f"placement.devices_per_node={rank_info.size}"
        print(json.dumps(work(controller, policy, directory, devices, *overrides)))
        controller.close()
    group.close()


if __name__ == "__main__":
    main()
