"""What supervised fine-tuning trains: a model, and LoRA in it where that is wanted."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from quintet.config.native import Experiment, SftConfig
from quintet.errors import ConfigError
from quintet.policies.adapters import add_lora
from quintet.policies.causal_lm import load_model, recompute_activations
from quintet.rollout.agent_loop import derive_seed
from quintet.runtime.learners import Learners, open_tuned_actor
from quintet.runtime.memory import keep_freed_memory
from quintet.training.ranks import Ranks

__all__ = ["open_tuned"]

ALONE = Ranks()
LIGER = "liger_kernel"


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
        _recompute(model)
    if sft.liger:
        _use_liger(model)
    return Learners(config, base.absolute(), ranks, open_tuned_actor(config, sft, model, ranks), tuned=True)


def _recompute(model: Any) -> None:
    try:
        recompute_activations(model)
    except ConfigError as error:
        raise ConfigError(
            error.message, key="sft.gradient_checkpointing", value=True, hint="set it to false"
        ) from error


def _use_liger(model: Any) -> None:
    """Put Liger's fused kernels into the model; the loss stays ours.

    Raises:
        ConfigError: the package isn't installed, or the model isn't on a GPU, for which its kernels are written.
    """
    if importlib.util.find_spec(LIGER) is None:
        hint = "pip install liger-kernel, or sft.liger=false"
        raise ConfigError(
            "sft.liger = true needs liger-kernel, not installed here", key="sft.liger", value=True, hint=hint
        )
    if not next(model.parameters()).is_cuda:
        told = "sft.liger = true: Liger's kernels run on a GPU, and this model is on the CPU"
        raise ConfigError(told, key="sft.liger", value=True, hint="set it to false")
    kernels: Any = importlib.import_module(f"{LIGER}.transformers")
    kernels._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
