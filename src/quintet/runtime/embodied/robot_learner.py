"""A rank's robots, policy and learner: what the controller calls on every rank of a run on simulators.

Each rank simulates a part of the robots and trains on their chunk steps. Only small tensors (rewards, values, masks)
and gradients go between ranks, and every random number belongs to a robot or a chunk step, so that results do not
depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quintet.algorithms.chunks.advantages import add_chunk_advantages
from quintet.algorithms.chunks.objective import ChunkObjective
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.embodied_records import ActionSampling, ChunkBatch, RecordedVideo, RobotEpisode, RolloutRequest
from quintet.policies.model_loading import enable_activation_checkpointing
from quintet.policies.vla.action_module import ActionModule
from quintet.policies.vla.action_policy import ActionPolicy
from quintet.policies.vla.build import load_action_policy
from quintet.records import Trajectory
from quintet.runtime.device import compute_device
from quintet.runtime.embodied.rollout_runner import RolloutRunner
from quintet.runtime.learners.learner_builders import autocast_dtype, build_device_mesh, learner_dtype
from quintet.runtime.learners.learner_checkpoint import ACTOR, REFERENCE, LearnerSnapshots
from quintet.training.checkpoint.async_save import AsyncShardWriter, WriteFiles
from quintet.training.checkpoint.learner_state import (
    MODEL_STEM,
    restore_learner,
    snapshot_learner,
    snapshot_tensors,
)
from quintet.training.checkpoint.shards import ShardReader
from quintet.training.chunk_learner import ChunkLearner, ChunkRates
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import Offload, activation_offloading
from quintet.training.optim.loss_scale import LossScale
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ParallelStrategy, ReplicatedStrategy

ACTOR_SCALE = f"{ACTOR}_scale"
"""Name of the loss scale in a checkpoint."""
SHARED_FIELDS = ("rewards", "dones", "loss_mask", "group", "truncated", "final_values", "values", "last_values")
"""Fields of a batch that all ranks get from each other."""


class LocalRobotLearner:
    """See `RobotLearner`."""

    def __init__(self, config: Experiment, policy_dir: Path, ranks: RankGroup) -> None:
        self._config, self._ranks = config, ranks
        policy = load_action_policy(policy_dir, config)
        self.learner: ChunkLearner = build_policy_learner(config, policy, config.actor.optimizer, ranks)
        self._objective = ChunkObjective(config)
        self._runner = RolloutRunner(config, is_recorded=ranks.rank == 0)
        self._cloner: ChunkLearner | None = None
        """The policy under the optimizer of behavior cloning."""
        self._snapshots = LearnerSnapshots()
        self._shard_writer: AsyncShardWriter | None = None
        self._batch: ChunkBatch | None = None
        """The chunk steps of this rank's robots."""
        self._columns = torch.empty(0, dtype=torch.long)
        """Columns of these robots among those of all ranks."""
        self._num_columns = 0

    # ---- rollouts

    @property
    def policy(self) -> ActionPolicy:
        return self.learner.policy

    def collect(self, request: RolloutRequest) -> list[RobotEpisode]:
        local = np.array_split(np.arange(request.robots), self._ranks.size)[self._ranks.rank]
        rollout = self._runner.run(request, local, self.policy, self.learner.sample)
        if request.first_episode is None:
            self._set_rollout(rollout.batch, rollout.columns, rollout.num_columns)
        return rollout.episodes

    def take_trajectories(self) -> list[Trajectory]:
        return self._runner.take_trajectories()

    def take_videos(self, *, wait: bool = False) -> list[RecordedVideo]:
        return self._runner.take_videos(wait=wait)

    def pop_metrics(self) -> Mapping[str, float]:
        return self._runner.pop_metrics()

    def sample(
        self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, temperature: float, top_k: int
    ) -> Mapping[str, Any]:
        sample = self.learner.sample(inputs, uniforms, ActionSampling(temperature, top_k))
        return {"actions": sample.actions, "logprobs": sample.logprobs, "values": sample.values}

    def load_rollout(self, batch: ChunkBatch) -> None:
        num_columns = batch.rewards.shape[1]
        columns = torch.arange(num_columns).tensor_split(self._ranks.size)[self._ranks.rank]
        last_values = None if batch.last_values is None else batch.last_values[columns]
        local = replace(batch.map(lambda tensor: tensor[:, columns]), last_values=last_values)
        self._set_rollout(local, columns, num_columns)

    def _set_rollout(self, batch: ChunkBatch, columns: Tensor, num_columns: int) -> None:
        self._batch, self._columns, self._num_columns = batch, columns, num_columns

    # ---- training

    def add_log_probs(self) -> None:
        batch = self._rollout_batch()
        flat = batch.flatten()
        logprobs = self.learner.compute_log_probs(flat, self._training_sampling())
        self._batch = replace(batch, logprobs=logprobs.view_as(batch.logprobs), rollout_logprobs=batch.logprobs)

    def snapshot_reference(self) -> None:
        self.learner.snapshot_reference()

    def add_reference_log_probs(self) -> None:
        batch = self._rollout_batch()
        logprobs = self.learner.compute_reference_log_probs(batch.flatten(), self._training_sampling())
        self._batch = replace(batch, ref_logprobs=logprobs.view_as(batch.logprobs))

    def add_advantages(self) -> dict[str, float]:
        batch = self._rollout_batch()
        all_robots, metrics = add_chunk_advantages(self._gathered(batch), self._config)
        columns = self._columns
        self._batch = replace(
            batch,
            advantages=_columns_of(all_robots.advantages, columns),
            returns=_columns_of(all_robots.returns, columns),
            loss_mask=all_robots.loss_mask[:, columns],
            loss_weights=_columns_of(all_robots.loss_weights, columns),
        )
        return metrics

    def update(self, chunk_steps: Tensor, rates: ChunkRates) -> dict[str, float]:
        batch = self._rollout_batch()
        position = torch.full((self._num_columns,), -1)
        position[self._columns] = torch.arange(len(self._columns))
        local = position[chunk_steps % self._num_columns]
        index = (chunk_steps // self._num_columns * len(self._columns) + local)[local >= 0]
        flat = batch.flatten()
        repeated = flat.select(torch.zeros(1, dtype=torch.long))
        sampling = self._training_sampling()
        return self.learner.update(flat.select(index), self._objective, sampling, rates, repeated)

    def _training_sampling(self) -> ActionSampling:
        rollout = self._config.rollout
        return ActionSampling(rollout.temperature, max(0, rollout.top_k))

    def _rollout_batch(self) -> ChunkBatch:
        if self._batch is None:
            raise ValueError("no rollout has been collected")
        return self._batch

    def _gathered(self, batch: ChunkBatch) -> ChunkBatch:
        """Return the shared fields of the chunk steps of all ranks."""
        if self._ranks.size == 1:
            return batch
        changes: dict[str, Any] = {}
        for name in SHARED_FIELDS:
            tensor = getattr(batch, name)
            if tensor is None:
                continue
            axis = 0 if name == "last_values" else 1
            shape = list(tensor.shape)
            shape[axis] = self._num_columns
            full = torch.zeros(shape, dtype=torch.float32 if tensor.dtype is torch.bool else tensor.dtype)
            full.index_copy_(axis, self._columns, tensor.to(full.dtype))
            changes[name] = self._ranks.all_reduce(full).to(tensor.dtype)
        empty = torch.empty((*changes["rewards"].shape[:2], 0, 0))
        return replace(batch, inputs={}, actions=empty, logprobs=empty, **changes)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.learner.weights()

    # ---- behavior cloning

    def start_cloning(self, optimizer: OptimizerConfig) -> None:
        self._cloner = self.learner.with_optimizer(optimizer)

    def clone(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, rates: ChunkRates) -> dict[str, float]:
        """See `RobotLearner.clone`.

        Raises:
            ValueError: `start_cloning` was not called.
        """
        if self._cloner is None:
            raise ValueError("clone was called before start_cloning")
        rows = slice(self._ranks.rank, None, self._ranks.size)
        return self._cloner.clone(
            {name: tensor[rows] for name, tensor in inputs.items()}, actions[rows], mask[rows], rates
        )

    def end_cloning(self) -> None:
        self._cloner = None

    # ---- checkpoints

    def save(self, directory: Path) -> WriteFiles:
        learner, memory = self._cloner or self.learner, self._snapshots.memory
        snapshots = [snapshot_learner(learner, ACTOR, self._config.checkpoint.contents, memory, self._ranks)]
        write_model = self._snapshots.model(learner, snapshots[0], self._ranks)
        if self.learner.reference is not None:
            weights = {MODEL_STEM: self.learner.reference.state_dict()}
            snapshots.append(snapshot_tensors(weights, REFERENCE, memory, self._ranks))

        def write(checkpoint: Path) -> None:
            write_model(checkpoint)
            for snapshot in snapshots:
                snapshot.write(checkpoint)

        if self._ranks.rank == 0:
            return write
        self._shard_writer = self._shard_writer or AsyncShardWriter(str(self._ranks.rank))
        self._shard_writer.save(directory, write)
        return lambda _: None

    def extra_state(self) -> dict[str, Any]:
        scale = (self._cloner or self.learner).loss_scale_state()
        return {ACTOR_SCALE: scale} if scale else {}

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        learner = self._cloner or self.learner
        restore_learner(learner, directory, ACTOR, contents)
        reference = ShardReader.open(directory, f"{REFERENCE}/{MODEL_STEM}")
        if reference is not None and self._cloner is None:
            self.learner.snapshot_reference()
            if self.learner.reference is not None:
                self.learner.reference.load_state_dict(reference)
        if ACTOR_SCALE in extra:
            learner.load_loss_scale_state(extra[ACTOR_SCALE])

    # ---- memory

    def close(self) -> None:
        """End the simulators."""
        self._runner.close()


def _columns_of(tensor: Tensor | None, columns: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[:, columns]


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
