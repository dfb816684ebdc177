"""What supervised fine-tuning trains: a model, and LoRA in it where that is wanted."""

from __future__ import annotations

from pathlib import Path

import torch

from quintet.config.native import Experiment, SftConfig
from quintet.config.native.learners import BudgetConfig
from quintet.policies.adapters import add_lora
from quintet.policies.causal_lm import load_model, recompute_activations
from quintet.policies.liger import use_liger
from quintet.policies.routers import freeze_routers
from quintet.rollout.agent_loop import derive_seed
from quintet.runtime.device import compute_device
from quintet.runtime.learners import Learners, open_tuned_actor
from quintet.runtime.megatron import is_megatron, open_megatron_policy
from quintet.runtime.memory import keep_freed_memory
from quintet.training.ranks import Ranks

__all__ = ["open_tuned"]

ALONE = Ranks()


def open_tuned(config: Experiment, base: Path, ranks: Ranks = ALONE) -> Learners:
    """The learner of `config.sft` around the model at `base`.

    Raises:
        MachineError: the directory isn't a model.
        ConfigError: LoRA doesn't fit, Liger isn't there, or Megatron isn't or can't do what is asked for.
    """
    sft = config.sft or SftConfig()
    keep_freed_memory()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    if is_megatron(config.actor):
        actor = open_megatron_policy(_as_tuned(config, sft), base.absolute(), sft.optimizer, tuned=True)
        return Learners(config, base.absolute(), ranks, actor, tuned=True)
    model = load_model(base, trust_remote_code=config.policy.trust_remote_code, overrides=config.policy.overrides)
    if sft.lora is not None:
        add_lora(model, sft.lora, seed=derive_seed(config.seed, "adapters"), key="sft.lora")
    if config.policy.freeze_router:
        freeze_routers(model)
    if sft.gradient_checkpointing:
        recompute_activations(model, "sft.gradient_checkpointing")
    if sft.liger:
        # its kernels are put into a model that is where it will learn
        model.to(compute_device())
        use_liger(model, "sft.liger")
    return Learners(config, base.absolute(), ranks, open_tuned_actor(config, sft, model, ranks), tuned=True)


def _as_tuned(config: Experiment, sft: SftConfig) -> Experiment:
    """The same run whose actor learns as the stage is told to: nothing is sampled, so that no temperature divides its
    logits."""
    budget = BudgetConfig() if sft.sequences_per_pass is None else BudgetConfig(sequences=sft.sequences_per_pass)
    actor = {"budget": budget, "inference_budget": budget, "gradient_checkpointing": sft.gradient_checkpointing}
    return config.model_copy(
        update={
            "actor": config.actor.model_copy(update=actor),
            "rollout": config.rollout.model_copy(update={"temperature": 1.0}),
        }
    )
