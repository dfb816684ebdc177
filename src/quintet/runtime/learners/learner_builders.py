"""Build actor, critic and reference from a configuration."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quintet.config.checks.sharding import check_sharding
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import LearnerConfig, MemoryConfig, OptimizerConfig
from quintet.config.native.training import SftConfig
from quintet.kernels.build import find_compiler
from quintet.policies.attention_backends import set_attention_backend
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.liger import apply_liger_kernels
from quintet.policies.lora import add_lora, has_lora, merge_adapters
from quintet.policies.model_loading import (
    cast_weights,
    disable_activation_checkpointing,
    enable_activation_checkpointing,
    load_model,
)
from quintet.policies.routers import freeze_routers
from quintet.policies.token_statistics import compiled_token_statistics
from quintet.runtime.device import compute_device
from quintet.runtime.dtypes import with_dtypes
from quintet.runtime.engines.engine_builders import policy_dtype
from quintet.seeds import derive_seed
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import Offload, activation_offloading
from quintet.training.optim.loss_scale import LossScale
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.process_group import SINGLE_RANK, RankGroup
from quintet.training.parallel.strategy import DTYPES_BY_NAME, ParallelStrategy, ReplicatedStrategy, load_full_weights
from quintet.training.protocols import Learner
from quintet.training.reference_snapshot import ReferenceSnapshot
from quintet.training.scorer import PolicyScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def build_device_mesh(config: Experiment, name: str, ranks: RankGroup) -> LearnerMesh:
    """Return the device mesh of the learner called `name`.

    Raises:
        ConfigError: its sharding does not fit the number of ranks.
    """
    learner: LearnerConfig = getattr(config, name)
    check_sharding(config, name, ranks.size, on_gpu=compute_device().type != "cpu")
    return LearnerMesh.build(ranks, learner.parallel, learner.sharding.group_size, compute_device().type)


def _parallelize(
    config: Experiment, name: str, module: PolicyModule | ValueModel, mesh: LearnerMesh
) -> ParallelStrategy:
    """Move the learner called `name` to this process's device, parallelize and shard it, and apply its memory options;
    return its parallel strategy. FSDP is imported only if there is more than one device."""
    learner: LearnerConfig = getattr(config, name)
    module.to(compute_device())
    _save_memory(module, learner.memory, name)
    set_attention_backend(module, config.policy.attention)
    if mesh.device_mesh is None:
        return ReplicatedStrategy.from_config(module, learner.sharding)
    from quintet.training.parallel.fsdp import build_strategy
    from quintet.training.parallel.parallelize import parallelize_module

    layout = parallelize_module(module, mesh, learner, name, autocast_dtype(config, name))
    return build_strategy(
        module, learner.backend, mesh, learner.sharding, learner.memory, learner_dtype(config, name), layout
    )


def _save_memory(module: PolicyModule | ValueModel, memory: MemoryConfig, name: str) -> None:
    """Apply activation offloading, Liger kernels and torch.compile to a module, as configured for the learner `name`.

    Raises:
        ConfigError: Liger kernels are not available.
    """
    device = next(module.parameters()).device
    module.activation_context = activation_offloading(memory, device, name)
    inner = module.policy if isinstance(module, PolicyModule) else module.body
    if memory.liger:
        apply_liger_kernels(inner, f"{name}.memory.liger")
    if memory.pin and device.type == "cpu" and not torch.cuda.is_available():
        logger.info("%s.memory.pin has no effect without CUDA", name)
    if memory.torch_compile and isinstance(module, PolicyModule):
        if device.type == "cpu" and find_compiler() is None:
            logger.warning("%s.memory.torch_compile has no effect without a C++ compiler", name)
        else:
            module.statistics_fn = compiled_token_statistics()


def learner_dtype(config: Experiment, name: str) -> torch.dtype:
    """Return the learner's own dtype, or the policy's."""
    dtype = getattr(getattr(with_dtypes(config), name), "dtype", None)
    return DTYPES_BY_NAME[dtype] if dtype else policy_dtype(config)


def autocast_dtype(config: Experiment, name: str) -> torch.dtype:
    """Return the dtype of matrix products under autocast, which does not support float64. By default, a reference that
    is a snapshot of the policy computes in the policy's dtype."""
    learner = getattr(config, name)
    dtype = learner.sharding.autocast or learner.sharding.parameter_dtype
    if name == "reference" and dtype is None and learner.dtype is None and learner.path is None:
        return autocast_dtype(config, "actor")
    return learner_dtype(config, name) if dtype is None else DTYPES_BY_NAME["float32" if dtype == "float64" else dtype]


