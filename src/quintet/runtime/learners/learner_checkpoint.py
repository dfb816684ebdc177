"""Checkpoints of learners: copies of actor, critic and reference, and how they are restored."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.config.native.tracking import CheckpointConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.lora import ADAPTER_DIRECTORY, has_lora, read_adapters, save_adapters
from quintet.policies.model_loading import load_model
from quintet.runtime.groups import Policy
from quintet.runtime.learners.megatron_backend import (
    WriteAssignment,
    restore_from_directory,
    restore_full_state,
    restore_weights,
    snapshot_full_state,
    snapshot_weights,
)
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.checkpoint.checkpoint import Checkpoint
from quintet.training.checkpoint.hf_directory import HfDirectory, capture_files, write_files
from quintet.training.checkpoint.learner_state import (
    MODEL_STEM,
    LearnerSnapshot,
    restore_learner,
    snapshot_learner,
    snapshot_tensors,
)
from quintet.training.checkpoint.shards import ShardReader, TensorLocation
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.checkpoint.state_dict import has_flat_parameters, load_model_state_dict, model_state_dict
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.parallel.process_group import SINGLE_RANK, RankGroup
from quintet.training.parallel.strategy import ReplicatedStrategy
from quintet.training.protocols import Actor, Critic, LocalActor, LogProbScorer
from quintet.training.reference_snapshot import ReferenceSnapshot
from quintet.training.scorer import PolicyScorer

HF, ACTOR, CRITIC, REFERENCE = "hf", "actor", "critic", "reference"
"""Directories of a checkpoint."""
HF_MODEL = "hf_model"
"""Content of a checkpoint: the weights in `hf/`."""
VERL_LINK = "huggingface"
"""Name of the link in `actor` where verl expects the model in Hugging Face format."""


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """Learners to be copied for a checkpoint."""

    experiment: Experiment
    ranks: RankGroup
    actor: LocalActor
    critic: Critic | None
    reference: LogProbScorer | None
    base: Path
    """Base model of the adapters."""
    sft: bool


class LearnerSnapshots:
    """Copies of learners in host memory, which every checkpoint reuses."""

    def __init__(self) -> None:
        self.memory = HostBuffers()
        self._hf: HfDirectory | None = None

    def copy(self, source: SnapshotSource) -> WriteFiles:
        """Copy the parts of the learners named in `checkpoint.contents`; return the function that writes the copies. A
        collective of all ranks."""
        ranks, contents = source.ranks, source.experiment.checkpoint.contents
        assignment = WriteAssignment.from_config(source.experiment, ranks)
        # the base model of fine-tuned adapters is not copied into the checkpoint
        adapters_only = source.sft and has_lora(source.actor.model)
        actor_contents = [content for content in contents if content != MODEL_STEM or not adapters_only]
        actor = self._learner(source.actor, ACTOR, actor_contents, assignment)
        snapshots = [actor, *self._others(source.experiment, source.critic, source.reference, assignment)]
        write_model = self.model(source.actor, actor, ranks)
        adapters = _adapter_files(source) if MODEL_STEM in contents or not adapters_only else {}

        def write(directory: Path) -> None:
            hf_locations = write_model(directory)
            for snapshot in snapshots:
                snapshot.write(directory, hf_locations)
            write_files(directory / ADAPTER_DIRECTORY, adapters)
            if HF_MODEL in contents and ranks.rank == 0:
                link_as_verl(directory)

        return write

    def copy_without_actor(
        self, config: Experiment, critic: Critic | None, reference: LogProbScorer | None, ranks: RankGroup
    ) -> WriteFiles:
        """Copy critic and reference as `copy` does, on ranks without an actor."""
        snapshots = list(self._others(config, critic, reference, WriteAssignment.from_config(config, ranks)))

        def write(directory: Path) -> None:
            for snapshot in snapshots:
                snapshot.write(directory)

        return write

    def _others(
        self, config: Experiment, critic: Critic | None, reference: LogProbScorer | None, assignment: WriteAssignment
    ) -> Iterator[LearnerSnapshot]:
        """Copy critic and reference. Unlike the actor they are not in `hf/`: their weights are always copied."""
        if critic is not None:
            yield self._learner(critic, CRITIC, {*config.checkpoint.contents, MODEL_STEM}, assignment)
        if reference is not None and config.reference.path is None:
            yield self._reference(reference, assignment)

    def _learner(
        self, learner: object, name: str, contents: Collection[str], assignment: WriteAssignment
    ) -> LearnerSnapshot:
        if isinstance(learner, ActorLearner | CriticLearner):
            return snapshot_learner(learner, name, contents, self.memory, assignment.ranks)
        return snapshot_full_state(learner, name, contents, self.memory, assignment)

    def _reference(self, reference: LogProbScorer, assignment: WriteAssignment) -> LearnerSnapshot:
        if isinstance(reference, PolicyScorer):
            with reference.on_device() if has_flat_parameters(reference.strategy.module) else nullcontext():
                return snapshot_tensors(
                    {str(MODEL_STEM): _reference_weights(reference)}, REFERENCE, self.memory, assignment.ranks
                )
        return snapshot_weights(reference, REFERENCE, self.memory, assignment)

    def model(
        self, actor: Policy, snapshot: LearnerSnapshot, ranks: RankGroup = SINGLE_RANK
    ) -> Callable[[Path], dict[int, TensorLocation]]:
        """Copy the policy with adapters merged, reusing the tensors of `snapshot`. All ranks call it.

        Return the function that writes `hf/` into a checkpoint and returns where its tensors are stored; rank 0's
        alone writes.
        """
        full = self._full_weights(actor, snapshot, ranks)
        if ranks.rank:
            return lambda directory: {}
        self._hf = self._hf or HfDirectory.from_model(actor.model)
        return partial(self._hf.write, name=HF, weights=full)

    def _full_weights(self, actor: Policy, snapshot: LearnerSnapshot, ranks: RankGroup) -> Mapping[str, Tensor]:
        is_full = (
            isinstance(actor.strategy, ReplicatedStrategy) if isinstance(actor, ActorLearner) else snapshot.gathered
        )
        if is_full and MODEL_STEM in snapshot.shards and not has_lora(actor.model):
            return snapshot.full_weights
        full: dict[str, Tensor] = {}
        for name, tensor in actor.weights():
            if ranks.rank == 0:
                full |= self.memory.copy({name: tensor}, HF)
        return full


def _reference_weights(reference: PolicyScorer) -> dict[str, Tensor]:
    """Return the weights to save: the adapters alone if the reference shares the policy's other weights."""
    return (
        reference.state_dict()
        if isinstance(reference, ReferenceSnapshot)
        else model_state_dict(reference.strategy.module)
    )


