"""Megatron's learners from a configuration, once megatron-core is known to be there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.config.native import ActorConfig, CriticConfig, Experiment, OptimizerConfig
from quintet.config.native.learners import ReferenceConfig
from quintet.config.native.megatron import ConversionConfig, MegatronConfig
from quintet.errors import ConfigError
from quintet.policies.routers import no_routers
from quintet.training.megatron.groups import open_groups, overlap_communication
from quintet.training.megatron.learner import MegatronActor, MegatronCritic, MegatronScorer
from quintet.training.megatron.options import family, refuse_unable
from quintet.training.megatron.package import device
from quintet.training.megatron.passes import Plan
from quintet.training.megatron.store import Conversion, Pieces, convert, is_whole
from quintet.training.megatron.stored import StoredWeights
from quintet.training.megatron.weights import put_weights
from quintet.training.packing import Budget

__all__ = ["build_actor", "build_critic", "build_reference"]

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_actor(config: Experiment, policy: Path, optimizer: OptimizerConfig) -> MegatronActor:
    """See `open_megatron_actor`."""
    plan = _plan(config, config.actor, policy, recompute=config.actor.gradient_checkpointing)
    model = plan.model()
    even = plan.place.data.size if config.actor.balance_ranks else 1
    put_weights(model.chunks, _start(config.actor.megatron or MegatronConfig(), plan, policy), model.shape)
    return MegatronActor(
        model,
        optimizer,
        budget=Budget.of(config.actor.budget, config.training, even),
        inference_budget=Budget.of(config.actor.inference_budget, config.training, even),
        temperature=config.rollout.temperature,
    )


def build_critic(config: Experiment, policy: Path, weights: Mapping[str, Tensor] | None = None) -> MegatronCritic:
    """See `open_megatron_critic`."""
    recompute = config.critic.gradient_checkpointing
    plan = _plan(
        config,
        config.critic,
        policy,
        recompute=config.actor.gradient_checkpointing if recompute is None else recompute,
    )
    model = plan.model(critic=True)
    put_weights(model.chunks, StoredWeights(policy) if weights is None else weights, model.shape)
    return MegatronCritic(
        model,
        config.critic.optimizer,
        budget=Budget.of(config.critic.budget, config.training),
        inference_budget=Budget.of(config.critic.inference_budget, config.training),
    )


def build_reference(config: Experiment, policy: Path) -> MegatronScorer:
    """See `open_megatron_reference`."""
    plan = _plan(config, config.reference, policy)
    model = plan.model()
    put_weights(model.chunks, StoredWeights(policy), model.shape)
    for chunk in model.chunks:
        chunk.requires_grad_(requires_grad=False)
    budget = Budget.of(config.reference.inference_budget, config.training)
    return MegatronScorer(model, budget=budget, temperature=config.rollout.temperature)


def _plan(
    config: Experiment, learner: ActorConfig | CriticConfig | ReferenceConfig, policy: Path, *, recompute: bool = False
) -> Plan:
    options = learner.megatron or MegatronConfig()
    hf = _hf_config(policy, config.policy.overrides)
    if config.policy.freeze_router and not family(hf).experts:
        raise no_routers()
    refuse_unable(options, hosted=device().type == "cpu")
    place = open_groups(learner.parallel, options, config.seed)
    overlap_communication(options, learner.parallel, hf.hidden_size)
    return Plan(
        hf=hf,
        options=options,
        parallel=learner.parallel,
        place=place,
        dtype=TYPES.get(config.policy.dtype, torch.float32),
        recompute=recompute,
        freeze_router=config.policy.freeze_router,
        generation=_generation(policy),
    )


def _hf_config(policy: Path, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(policy, local_files_only=True)
    for name, value in overrides.items():
        setattr(hf, name, value)
    return hf


def _generation(policy: Path) -> Any:
    from transformers import GenerationConfig

    if (policy / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(policy, local_files_only=True)
    return GenerationConfig.from_model_config(_hf_config(policy, {}))


def _start(options: MegatronConfig, plan: Plan, policy: Path) -> Mapping[str, Tensor]:
    """The weights to begin with: a Megatron directory's, those converted before the run, or Hugging Face's."""
    if options.checkpoint is not None:
        return Pieces(Path(options.checkpoint), plan.hf)
    wanted = options.conversion
    source = Path(wanted.source) if wanted.source else policy
    _same_model(wanted.model, plan.hf)
    if wanted.target is None:
        return StoredWeights(source)
    target = Path(wanted.target)
    if plan.place.world.rank == 0 and not is_whole(target):
        convert(
            Conversion(
                source,
                target,
                tensor=wanted.tensor_parallel or plan.parallel.tensor,
                pipeline=wanted.pipeline_parallel or plan.parallel.pipeline,
                processes=wanted.processes,
                devices=_devices(wanted),
            )
        )
    dist.barrier()
    return Pieces(target, plan.hf)


def _devices(wanted: ConversionConfig) -> tuple[int, ...]:
    """GPUs that convert."""
    there = torch.cuda.device_count()
    asked = there if wanted.devices is None else wanted.devices
    chosen = wanted.device_ranks or tuple(range(asked))
    if asked > there or any(rank >= there for rank in chosen[:asked]):
        raise ConfigError(
            f"{asked} GPUs {list(chosen)} are to convert, and {there} are there",
            key="actor.megatron.conversion.devices",
            value=wanted.devices,
            hint="0 converts on the CPU",
        )
    return chosen[:asked]


def _same_model(name: str | None, hf: Any) -> None:
    """The converter's name of the model must mean the one that lies there."""
    if name is None:
        return
    known = {"qwen3": ("qwen3", "qwen3_moe"), "qwen2": ("qwen2",), "qwen": ("qwen2",), "llama": ("llama",)}
    meant = next((kinds for word, kinds in known.items() if word in name.lower()), None)
    if meant is not None and hf.model_type not in meant:
        raise ConfigError(
            f"{name} is one of {'/'.join(meant)}, and {hf.model_type} lies there",
            key="actor.megatron.conversion.model",
            value=name,
            hint="null asks the model's own config.json",
        )
