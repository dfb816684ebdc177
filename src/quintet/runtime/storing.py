"""What a checkpoint holds of learners and judges, and how they take it up."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.errors import ConfigError, MachineError
from quintet.policies.adapters import ADAPTER_DIRECTORY, base_of, has_lora, read_adapters, save_adapters
from quintet.policies.causal_lm import load_model
from quintet.runtime.megatron import (
    Share,
    copy_gathered,
    copy_weights,
    restore_from_directory,
    restore_gathered,
    restore_weights,
)
from quintet.training.checkpoint import Checkpoint
from quintet.training.handles import Actor, Judge
from quintet.training.hf_directory import HfDirectory, files_of, put_files
from quintet.training.kept import KeptPolicy
from quintet.training.lay import Whole
from quintet.training.learner import ActorLearner, CriticLearner, Scorer
from quintet.training.learner_files import MODEL, LearnerCopies, copy_learner, copy_tensors, restore_learner
from quintet.training.pieces import Place, Stored
from quintet.training.ranks import Ranks
from quintet.training.saving import Write
from quintet.training.sharded_state import is_flat, load_weights, weights
from quintet.training.snapshot import HostMemory

if TYPE_CHECKING:
    from quintet.runtime.learners import Learners

__all__ = ["ACTOR", "HF", "Storing", "contents_to_load", "link_as_verl", "restore", "restore_actor"]

HF, ACTOR, CRITIC, REFERENCE = "hf", "actor", "critic", "reference"
HF_MODEL = "hf_model"
"""That content's name."""
VERL_LINK = "huggingface"
"""Where verl has the model in its own format, in `actor`."""
ALONE = Ranks()


class Storing:
    """Copies of learners, again and again into the same memory."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._hf: HfDirectory | None = None

    def copies(self, learners: Learners) -> Write:
        """Everything of the learners that a checkpoint is to hold, as it is now; gives what writes it. Every rank
        calls it."""
        ranks, contents = learners.ranks, learners.experiment.checkpoint.contents
        share = Share.of(learners.experiment, ranks)
        # what a fine-tuned model was before its adapters lies where it came from
        apart = learners.tuned and has_lora(learners.actor.model)
        own = [content for content in contents if content != MODEL or not apart]
        actor = self._learner(learners.actor, ACTOR, own, share)
        held = [actor]
        # critic and reference have no form like `hf/`, from which they could come instead
        if learners.critic is not None:
            held.append(self._learner(learners.critic, CRITIC, {*contents, MODEL}, share))
        if learners.reference is not None and learners.experiment.reference.path is None:
            held.append(self._reference(learners.reference, share))
        model = self.model(learners.actor, actor, ranks)
        adapters = _adapter_files(learners) if MODEL in contents or not apart else {}

        def write(directory: Path) -> None:
            there = model(directory)
            for copies in held:
                copies.write(directory, there)
            put_files(directory / ADAPTER_DIRECTORY, adapters)
            if HF_MODEL in contents and ranks.rank == 0:
                link_as_verl(directory)

        return write

    def _learner(self, learner: object, name: str, contents: Collection[str], share: Share) -> LearnerCopies:
        if isinstance(learner, ActorLearner | CriticLearner):
            return copy_learner(learner, name, contents, self.memory, share.ranks)
        return copy_gathered(learner, name, contents, self.memory, share)

    def _reference(self, reference: Judge, share: Share) -> LearnerCopies:
        if isinstance(reference, Scorer):
            with reference.at_hand() if is_flat(reference.lay.module) else nullcontext():
                return copy_tensors({str(MODEL): _kept(reference)}, REFERENCE, self.memory, share.ranks)
        return copy_weights(reference, REFERENCE, self.memory, share)

    def model(self, actor: Actor, held: LearnerCopies, ranks: Ranks = ALONE) -> Callable[[Path], dict[int, Place]]:
        """The policy as it is now, adapters merged, of which some copies are `held` already; gives what writes `hf/`
        into a checkpoint and says where tensors lie there. Every rank calls it, and the first writes."""
        full = self._full_weights(actor, held, ranks)
        if ranks.rank:
            return lambda directory: {}
        self._hf = self._hf or HfDirectory.of(actor.model)
        return partial(self._hf.write, name=HF, weights=full)

    def _full_weights(self, actor: Actor, held: LearnerCopies, ranks: Ranks) -> Mapping[str, Tensor]:
        """In main memory; those that were copied already aren't copied again."""
        whole = isinstance(actor.lay, Whole) if isinstance(actor, ActorLearner) else held.gathered
        if whole and MODEL in held.parts and not has_lora(actor.model):
            return held.whole
        full: dict[str, Tensor] = {}
        for name, tensor in actor.weights():
            if ranks.rank == 0:
                full |= self.memory.copy({name: tensor}, HF)
        return full


def _kept(reference: Scorer) -> dict[str, Tensor]:
    """What the reference judges by: its adapters where it has the policy's other weights."""
    return reference.state() if isinstance(reference, KeptPolicy) else weights(reference.lay.module)


