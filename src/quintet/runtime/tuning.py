"""What supervised fine-tuning trains: a model, and LoRA in it where that is wanted."""

from __future__ import annotations

from pathlib import Path

import torch

from quintet.config.native import Experiment, SftConfig
from quintet.policies.adapters import add_lora
from quintet.policies.causal_lm import load_model, recompute_activations
from quintet.policies.liger import use_liger
from quintet.rollout.agent_loop import derive_seed
from quintet.runtime.device import compute_device
from quintet.runtime.learners import Learners, open_tuned_actor
from quintet.runtime.memory import keep_freed_memory
from quintet.training.ranks import Ranks

__all__ = ["open_tuned"]

ALONE = Ranks()


def open_tuned(config: Experiment, base: Path, ranks: Ranks = ALONE) -> Learners:
    """The learner of `config.sft` around the model at `base`.

    Raises:
        MachineError: the directory isn't a model.
        ConfigError: LoRA doesn't fit, or Liger isn't there.
    """
    sft = config.sft or SftConfig()
    keep_freed_memory()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    model = load_model(base, trust_remote_code=config.policy.trust_remote_code, overrides=config.policy.overrides)
    if sft.lora is not None:
        add_lora(model, sft.lora, seed=derive_seed(config.seed, "adapters"), key="sft.lora")
    if sft.gradient_checkpointing:
        recompute_activations(model, "sft.gradient_checkpointing")
    if sft.liger:
        # its kernels are put into a model that is where it will learn
        model.to(compute_device())
        use_liger(model, "sft.liger")
    return Learners(config, base.absolute(), ranks, open_tuned_actor(config, sft, model, ranks), tuned=True)
