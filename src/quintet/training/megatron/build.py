"""Build Megatron's learners from a configuration; call `require_megatron` before importing this module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import LearnerConfig, OptimizerConfig
from quintet.config.native.megatron import ConversionConfig, MegatronConfig
from quintet.errors import ConfigError
from quintet.policies.routers import no_routers_error
from quintet.training.megatron.core_package import compute_device
from quintet.training.megatron.hf_weights import HfWeights
from quintet.training.megatron.learner import MegatronActor, MegatronCritic, MegatronScorer
from quintet.training.megatron.options import check_supported, model_family
from quintet.training.megatron.pipeline_runner import MegatronModel, ModelSpec
from quintet.training.megatron.process_groups import initialize_process_groups, initialize_tp_comm_overlap
from quintet.training.megatron.shard_files import ConversionJob, MegatronWeights, convert, is_complete
from quintet.training.packing import MicroBatchBudget

DTYPES_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_megatron_actor(
    config: Experiment, policy_dir: Path, optimizer: OptimizerConfig | None = None
) -> MegatronActor:
    """Build the actor on all ranks of `torch.distributed`, from the weights that `actor.megatron` names, or from the
    Hugging Face directory `policy_dir`. All ranks call it; a single one needs no process group.

    Raises:
        ConfigError: Megatron does not support the configuration.
        MachineError: weights are missing.
    """
    spec = _model_spec(config, "actor", policy_dir, recompute=config.actor.gradient_checkpointing)
    model = spec.build_model()
    num_ranks = spec.ranks.data.size if config.actor.balance_ranks else 1
    model.load_weights(_initial_weights(config.actor.megatron or MegatronConfig(), spec, policy_dir))
    return MegatronActor(
        model,
        optimizer or config.actor.optimizer,
        budget=MicroBatchBudget.from_config(config.actor.budget, config.training, num_ranks),
        inference_budget=MicroBatchBudget.from_config(config.actor.inference_budget, config.training, num_ranks),
        temperature=config.rollout.temperature,
    )


def build_megatron_critic(
    config: Experiment, policy_dir: Path, weights: Iterable[tuple[str, Tensor]] | None = None
) -> MegatronCritic:
    """Build the critic from the Hugging Face directory `policy_dir`, or from the `weights` of another learner.

    Raises as `build_megatron_actor` does.
    """
    recompute = config.critic.gradient_checkpointing
    spec = _model_spec(
        config,
        "critic",
        policy_dir,
        recompute=config.actor.gradient_checkpointing if recompute is None else recompute,
    )
    model = spec.build_model(critic=True)
    _load(model, policy_dir, weights)
    return MegatronCritic(
        model,
        config.critic.optimizer,
        budget=MicroBatchBudget.from_config(config.critic.budget, config.training),
        inference_budget=MicroBatchBudget.from_config(config.critic.inference_budget, config.training),
    )


def build_megatron_reference(
    config: Experiment, policy_dir: Path, weights: Iterable[tuple[str, Tensor]] | None = None
) -> MegatronScorer:
    """Build a scorer from the Hugging Face directory `policy_dir`, or from the `weights` of another learner; raises as
    `build_megatron_actor` does."""
    budget = MicroBatchBudget.from_config(config.reference.inference_budget, config.training)
    return _build_scorer(config, _model_spec(config, "reference", policy_dir), policy_dir, budget, weights)


def build_megatron_policy_scorer(config: Experiment, policy_dir: Path) -> MegatronScorer:
    """Build a scorer with the settings of the actor, whose weights it is to get; raises as `build_megatron_actor`
    does."""
    spec = _model_spec(config, "actor", policy_dir)
    num_ranks = spec.ranks.data.size if config.actor.balance_ranks else 1
    budget = MicroBatchBudget.from_config(config.actor.inference_budget, config.training, num_ranks)
    return _build_scorer(config, spec, policy_dir, budget)


def _build_scorer(
    config: Experiment,
    spec: ModelSpec,
    policy_dir: Path,
    budget: MicroBatchBudget,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> MegatronScorer:
    model = spec.build_model()
    _load(model, policy_dir, weights)
    for chunk in model.chunks:
        chunk.requires_grad_(requires_grad=False)
    return MegatronScorer(model, budget=budget, temperature=config.rollout.temperature)


def _load(model: MegatronModel, policy_dir: Path, weights: Iterable[tuple[str, Tensor]] | None) -> None:
    if weights is None:
        model.load_weights(HfWeights(policy_dir))
    else:
        model.load_weight_stream(weights)


def _model_spec(config: Experiment, name: str, policy_dir: Path, *, recompute: bool = False) -> ModelSpec:
    """Return the specification of the model of the section `name`."""
    learner: LearnerConfig = getattr(config, name)
    options = learner.megatron or MegatronConfig()
    hf_config = _hf_config(policy_dir, config.policy.overrides)
    if config.policy.freeze_router and not model_family(hf_config).num_experts:
        raise no_routers_error()
    check_supported(options, on_cpu=compute_device().type == "cpu")
    ranks = initialize_process_groups(learner.parallel, options, config.seed, learner=name)
    initialize_tp_comm_overlap(options, learner.parallel, hf_config.hidden_size)
    return ModelSpec(
        hf_config=hf_config,
        options=options,
        parallel=learner.parallel,
        ranks=ranks,
        dtype=DTYPES_BY_NAME.get(config.policy.dtype, torch.float32),
        recompute=recompute,
        freeze_router=config.policy.freeze_router,
        generation_config=_generation_config(policy_dir),
    )


def _hf_config(policy_dir: Path, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(policy_dir, local_files_only=True)
    for name, value in overrides.items():
        setattr(hf_config, name, value)
    return hf_config


def _generation_config(policy_dir: Path) -> Any:
    from transformers import GenerationConfig

    if (policy_dir / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(policy_dir, local_files_only=True)
    return GenerationConfig.from_model_config(_hf_config(policy_dir, {}))


def _initial_weights(options: MegatronConfig, spec: ModelSpec, policy_dir: Path) -> Mapping[str, Tensor]:
    """Return the initial weights: of a Megatron directory, converted before the run, or of a Hugging Face directory."""
    if options.checkpoint is not None:
        return MegatronWeights(Path(options.checkpoint), spec.hf_config)
    conversion = options.conversion
    source = Path(conversion.source) if conversion.source else policy_dir
    _check_model_name(conversion.model, spec.hf_config)
    if conversion.target is None:
        return HfWeights(source)
    target = Path(conversion.target)
    if spec.ranks.world.rank == 0 and not is_complete(target):
        convert(
            ConversionJob(
                source,
                target,
                tensor=conversion.tensor_parallel or spec.parallel.tensor,
                pipeline=conversion.pipeline_parallel or spec.parallel.pipeline,
                processes=conversion.processes,
                devices=_conversion_devices(conversion),
            )
        )
    dist.barrier()
    return MegatronWeights(target, spec.hf_config)


def _conversion_devices(conversion: ConversionConfig) -> tuple[int, ...]:
    """Return the GPUs to convert on."""
    available = torch.cuda.device_count()
    count = available if conversion.devices is None else conversion.devices
    chosen = conversion.device_ranks or tuple(range(count))
    if count > available or any(rank >= available for rank in chosen[:count]):
        raise ConfigError(
            f"actor.megatron.conversion.devices asks for {count} GPUs {list(chosen)}, but {available} are available",
            key="actor.megatron.conversion.devices",
            value=conversion.devices,
            hint="actor.megatron.conversion.devices=0 converts on the CPU",
        )
    return chosen[:count]


def _check_model_name(name: str | None, hf_config: Any) -> None:
    """Check that the converter's model name fits the model."""
    if name is None:
        return
    model_types = {"qwen3": ("qwen3", "qwen3_moe"), "qwen2": ("qwen2",), "qwen": ("qwen2",), "llama": ("llama",)}
    expected = next((types for prefix, types in model_types.items() if prefix in name.lower()), None)
    if expected is not None and hf_config.model_type not in expected:
        raise ConfigError(
            f"actor.megatron.conversion.model = {name} implies model type {'/'.join(expected)}, but the model is "
            f"{hf_config.model_type}",
            key="actor.megatron.conversion.model",
            value=name,
            hint="actor.megatron.conversion.model=null reads the model's config.json",
        )
