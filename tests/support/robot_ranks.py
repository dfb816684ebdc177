"""One of several ranks that train a policy of robots: rank 0 is the controller and prints the results, the others are
workers.

RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python robot_ranks.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rank_listener import listen_at
from robot_policies import observe, robot_experiment

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.torchrun import current_rank
from quintet.embodied_records import ActionSampling, ChunkBatch
from quintet.policies.vla.build import create_action_preset, load_action_policy
from quintet.runtime.calls.code_check import AllowedCode
from quintet.runtime.calls.remote_interface import RobotLearner
from quintet.runtime.calls.run_secret import RunSecret
from quintet.runtime.controller import Controller
from quintet.runtime.worker_process import run_worker
from quintet.training.checkpoint.async_save import AsyncCheckpointer
from quintet.training.chunk_learner import ChunkRates
from quintet.training.parallel.rendezvous import rendezvous

CHUNKS, COLUMNS = 2, 4
RATES = ChunkRates(policy=0.05, value_head=0.1, weight_decay=0.01)
ALL = torch.arange(CHUNKS * COLUMNS)
FIRST_RANK = torch.tensor([0, 1, COLUMNS])
"""Chunk steps of columns that the first of two ranks has."""
POLICIES: dict[str, dict[str, Any]] = {
    "mlp": {"preset": "state-mlp", "overrides": {"hidden": 8, "action_chunk": 2}},
    "lora": {
        "preset": "arm-vla",
        "overrides": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32, "vision_hidden": 16, "vision_heads": 2},
        "lora": {"rank": 2, "alpha": 4.0},
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp, replicated": ("mlp", {"sharding": {"policy": "no_shard"}}),
    "mlp, fsdp2": ("mlp", {}),
    "lora, fsdp2": ("lora", {}),
}
"""Policy, and how two ranks share its weights."""

SECRET = RunSecret("the secret of this test")


def experiment(policy: str, ranks: int = 1, **actor: Any) -> Experiment:
    optimizer = {"kind": "sgd", "max_grad_norm": 100.0}
    return robot_experiment(
        POLICIES[policy],
        actor={"optimizer": optimizer, **actor},
        algorithm={"advantage": {"name": "gae"}, "kl": {"coefficient": 0.5}},
        rollout={"recompute_logprobs": True},
        training={"threads": 1, "samples_per_group": 2, "groups_per_step": 2},
        placement={"devices_per_node": ranks},
    )


def collected(config: Experiment, policy_directory: Path) -> ChunkBatch:
    """Return the chunk steps of four robots, of which the last one ends early."""
    policy: Any = load_action_policy(policy_directory, config)
    inputs = policy.prepare(observe(CHUNKS * COLUMNS))
    shape = (CHUNKS, COLUMNS, policy.action_chunk)
    uniforms = torch.rand((*shape, policy.action_dim), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sample = policy.sample(inputs, uniforms.flatten(0, 1), ActionSampling())
    mask = torch.ones(shape, dtype=torch.bool)
    mask[-1, -1, 1:] = False
    dones = torch.zeros_like(mask)
    dones[-1] = mask[-1]
    dones[-1, :-1, :-1] = False
    rewards = torch.zeros(shape)
    rewards[-1, :, 0] = torch.tensor([1.0, 0.0, 0.5, 1.0])
    return ChunkBatch(
        inputs={name: tensor.unflatten(0, shape[:2]) for name, tensor in inputs.items()},
        actions=sample.actions.unflatten(0, shape[:2]),
        logprobs=sample.logprobs.unflatten(0, shape[:2]),
        rewards=rewards,
        dones=dones,
        loss_mask=mask,
        group=torch.tensor([0, 0, 1, 1]).expand(CHUNKS, -1).clone(),
        values=sample.values.unflatten(0, shape[:2]),
        last_values=torch.zeros(COLUMNS, 1),
    )


def weights(calls: RobotLearner) -> dict[str, float]:
    return {name: float(tensor.double().abs().sum()) for name, tensor in calls.weights()}


def work(controller: Controller, config: Experiment, policy: Path, directory: Path) -> dict[str, Any]:
    """What the controller asks of learners in two steps and after a resume, and what came of it."""
    workers = controller.build_robot_learners(config, policy)
    calls, batch = workers.calls, collected(config, policy)
    results: dict[str, Any] = {}

    def update(name: str, chunk_steps: torch.Tensor = ALL, rates: ChunkRates = RATES) -> None:
        results[name] = dict(calls.update(chunk_steps, rates))

    calls.start_cloning(OptimizerConfig(kind="sgd"))
    flat = batch.flatten()
    results["cloning"] = dict(calls.clone(flat.inputs, flat.actions, flat.loss_mask, RATES))
    calls.end_cloning()
    calls.snapshot_reference()
    for step in range(2):
        calls.load_rollout(batch)
        calls.add_log_probs()
        calls.add_reference_log_probs()
        results[f"advantages {step}"] = dict(calls.add_advantages())
        update(f"chunk steps of one rank {step}", FIRST_RANK)
        update(f"all chunk steps {step}")
    results["weights"] = weights(calls)
    update("values", ALL, ChunkRates(0.05, 0.1, 0.01, trains_policy=False))
    results["weights after an update of values"] = weights(calls)
    saver = AsyncCheckpointer(directory, keep=1, other_ranks=[str(rank) for rank in range(1, controller.world_size)])
    saver.save(1, {}, calls.save)
    update("after saving")
    saver.wait()
    saver.close()
    calls.load(directory / "global_step_1", ("model", "optimizer"), {})
    calls.add_reference_log_probs()
    update("resumed")
    workers.close()
    return results


def create_policies(directory: Path) -> None:
    """Create the policies, each in a directory of its name."""
    for policy in POLICIES:
        create_action_preset(directory / policy, experiment(policy), seed=0)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank_info = current_rank()
    group = rendezvous(rank_info, "the same", 60.0)
    if rank_info.rank:
        run_worker(group, SECRET, allowed_code=AllowedCode(experiment("mlp")))
    else:
        controller = Controller.on_ranks(group, listen_at(group, SECRET))
        outputs = {
            case: work(controller, experiment(policy, rank_info.size, **actor), directory / policy, directory / case)
            for case, (policy, actor) in CASES.items()
        }
        print(json.dumps(outputs))
        controller.close()
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