def _adapter_files(source: SnapshotSource) -> dict[str, bytes]:
    """Return the adapters in the format of peft; they are small enough to be copied at once."""
    if not has_lora(source.actor.model):
        return {}
    adapters = dict(source.actor.adapters())
    if source.ranks.rank:
        return {}
    return capture_files(
        lambda directory: save_adapters(source.actor.model, directory, source.base.absolute(), adapters.items())
    )


def link_as_verl(checkpoint: Path) -> None:
    """Link `actor/huggingface` to `hf`."""
    (checkpoint / ACTOR).mkdir(exist_ok=True)
    os.symlink(f"../{HF}", checkpoint / ACTOR / VERL_LINK)


def contents_to_load(checkpoint: Checkpoint, requested: Collection[str] | None) -> tuple[str, ...]:
    """Return the contents to load from a checkpoint: those requested, or all that it has, with the weights in `hf/`
    only if it has no others.

    Raises:
        ConfigError: a requested content is not in the checkpoint.
    """
    # checkpoints of earlier versions have all contents, and do not list them
    entries = checkpoint.entry("contents", list, [*CheckpointConfig.model_fields["contents"].default])
    saved = [name for name in entries if isinstance(name, str)]
    available = tuple(dict.fromkeys((*saved, HF_MODEL)))
    if requested is None:
        return tuple(saved) if MODEL_STEM in saved else available
    for content in requested:
        if content not in available:
            raise ConfigError(
                f"checkpoint.load_contents names {content}, but {checkpoint.directory} has only {', '.join(available)}",
                key="checkpoint.load_contents",
                value=list(requested),
                hint=f"remove {content} from it, or use a checkpoint that was saved with it",
            )
    return tuple(requested)


