"""Build the learner of supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.config.native.training import SftConfig
from quintet.runtime.learner_backends import load_backend
from quintet.runtime.local_learners import LocalLearners
from quintet.training.parallel.process_group import RankGroup

SINGLE_RANK = RankGroup()


def build_sft_learners(config: Experiment, base: Path, ranks: RankGroup = SINGLE_RANK) -> LocalLearners:
    """Build the learner of `config.sft` for the model at `base`.

    Raises:
        MachineError: the directory contains no model.
        ConfigError: LoRA does not fit the model, Liger or Megatron is not installed, or Megatron does not support the
            configuration.
    """
    sft = config.sft or SftConfig()
    actor = load_backend(config.actor.backend).build_sft_actor(config, sft, base.absolute(), ranks)
    return LocalLearners(config, base.absolute(), ranks, actor, sft=True)
