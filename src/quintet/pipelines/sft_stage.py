"""What fine-tuning trains: a model, LoRA in it where that is wanted, and how both are stored."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quintet.algorithms.objective import Imitation
from quintet.config.native import Experiment, OptimizerConfig, SftConfig
from quintet.data.conversations import Conversations
from quintet.errors import ConfigError
from quintet.policies.adapters import ADAPTER_DIRECTORY, add_lora, load_adapters, merged_weights, save_adapters
from quintet.policies.causal_lm import load_model, load_tokenizer, recompute_activations
from quintet.records import Batch
from quintet.rollout.agent_loop import derive_seed
from quintet.runtime.memory import keep_freed_memory
from quintet.runtime.storing import ACTOR, HF, Storing, contents_to_load, link_as_verl, restore_actor
from quintet.training.checkpoint import Checkpoint
from quintet.training.hf_directory import files_of, put_files
from quintet.training.learner import ActorLearner
from quintet.training.learner_files import copy_learner
from quintet.training.optimizer import learning_rate, weight_decay
from quintet.training.packing import Budget
from quintet.training.saving import Write

__all__ = ["Stage", "build_stage", "schedule", "sft_of", "sft_tokenizer"]

LIGER = "liger_kernel"


def sft_of(config: Experiment) -> SftConfig:
    """The section of this pipeline.

    Raises:
        ConfigError: there is none.
    """
    if config.sft is None:
        hint = "give it one, `sft: {}` at least; of RAGEN's configurations rl_or_sft=sft"
        raise ConfigError(
            "this configuration doesn't ask for fine-tuning: it has no section `sft`", key="sft", hint=hint
        )
    return config.sft


def sft_tokenizer(config: Experiment, model: Path) -> Any:
    """The tokenizer that is configured, or the one beside the model."""
    policy = config.policy
    trusted = policy.trust_remote_code or policy.trust_tokenizer_code
    return load_tokenizer(policy.tokenizer or model, trust_remote_code=trusted)


def schedule(sft: SftConfig, steps: int) -> OptimizerConfig:
    """The optimizer with the warm-up and decay that follow from the number of steps."""
    optimizer = sft.optimizer
    warmup = optimizer.warmup_steps or int((optimizer.warmup_ratio or sft.warmup_ratio) * steps)
    # verl holds nine tenths of what follows the warm-up
    left = steps - warmup
    decay = optimizer.stable_decay_steps or max(1, left - int(0.9 * left))
    return optimizer.model_copy(update={"warmup_steps": warmup, "warmup_ratio": 0.0, "stable_decay_steps": decay})


@dataclass(slots=True)
class Stage:
    """Everything that learns; see `build_stage`."""

    config: Experiment
    tokenizer: Any
    actor: ActorLearner
    base: Path
    """The model that it began with."""
    storing: Storing = field(default_factory=Storing)
    """Memory for copies of it, of which checkpoints are written."""
    _words: dict[str, bytes] = field(default_factory=dict)
    """The tokenizer's files."""

    @property
    def has_lora(self) -> bool:
        return sft_of(self.config).lora is not None

    def learn(self, batch: Batch, step: int, steps: int) -> dict[str, float]:
        """One optimizer step on the mean cross-entropy of the batch's own tokens, nats."""
        optimizer = schedule(sft_of(self.config), steps)
        rate, decay = learning_rate(optimizer, step, steps), weight_decay(optimizer, step, steps)
        update = self.actor.update(batch, Imitation(), "token-mean", rate, decay=decay)
        return {
            "train/loss": update["sft/loss"],
            "train/token_accuracy": update["sft/token_accuracy"],
            "train/grad_norm": update["grad_norm"],
            "train/lr": rate,
            "train/skipped_updates": update["skipped"],
        }

    def loss(self, conversations: Conversations, rows_at_a_time: int) -> float:
        """Mean cross-entropy over all own tokens, nats."""
        total, tokens = 0.0, 0
        for first in range(0, len(conversations), rows_at_a_time):
            batch = conversations.batch(range(first, min(first + rows_at_a_time, len(conversations))))
            total -= float(self.actor.scorer.logprobs(batch).double().sum())
            tokens += int(batch.loss_mask.sum())
        return total / tokens

    def save_model(self, directory: Path) -> None:
        """Write model and tokenizer as `transformers` reads them, adapters merged."""
        weights = merged_weights(self.actor.model) if self.has_lora else None
        self.actor.model.save_pretrained(directory, state_dict=weights)
        self.tokenizer.save_pretrained(directory)

    def save_adapters(self, directory: Path) -> None:
        """Write adapters and tokenizer."""
        save_adapters(self.actor.model, directory, self.base.absolute())
        self.tokenizer.save_pretrained(directory)

    def copies(self, directory: Path) -> Write:
        """A checkpoint's files as they are now: `hf/`, the optimizer's moments and, with LoRA, the adapters by
        themselves; what writes them."""
        contents = self.config.checkpoint.contents
        asked = set(contents) - ({"model"} if self.has_lora else set())
        held = copy_learner(self.actor, ACTOR, asked, self.storing.memory)
        model = self.storing.model(self.actor, held)
        self._words = self._words or files_of(self.tokenizer.save_pretrained)
        words = self._words
        adapters = files_of(self.save_adapters) if self.has_lora and "model" in contents else {}

        def write(directory: Path) -> None:
            held.write(directory, model(directory))
            put_files(directory / HF, words)
            put_files(directory / ADAPTER_DIRECTORY, adapters)
            if "hf_model" in contents:
                link_as_verl(directory)

        return write

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up what a checkpoint holds, as far as `checkpoint.load_contents` asks for it: with LoRA the adapters
        alone, since merged weights are rounded."""
        contents = contents_to_load(checkpoint, self.config.checkpoint.load_contents)
        asked = set(contents) - ({"model", "hf_model"} if self.has_lora else set())
        if self.has_lora and "model" in contents:
            load_adapters(self.actor.model, checkpoint.directory / ADAPTER_DIRECTORY)
        restore_actor(self.actor, checkpoint.directory, asked)


def build_stage(config: Experiment, base: Path, tokenizer: Any) -> Stage:
    """The learner around the model at `base`.

    Raises:
        MachineError: the directory isn't a model.
        ConfigError: the tokenizer has more tokens than the model, LoRA doesn't fit, or Liger isn't there.
    """
    sft = sft_of(config)
    keep_freed_memory()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    model = load_model(base, trust_remote_code=config.policy.trust_remote_code, overrides=config.policy.overrides)
    _fits(config, tokenizer, model.config.vocab_size)
    if sft.lora is not None:
        add_lora(model, sft.lora, seed=derive_seed(config.seed, "adapters"), key="sft.lora")
    if sft.gradient_checkpointing:
        _recompute(model)
    if sft.liger:
        _use_liger(model)
    budget = (
        Budget(config.training.micro_batch_tokens)
        if sft.sequences_per_pass is None
        else Budget(sequences=sft.sequences_per_pass)
    )
    dtype = torch.bfloat16 if config.policy.dtype == "bfloat16" else torch.float32
    return Stage(config, tokenizer, ActorLearner(model, sft.optimizer, budget=budget, dtype=dtype), base)


def _fits(config: Experiment, tokenizer: Any, vocabulary: int) -> None:
    if len(tokenizer) > vocabulary:
        told = f"the tokenizer has {len(tokenizer)} tokens, the model knows {vocabulary}"
        hint = "take the model's own tokenizer: policy.tokenizer=null"
        raise ConfigError(told, key="policy.tokenizer", value=config.policy.tokenizer, hint=hint)


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
