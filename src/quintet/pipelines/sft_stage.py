"""What fine-tuning trains: a model, LoRA in it where that is wanted, and how both are stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.algorithms.objective import Imitation
from quintet.config.native import Experiment, OptimizerConfig, SftConfig
from quintet.data.conversations import Conversations
from quintet.errors import ConfigError, MachineError
from quintet.policies.adapters import ADAPTER_DIRECTORY, save_adapters
from quintet.policies.causal_lm import load_tokenizer
from quintet.records import Batch
from quintet.runtime.conducting import ConductedLearners, Conductor
from quintet.runtime.learners import Learners
from quintet.runtime.storing import HF, contents_to_load
from quintet.runtime.tuning import open_tuned
from quintet.training.checkpoint import Checkpoint, weights_digest
from quintet.training.handles import Actor
from quintet.training.hf_directory import HfDirectory, files_of, put_files
from quintet.training.optimizer import learning_rate, weight_decay
from quintet.training.saving import Write

__all__ = ["Stage", "build_stage", "schedule", "sft_of", "sft_tokenizer"]


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
    return load_tokenizer(policy.tokenizer or model, trust_remote_code=trusted, fast=policy.fast_tokenizer)


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
    learners: Learners | ConductedLearners
    base: Path
    """The model that it began with."""
    base_digest: str | None = None
    """A hash of that model's weights, where checkpoints hold adapters to it alone."""
    _words: dict[str, bytes] = field(default_factory=dict)
    """The tokenizer's files."""

    @property
    def actor(self) -> Actor:
        """What is trained."""
        return self.learners.actor

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
        weights = {name: tensor.detach().cpu() for name, tensor in self.actor.weights()}
        HfDirectory.of(self.actor.model).write(directory.parent, directory.name, weights)
        self.tokenizer.save_pretrained(directory)

    def save_adapters(self, directory: Path) -> None:
        """Write adapters and tokenizer."""
        save_adapters(self.actor.model, directory, self.base.absolute(), self.actor.adapters())
        self.tokenizer.save_pretrained(directory)

    def save(self, directory: Path) -> Write:
        """Take copies of `hf/`, the optimizer's moments and, with LoRA, the adapters by themselves; gives what writes
        them into a checkpoint, which is made in that directory."""
        files = self.learners.save(directory)
        self._words = self._words or files_of(self.tokenizer.save_pretrained)
        words, apart = self._words, self.has_lora and "model" in self.config.checkpoint.contents

        def write(place: Path) -> None:
            files(place)
            for name in (HF, ADAPTER_DIRECTORY) if apart else (HF,):
                put_files(place / name, words)

        return write

    def extra(self) -> dict[str, Any]:
        """What besides tensors a later run goes on by, for JSON."""
        return self.learners.extra() if "extra" in self.config.checkpoint.contents else {}

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up what a checkpoint holds, as far as `checkpoint.load_contents` asks for it: with LoRA the adapters
        alone, since merged weights are rounded.

        Raises:
            MachineError: it is that of another model, or the model that its adapters belong to isn't what it was.
        """
        contents = contents_to_load(checkpoint, self.config.checkpoint.load_contents)
        if checkpoint.state.get("base", self.base_digest) != self.base_digest and "model" in contents:
            told = f"the weights at {self.base} aren't those that the adapters in {checkpoint.directory} belong to"
            raise MachineError(told, "put those back, or start anew with resume=never")
        extra = checkpoint.state if "extra" in contents else {}
        scales = {name: value for name, value in extra.items() if name.endswith("_scale")}
        self.learners.load(checkpoint.directory, contents, scales)


def build_stage(config: Experiment, base: Path, tokenizer: Any, conductor: Conductor | None = None) -> Stage:
    """The learner around the model at `base`; a `conductor` has it on all its ranks.

    Raises:
        MachineError: the directory isn't a model.
        ConfigError: the tokenizer has more tokens than the model, LoRA doesn't fit, or Liger isn't there.
    """
    learners = conductor.open(base, tuned=True) if conductor else open_tuned(config, base)
    _fits(config, tokenizer, learners.actor.model.config.vocab_size)
    return Stage(config, tokenizer, learners, base, weights_digest(base) if sft_of(config).lora else None)


def _fits(config: Experiment, tokenizer: Any, vocabulary: int) -> None:
    if len(tokenizer) > vocabulary:
        told = f"the tokenizer has {len(tokenizer)} tokens, the model knows {vocabulary}"
        hint = "take the model's own tokenizer: policy.tokenizer=null"
        raise ConfigError(told, key="policy.tokenizer", value=config.policy.tokenizer, hint=hint)