def restore_adapters(actor: ActorLearner, directory: Path, contents: Collection[str]) -> None:
    """Restore a model that is fine-tuned with LoRA from its adapters, since merging them rounds the weights.

    Raises:
        MachineError: only the merged weights are requested.
    """
    if MODEL_STEM not in contents and HF_MODEL in contents:
        raise _only_merged_weights(directory)
    if MODEL_STEM in contents:
        with actor.on_device():
            actor.strategy.load_weights(read_adapters(actor.strategy.full_weights(), directory / ADAPTER_DIRECTORY))
    restore_learner(actor, directory, ACTOR, [content for content in contents if content != MODEL_STEM])


def restore_learner_state(learner: object, directory: Path, name: str, contents: Collection[str]) -> None:
    """Restore the learner called `name` from the checkpoint at `directory`. All ranks call it.

    Raises:
        MachineError: the checkpoint has no such learner, or that of another model.
    """
    if isinstance(learner, ActorLearner | CriticLearner):
        restore_learner(learner, directory, name, contents)
    else:
        restore_full_state(learner, directory, name, contents)


def restore_critic(critic: Critic, directory: Path, contents: Collection[str]) -> None:
    """Restore the critic: its weights if those of the actor are restored; raises as `restore_learner_state` does."""
    restore_learner_state(critic, directory, CRITIC, {*contents, MODEL_STEM} if has_weights(contents) else contents)


def has_weights(contents: Collection[str]) -> bool:
    """Return whether contents of a checkpoint include weights."""
    return MODEL_STEM in contents or HF_MODEL in contents


def restore_reference(reference: LogProbScorer, directory: Path) -> None:
    """Restore the reference if the checkpoint has one."""
    stored = ShardReader.open(directory, f"{REFERENCE}/{MODEL_STEM}")
    if stored is None:
        return
    if not isinstance(reference, PolicyScorer):
        restore_weights(reference, directory, REFERENCE)
    elif isinstance(reference, ReferenceSnapshot):
        state = {name: torch.empty(stored.shape(name), dtype=stored.dtype(name)) for name in stored.names}
        stored.load_into(state)
        reference.load_state_dict(state)
    else:
        with reference.on_device():
            load_model_state_dict(reference.strategy.module, stored)


def _only_merged_weights(checkpoint: Path) -> MachineError:
    return MachineError(
        f"{checkpoint / HF} has the adapters merged into the weights, and training continues from separate adapters",
        "add model to checkpoint.load_contents; a checkpoint that was saved without it cannot be continued",
    )


def restore_actor(actor: Actor, directory: Path, contents: Collection[str], *, trust_remote_code: bool = False) -> None:
    """Restore the policy and its optimizer, as far as `contents` names them.

    Raises:
        MachineError: the checkpoint does not have them, or has those of another model.
    """
    restore_learner_state(actor, directory, ACTOR, contents)
    if MODEL_STEM in contents or HF_MODEL not in contents:
        return
    if not isinstance(actor, ActorLearner):
        restore_from_directory(actor, directory / HF)
        return
    if has_lora(actor.model):
        raise _only_merged_weights(directory)
    saved = load_model(directory / HF, trust_remote_code=trust_remote_code)
    with actor.on_device():
        actor.strategy.load_weights(saved.named_parameters())