def _shared_with_engine(config: Experiment, strategy: ParallelStrategy) -> bool:
    """Return whether an engine in this process generates with these weights."""
    engine_dtype = config.rollout.engine_options.dtype or with_dtypes(config).policy.dtype
    return config.rollout.engine == "hf" and isinstance(strategy, ReplicatedStrategy) and engine_dtype == "float32"


def _ranks_to_balance(config: Experiment, mesh: LearnerMesh) -> int:
    """Return the number of ranks among which the work is balanced."""
    return mesh.data.size if config.actor.balance_ranks else 1


def build_actor(
    config: Experiment,
    model: PreTrainedModel,
    optimizer: OptimizerConfig,
    temperature: float = 1.0,
    ranks: RankGroup = SINGLE_RANK,
) -> ActorLearner:
    """Build the actor of a policy on the ranks, which all have the same weights; `temperature` divides its logits."""
    mesh = build_device_mesh(config, "actor", ranks)
    strategy = _parallelize(config, "actor", PolicyModule(model), mesh)
    num_balanced = _ranks_to_balance(config, mesh)
    return ActorLearner(
        model,
        optimizer,
        LearnerSetup(
            budget=MicroBatchBudget.from_config(config.actor.budget, config.training, num_balanced),
            inference_budget=MicroBatchBudget.from_config(config.actor.inference_budget, config.training, num_balanced),
            dtype=autocast_dtype(config, "actor"),
            temperature=temperature,
            ranks=mesh.data,
            strategy=strategy,
            loss_scale=LossScale.from_config(config.actor.sharding),
            offload=Offload.from_config(
                config.actor.memory, strategy.module, "actor", shared_with_engine=_shared_with_engine(config, strategy)
            ),
        ),
    )


def build_sft_actor(
    config: Experiment, sft: SftConfig, model: PreTrainedModel, ranks: RankGroup = SINGLE_RANK
) -> ActorLearner:
    """Build the actor that fine-tunes a model, parallelized like the actor of reinforcement learning."""
    mesh = build_device_mesh(config, "actor", ranks)
    max_sequences, num_balanced = sft.sequences_per_pass, _ranks_to_balance(config, mesh)
    tokens = config.training.micro_batch_tokens if max_sequences is None else None
    return ActorLearner(
        model,
        sft.optimizer,
        LearnerSetup(
            budget=MicroBatchBudget(tokens, max_sequences, num_balanced),
            dtype=autocast_dtype(config, "actor"),
            ranks=mesh.data,
            strategy=_parallelize(config, "actor", PolicyModule(model), mesh),
            loss_scale=LossScale.from_config(config.actor.sharding),
        ),
    )


def build_critic(config: Experiment, actor: Learner, policy: Path, ranks: RankGroup = SINGLE_RANK) -> CriticLearner:
    """Build a critic from the model at `critic.path`, or from the current policy, whose initial model is at `policy`.
    Adapters are merged, and all weights are trained."""
    path, trusted = config.critic.path, config.policy.trust_remote_code
    base = load_model(path, trust_remote_code=trusted) if path else _full_model(config, actor, policy)
    model, mesh = ValueModel(base), build_device_mesh(config, "critic", ranks)
    if has_lora(model.body):
        merge_adapters(model.body)
    checkpointing = config.critic.gradient_checkpointing
    if config.actor.gradient_checkpointing if checkpointing is None else checkpointing:
        enable_activation_checkpointing(model.body, "critic.gradient_checkpointing")
    else:
        disable_activation_checkpointing(model.body)
    strategy = _parallelize(config, "critic", model, mesh)
    return CriticLearner(
        model,
        config.critic.optimizer,
        LearnerSetup(
            budget=MicroBatchBudget.from_config(config.critic.budget, config.training),
            inference_budget=MicroBatchBudget.from_config(config.critic.inference_budget, config.training),
            dtype=autocast_dtype(config, "critic"),
            ranks=mesh.data,
            strategy=strategy,
            loss_scale=LossScale.from_config(config.critic.sharding),
            offload=Offload.from_config(config.critic.memory, strategy.module, "critic"),
        ),
    )


