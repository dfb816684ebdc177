"""The learner of supervised fine-tuning: its updates, losses and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.algorithms.objective import CrossEntropyObjective, DistillationObjective
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.training import SftConfig
from quintet.data.lazy_conversations import Conversations, iter_batches
from quintet.errors import ConfigError, MachineError
from quintet.policies.lora import ADAPTER_DIRECTORY, save_adapters
from quintet.records import Batch
from quintet.runtime.controller import Controller
from quintet.runtime.learners.learner_checkpoint import HF, contents_to_load
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.runtime.run_checkpoint import TokenizerFiles, load_learners
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.checkpoint.checkpoint import Checkpoint, weights_digest
from quintet.training.checkpoint.hf_directory import HfDirectory
from quintet.training.optim.lr_schedule import learning_rate, weight_decay


def sft_config(config: Experiment) -> SftConfig:
    """Return the section `sft`.

    Raises:
        ConfigError: the configuration has none.
    """
    if config.sft is None:
        raise ConfigError(
            "the configuration has no section `sft`",
            key="sft",
            hint="add one, at least `sft: {}`; RAGEN's configurations have it with rl_or_sft=sft",
        )
    return config.sft


def with_schedule(sft: SftConfig, steps: int) -> OptimizerConfig:
    """Return the optimizer with the warm-up and decay steps that follow from the number of steps."""
    optimizer = sft.optimizer
    warmup = optimizer.warmup_steps or int((optimizer.warmup_ratio or sft.warmup_ratio) * steps)
    # as in verl, the learning rate is constant for nine tenths of the steps after the warm-up
    remaining = steps - warmup
    decay = optimizer.stable_decay_steps or max(1, remaining - int(0.9 * remaining))
    return optimizer.model_copy(update={"warmup_steps": warmup, "warmup_ratio": 0.0, "stable_decay_steps": decay})


@dataclass(slots=True)
class SftStage:
    """Learner and tokenizer of supervised fine-tuning."""

    config: Experiment
    tokenizer: Any
    learners: LearnerGroup
    base: Path
    """Initial model."""
    tokenizer_files: TokenizerFiles
    base_digest: str | None = None
    """Hash of the initial model's weights, if checkpoints contain only adapters to them."""

    @property
    def has_lora(self) -> bool:
        return sft_config(self.config).lora is not None

    def update(self, batch: Batch, step: int, steps: int) -> dict[str, float]:
        """Make one optimizer step on the mean cross-entropy of the batch's trained tokens, in nats, or on that and the
        divergence from the teacher."""
        distillation = sft_config(self.config).distillation
        objective = CrossEntropyObjective() if distillation is None else DistillationObjective(distillation)
        optimizer = with_schedule(sft_config(self.config), steps)
        rate, decay = learning_rate(optimizer, step, steps), weight_decay(optimizer, step, steps)
        update = self.learners.actor.update(
            batch, objective, "token-mean", rate, weight_decay=decay, reference=self.learners.reference
        )
        distilled = "sft/distillation_loss"
        return ({"train/distillation_loss": update[distilled]} if distilled in update else {}) | {
            "train/loss": update["sft/loss"],
            "train/likely_tokens": update["sft/likely_tokens"],
            "train/grad_norm": update["grad_norm"],
            "train/lr": rate,
            "train/skipped_updates": update["skipped"],
        }

    def loss(self, conversations: Conversations, batch_size: int) -> float:
        """Return the mean cross-entropy over all trained tokens, in nats."""
        total, tokens = 0.0, 0
        for batch in iter_batches(conversations, batch_size):
            total -= float(self.learners.actor.scorer.compute_log_probs(batch).double().sum())
            tokens += int(batch.loss_mask.sum())
        return total / tokens

    def save_model(self, directory: Path) -> None:
        """Write model and tokenizer in the format of `transformers`, with adapters merged."""
        actor = self.learners.actor
        weights = {name: tensor.detach().cpu() for name, tensor in actor.weights()}
        HfDirectory.from_model(actor.model).write(directory.parent, directory.name, weights)
        self.tokenizer.save_pretrained(directory)

    def save_adapters(self, directory: Path) -> None:
        """Write adapters and tokenizer."""
        actor = self.learners.actor
        save_adapters(actor.model, directory, self.base.absolute(), actor.adapters())
        self.tokenizer.save_pretrained(directory)

    def save(self, directory: Path) -> WriteFiles:
        """Copy `hf/`, the optimizer state and, with LoRA, the adapters; return the function that writes them into the
        checkpoint at `directory`."""
        has_adapters = self.has_lora and "model" in self.config.checkpoint.contents
        directories = (HF, ADAPTER_DIRECTORY) if has_adapters else (HF,)
        return self.tokenizer_files.add_to(self.learners.save(directory), *directories)

    def extra_state(self) -> dict[str, Any]:
        """Return the state besides tensors, as JSON values."""
        return self.learners.extra_state() if "extra" in self.config.checkpoint.contents else {}

    def load(self, checkpoint: Checkpoint) -> None:
        """Load what `checkpoint.load_contents` names; with LoRA the adapters alone, since merged weights are rounded.

        Raises:
            MachineError: the checkpoint belongs to another model, or the adapters' base model has changed.
        """
        contents = contents_to_load(checkpoint, self.config.checkpoint.load_contents)
        if checkpoint.state.get("base", self.base_digest) != self.base_digest and "model" in contents:
            message = (
                f"the base model at {self.base} has changed since the adapters in {checkpoint.directory} were saved"
            )
            raise MachineError(message, "restore the original weights, or start again with resume=never")
        load_learners(self.learners, checkpoint, self.config)


def build_stage(config: Experiment, base: Path, tokenizer: Any, controller: Controller) -> SftStage:
    """Build the learner of the model at `base` on the workers of the controller.

    Raises:
        MachineError: the directory contains no model.
        ConfigError: the tokenizer has more tokens than the model, LoRA does not fit, or Liger is not installed.
    """
    learners = controller.build_learners(config, base, sft=True)
    _check_vocabulary(config, tokenizer, learners.actor.model.config.get_text_config().vocab_size)
    if sft_config(config).distillation is not None:
        learners.snapshot_reference()
    digest = weights_digest(base) if sft_config(config).lora else None
    return SftStage(config, tokenizer, learners, base, TokenizerFiles(tokenizer), digest)


def _check_vocabulary(config: Experiment, tokenizer: Any, vocabulary: int) -> None:
    if len(tokenizer) > vocabulary:
        message = f"the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary}"
        hint = "use the model's own tokenizer: policy.tokenizer=null"
        raise ConfigError(message, key="policy.tokenizer", value=config.policy.tokenizer, hint=hint)
