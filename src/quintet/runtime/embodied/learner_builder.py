"""Build the learner of an action policy from a configuration."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.policies.model_loading import enable_activation_checkpointing
from quintet.policies.vla.action_module import ActionModule
from quintet.policies.vla.build import load_action_policy
from quintet.runtime.device import compute_device
from quintet.runtime.learners.learner_builders import autocast_dtype, build_device_mesh, learner_dtype
from quintet.training.chunk_learner import ChunkLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import Offload, activation_offloading
from quintet.training.optim.loss_scale import LossScale
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ParallelStrategy, ReplicatedStrategy


def build_chunk_learner(
    config: Experiment, policy_dir: Path, optimizer: OptimizerConfig, ranks: RankGroup
) -> ChunkLearner:
    """Build the learner of the action policy at that directory.

    Raises:
        ConfigError: the policy does not support activation checkpointing.
        MachineError: the directory contains no action policy.
    """
    return build_policy_learner(config, load_action_policy(policy_dir, config), optimizer, ranks)


def build_policy_learner(
    config: Experiment, policy: PreTrainedModel, optimizer: OptimizerConfig, ranks: RankGroup
) -> ChunkLearner:
    """Build the learner of an action policy, which moves to the device of this process.

    Raises:
        ConfigError: the policy does not support activation checkpointing.
    """
    if config.actor.gradient_checkpointing:
        enable_activation_checkpointing(policy)
    module = ActionModule(policy).to(compute_device())
    module.activation_context = activation_offloading(config.actor.memory, compute_device(), "actor")
    mesh = build_device_mesh(config, "actor", ranks)
    strategy: ParallelStrategy
    if mesh.device_mesh is None:
        strategy = ReplicatedStrategy.from_config(module, config.actor.sharding, ranks)
    else:
        from quintet.training.parallel.fsdp import build_strategy

        strategy = build_strategy(
            module,
            config.actor.backend,
            mesh,
            config.actor.sharding,
            config.actor.memory,
            learner_dtype(config, "actor"),
        )
    tokens = config.training.micro_batch_tokens
    chunks = config.actor.budget.sequences or max(1, tokens // policy.tokens_per_chunk)
    return ChunkLearner(
        module,
        optimizer,
        LearnerSetup(
            budget=MicroBatchBudget(max_sequences=chunks),
            dtype=autocast_dtype(config, "actor"),
            ranks=mesh.data,
            strategy=strategy,
            loss_scale=LossScale.from_config(config.actor.sharding),
            offload=Offload.from_config(config.actor.memory, strategy.module, "actor"),
        ),
    )