def _adapter_files(learners: Learners) -> dict[str, bytes]:
    """As peft stores adapters; small, so that they are made at once."""
    if not has_lora(learners.actor.model):
        return {}
    adapters = dict(learners.actor.adapters())
    if learners.ranks.rank:
        return {}
    base = (learners.base or learners.policy).absolute()
    return files_of(lambda place: save_adapters(learners.actor.model, place, base, adapters.items()))


def link_as_verl(checkpoint: Path) -> None:
    """`actor/huggingface` is `hf`."""
    (checkpoint / ACTOR).mkdir(exist_ok=True)
    os.symlink(f"../{HF}", checkpoint / ACTOR / VERL_LINK)


def contents_to_load(checkpoint: Checkpoint, asked: Collection[str] | None) -> tuple[str, ...]:
    """What is taken from a checkpoint: what is asked for, else all that it holds, weights from `hf/` where there are
    no others.

    Raises:
        ConfigError: it doesn't hold what is asked for.
    """
    saved = checkpoint.state["contents"]
    there = tuple(dict.fromkeys((*saved, HF_MODEL)))
    if asked is None:
        return tuple(saved) if MODEL in saved else there
    for content in asked:
        if content not in there:
            told = f"checkpoint.load_contents asks for {content}, but {checkpoint.directory} holds {', '.join(there)}"
            hint = "leave it out, or take a checkpoint that was saved with it"
            raise ConfigError(told, key="checkpoint.load_contents", value=list(asked), hint=hint)
    return tuple(asked)


def restore(learners: Learners, directory: Path, contents: Collection[str]) -> None:
    """Give learners and reference what the checkpoint in that directory holds of them, as far as `contents` names it.
    Every rank calls it.

    Raises:
        MachineError: it isn't there, or it is that of another model.
    """
    config = learners.experiment
    actor, trusted = learners.actor, config.policy.trust_remote_code
    if learners.tuned and isinstance(actor, ActorLearner) and has_lora(actor.model):
        _restore_adapters(actor, directory, contents)
        return
    restore_actor(actor, directory, contents, trust_remote_code=trusted)
    if learners.tuned:
        return
    if MODEL in contents and has_lora(actor.model):
        learners.base = base_of(directory / ADAPTER_DIRECTORY)
    weights = MODEL in contents or HF_MODEL in contents
    if config.needs_critic:
        beside = {*contents, MODEL} if weights else contents
        _restore_learner(learners.grow_critic(), directory, CRITIC, beside)
    if config.needs_reference:
        reference, stored = learners.keep_reference(), Stored.at(directory, f"{REFERENCE}/{MODEL}")
        if stored is not None and weights:
            _put_back(reference, stored, directory)


def _restore_adapters(actor: ActorLearner, directory: Path, contents: Collection[str]) -> None:
    """Of a model that is fine-tuned with LoRA the adapters alone, since merged weights are rounded.

    Raises:
        MachineError: the merged ones alone are asked for.
    """
    if MODEL not in contents and HF_MODEL in contents:
        raise _merged_alone(directory)
    if MODEL in contents:
        with actor.at_hand():
            actor.lay.load(read_adapters(actor.lay.weights(), directory / ADAPTER_DIRECTORY))
    restore_learner(actor, directory, ACTOR, [content for content in contents if content != MODEL])


def _restore_learner(learner: object, directory: Path, name: str, contents: Collection[str]) -> None:
    if isinstance(learner, ActorLearner | CriticLearner):
        restore_learner(learner, directory, name, contents)
    else:
        restore_gathered(learner, directory, name, contents)


def _put_back(reference: Judge, stored: Stored, directory: Path) -> None:
    if not isinstance(reference, Scorer):
        restore_weights(reference, directory, REFERENCE)
    elif isinstance(reference, KeptPolicy):
        state = {name: torch.empty(stored.shape(name), dtype=stored.dtype(name)) for name in stored.names}
        stored.load_into(state)
        reference.load_state(state)
    else:
        with reference.at_hand():
            load_weights(reference.lay.module, stored)


def _merged_alone(checkpoint: Path) -> MachineError:
    return MachineError(
        f"{checkpoint / HF} has the adapters merged, and none by themselves to go on with",
        "name model in checkpoint.load_contents; a checkpoint that was saved without it can't be gone on from",
    )


def restore_actor(actor: Actor, directory: Path, contents: Collection[str], *, trust_remote_code: bool = False) -> None:
    """The policy and its optimizer, as far as `contents` names them.

    Raises:
        MachineError: they aren't there, or are those of another model.
    """
    _restore_learner(actor, directory, ACTOR, contents)
    if MODEL not in contents and HF_MODEL in contents:
        if not isinstance(actor, ActorLearner):
            restore_from_directory(actor, directory / HF)
            return
        if has_lora(actor.model):
            raise _merged_alone(directory)
        saved = load_model(directory / HF, trust_remote_code=trust_remote_code)
        with actor.at_hand():
            actor.lay.load(saved.named_parameters())