def build_reference(config: Experiment, actor: Learner, policy: Path, ranks: RankGroup = SINGLE_RANK) -> PolicyScorer:
    """Build the reference from the model at `reference.path`, or from the current policy, whose initial model is at
    `policy`. If only adapters are trained, it shares the policy's model and has a snapshot of the adapters, unless its
    dtype is another one."""
    reference, budget = (
        config.reference,
        MicroBatchBudget.from_config(config.reference.inference_budget, config.training),
    )
    if reference.path is None and reference.dtype is None and isinstance(actor, ActorLearner) and has_lora(actor.model):
        if reference.memory != MemoryConfig():
            logger.warning(
                "reference.memory has no effect: the reference shares the policy's weights, see actor.memory"
            )
        return ReferenceSnapshot(actor.scorer, budget)
    trusted = config.policy.trust_remote_code
    model = (
        load_model(reference.path, trust_remote_code=trusted) if reference.path else _full_model(config, actor, policy)
    )
    if isinstance(actor, ActorLearner) and model is actor.model:
        model = copy.deepcopy(model)
    if reference.dtype is not None:
        cast_weights(model, learner_dtype(config, "reference"))
    return _build_scorer(config, "reference", model, build_device_mesh(config, "reference", ranks), budget)


def build_policy_scorer(config: Experiment, policy: Path, ranks: RankGroup = SINGLE_RANK) -> PolicyScorer:
    """Build a scorer with the settings of the actor, without an optimizer, for the policy whose initial model is at
    `policy`. It has no adapters: the actor's weights contain them."""
    model = load_model(policy, trust_remote_code=config.policy.trust_remote_code, overrides=config.policy.overrides)
    mesh = build_device_mesh(config, "actor", ranks)
    num_balanced = _ranks_to_balance(config, mesh)
    budget = MicroBatchBudget.from_config(config.actor.inference_budget, config.training, num_balanced)
    return _build_scorer(config, "actor", model, mesh, budget)


def _build_scorer(
    config: Experiment, name: str, model: PreTrainedModel, mesh: LearnerMesh, budget: MicroBatchBudget
) -> PolicyScorer:
    """Freeze a policy, and build its scorer with the settings of the learner called `name`."""
    learner: LearnerConfig = getattr(config, name)
    strategy = _parallelize(config, name, PolicyModule(model.requires_grad_(requires_grad=False)), mesh)
    return PolicyScorer(
        model,
        LearnerSetup(
            budget=budget,
            dtype=autocast_dtype(config, name),
            temperature=config.rollout.temperature,
            ranks=mesh.data,
            strategy=strategy,
            offload=Offload.from_config(learner.memory, strategy.module, name),
        ),
    )


def _full_model(config: Experiment, actor: Learner, policy: Path) -> PreTrainedModel:
    """Return the current policy as a model with full weights: itself if its weights are not sharded, or else a copy."""
    if isinstance(actor, ActorLearner) and isinstance(actor.strategy, ReplicatedStrategy):
        return actor.model
    trusted = config.policy.trust_remote_code
    model = load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides)
    load_full_weights(model, actor.weights())
    return model


def _freeze(config: Experiment, model: PreTrainedModel) -> None:
    """Freeze the parts of the policy that are not trained."""
    if config.policy.freeze_router:
        freeze_routers(model)
    if config.policy.vision.freeze:
        model.base_model.visual.requires_grad_(requires_grad=False)


class TorchBackend:
    """`LearnerBackend` on torch: replicated, FSDP1 or FSDP2."""

    build_critic = staticmethod(build_critic)
    build_reference = staticmethod(build_reference)
    build_policy_scorer = staticmethod(build_policy_scorer)

    def build_actor(
        self, config: Experiment, policy: Path, optimizer: OptimizerConfig, ranks: RankGroup
    ) -> ActorLearner:
        trusted = config.policy.trust_remote_code
        model = load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides)
        if config.policy.lora is not None:
            add_lora(model, config.policy.lora, seed=derive_seed(config.seed, "adapters"))
        _freeze(config, model)
        if config.actor.gradient_checkpointing:
            enable_activation_checkpointing(model)
        return build_actor(config, model, optimizer, config.rollout.temperature, ranks)

    def build_sft_actor(self, config: Experiment, sft: SftConfig, base: Path, ranks: RankGroup) -> ActorLearner:
        model = load_model(base, trust_remote_code=config.policy.trust_remote_code, overrides=config.policy.overrides)
        if sft.lora is not None:
            add_lora(model, sft.lora, seed=derive_seed(config.seed, "adapters"), key="sft.lora")
        _freeze(config, model)
        if sft.gradient_checkpointing:
            enable_activation_checkpointing(model, "sft.gradient_checkpointing")
        if sft.liger:
            # Liger replaces modules of a model that is on its device already
            model.to(compute_device())
            apply_liger_kernels(model, "sft.liger")
        return build_sft_actor(config, sft, model, ranks)
