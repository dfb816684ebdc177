"""Learners on Megatron behind what a run knows of learners: how they are opened, grown, kept, stored and taken up."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.config.native import Experiment, OptimizerConfig
from quintet.errors import ConfigError, MachineError
from quintet.rollout.agent_loop import derive_seed
from quintet.runtime.learners import Learners
from quintet.runtime.memory import keep_freed_memory
from quintet.runtime.stored_types import with_types
from quintet.runtime.storing import ACTOR, CRITIC, HF, REFERENCE, Storing, link_as_verl
from quintet.training.learner_files import MODEL, OPTIMIZER, copy_tensors
from quintet.training.megatron.opening import (
    open_megatron_actor,
    open_megatron_critic,
    open_megatron_reference,
)
from quintet.training.megatron.stored import StoredWeights
from quintet.training.pieces import Stored
from quintet.training.ranks import Ranks
from quintet.training.saving import Write

if TYPE_CHECKING:
    from quintet.config.native.learners import MemoryConfig
    from quintet.training.megatron.learner import MegatronActor, MegatronCritic

__all__ = ["MegatronLearners"]

ALONE = Ranks()
logger = logging.getLogger(__name__)
CRITIC_NAMES = {"model.": "body.", "value_head.": "head."}
"""How tensors of a critic begin as Megatron's learner gives them, and as `ValueModel` does, under whose names they are
stored."""


class MegatronLearners(Learners):
    """Actor, critic and reference on Megatron, in each rank its part of them. All ranks call the same methods in the
    same order."""

    @classmethod
    def open(cls, config: Experiment, policy: Path, ranks: Ranks = ALONE) -> Learners:
        """See `Learners.open`.

        Raises:
            ConfigError: Megatron's learner can't do what is asked for; the message says why.
        """
        config = with_types(config)
        _refuse_unable(config)
        keep_freed_memory()
        torch.set_num_threads(config.training.threads or torch.get_num_threads())
        torch.manual_seed(derive_seed(config.seed, "torch"))
        actor: Any = open_megatron_actor(config, policy)
        opened = cls(config, policy, ranks, actor)
        opened.storing = _Storing()
        return opened

    @property
    def whole(self) -> bool:
        """See `Learners.whole`."""
        return False

    def actor_with(self, optimizer: OptimizerConfig) -> Any:
        """See `Learners.actor_with`."""
        return self.actor.under(optimizer)

    def grow_critic(self) -> Any:
        """See `Learners.grow_critic`."""
        path = self.experiment.critic.path
        weights = None if path else {name: tensor.clone() for name, tensor in self.actor.weights()}
        critic: Any = open_megatron_critic(
            _typed(self.experiment, "critic"), Path(path) if path else self.policy, weights
        )
        self.critic = critic
        return critic

    def keep_reference(self) -> Any:
        """See `Learners.keep_reference`."""
        path = self.experiment.reference.path
        if path is None or self.reference is None:
            reference: Any = open_megatron_reference(
                _typed(self.experiment, "reference"), Path(path) if path else self.policy
            )
            if path is None:
                reference.load_weights({name: tensor.clone() for name, tensor in self.actor.weights()})
            self.reference = reference
        return self.reference

    def extra(self) -> dict[str, Any]:
        """See `Learners.extra`."""
        actor: Any = self.actor
        return {"actor_scale": scale} if (scale := actor.loss_scale()) else {}

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """See `Learners.load`."""
        actor: Any = self.actor
        _restore(actor, directory, ACTOR, contents)
        if MODEL not in contents and "hf_model" in contents:
            actor.load_weights(StoredWeights(directory / HF))
        if self.experiment.needs_critic:
            _restore(self.grow_critic(), directory, CRITIC, contents)
        if self.experiment.needs_reference:
            reference, stored = self.keep_reference(), Stored.at(directory, f"{REFERENCE}/{MODEL}")
            if stored is not None and MODEL in contents:
                reference.load_weights(_tensors(stored))
        if "actor_scale" in extra:
            actor.load_loss_scale(extra["actor_scale"])


class _Storing(Storing):
    """Copies of Megatron's learners: whole tensors under the names that transformers gives them, so that any other
    learner takes them up."""

    def copies(self, learners: Learners) -> Write:
        """See `Storing.copies`."""
        ranks, contents, actor = learners.ranks, learners.experiment.checkpoint.contents, learners.actor
        held = [self._copy(actor, ACTOR, learners)]
        if learners.critic is not None:
            held.append(self._copy(learners.critic, CRITIC, learners))
        if MODEL in contents and learners.reference is not None and learners.experiment.reference.path is None:
            reference: Any = learners.reference
            own = {str(MODEL): self._share(reference.weights(), learners)}
            held.append(copy_tensors(own, REFERENCE, self.memory, ranks))
        model = self.model(actor, held[0], ranks)

        def write(directory: Path) -> None:
            there = model(directory)
            for copies in held:
                copies.write(directory, there)
            if "hf_model" in contents and ranks.rank == 0:
                link_as_verl(directory)

        return write

    def _copy(self, learner: Any, name: str, learners: Learners) -> Any:
        contents = learners.experiment.checkpoint.contents
        found: dict[str, Mapping[str, Tensor]] = {}
        names = CRITIC_NAMES if name == CRITIC else {}
        if MODEL in contents:
            found[MODEL] = self._share(_renamed(learner.weights(), names), learners)
        if "optimizer" in contents:
            found[OPTIMIZER] = self._share(_renamed(learner.state().items(), names), learners)
        return copy_tensors(found, name, self.memory, learners.ranks)

    def _share(self, tensors: Iterable[tuple[str, Tensor]], learners: Learners) -> dict[str, Tensor]:
        """What this rank writes of them: the first rank all, or with `use_dist_ckpt` each as many."""
        options, ranks = learners.experiment.actor.megatron, learners.ranks
        each = ranks.size if options is not None and options.use_dist_ckpt else 1
        share: dict[str, Tensor] = {}
        for number, (name, tensor) in enumerate(tensors):
            if number % each == ranks.rank:
                share[name] = tensor.contiguous().clone()
        return share


def _restore(learner: MegatronActor | MegatronCritic, directory: Path, name: str, contents: Collection[str]) -> None:
    """Take up what was stored of a learner, by this one or another."""
    for content, stem in (("model", MODEL), ("optimizer", OPTIMIZER)):
        if content not in contents:
            continue
        stored = Stored.at(directory, f"{name}/{stem}")
        if stored is None:
            raise MachineError(f"{directory} has no {name}/{stem}", "checkpoint.load_contents says what is read")
        names = {ours: theirs for theirs, ours in CRITIC_NAMES.items()} if name == CRITIC else {}
        tensors = dict(_renamed(_tensors(stored).items(), names))
        if stem == MODEL:
            learner.load_weights(tensors)
        else:
            learner.load_state(tensors)


def _renamed(tensors: Iterable[tuple[str, Tensor]], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        begin = next((one for one in names if name.startswith(one)), None)
        yield (name if begin is None else f"{names[begin]}{name.removeprefix(begin)}"), tensor


def _tensors(stored: Stored) -> dict[str, Tensor]:
    tensors = {name: torch.empty(stored.shape(name), dtype=stored.dtype(name)) for name in stored.names}
    stored.load_into(tensors)
    return tensors


def _typed(config: Experiment, name: str) -> Experiment:
    """The same with the type of that learner for its model, where it has one of its own."""
    own = getattr(config, name).dtype
    return (
        config if own is None else config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": own})})
    )


def _refuse_unable(config: Experiment) -> None:
    """Raises `ConfigError` for what goes with the other backends alone."""
    if config.policy.attention not in (None, "sdpa"):
        _refuse("policy.attention", "Megatron's attention is torch's here", "policy.attention=null, or sdpa")
    for name in ("actor", "critic", "reference"):
        _refuse_memory(name, getattr(config, name).memory)
    if config.policy.lora is not None:
        _refuse("policy.lora", "adapters aren't there under Megatron", "actor.backend=fsdp2, or policy.lora=null")
    if config.needs_critic and config.critic.backend != "megatron":
        _refuse("critic.backend", "the critic of a Megatron actor is on Megatron, too", "critic.backend=megatron")
    if config.actor.parallel.context > 1:
        _refuse(
            "actor.parallel.context",
            "Megatron shares out the tokens of a sequence by Transformer Engine's attention, which isn't used here",
            "actor.backend=fsdp2 shares them out",
        )


def _refuse_memory(name: str, memory: MemoryConfig) -> None:
    """What saves memory in the other learners: on a CPU there is nowhere to move to, which is said."""
    for option in ("liger", "offload_activations", "sharded_offload"):
        if getattr(memory, option):
            _refuse(f"{name}.memory.{option}", "a Megatron learner has none", "set it to false, or take backend=fsdp2")
    for option in ("offload_parameters", "offload_optimizer"):
        if getattr(memory, option) and torch.cuda.is_available():
            hint = "set it to false, or take backend=fsdp2"
            _refuse(f"{name}.memory.{option}", "what a Megatron learner has stays on its GPU", hint)
        if getattr(memory, option):
            logger.info("%s.memory.%s: they are in main memory already", name, option)
    if memory.torch_compile:
        logger.info("%s.memory.torch_compile: Megatron's own functions compute log-probs", name)


def _refuse(key: str, reason: str, hint: str) -> None:
    raise ConfigError(f"{key}: {reason}", key=key, hint=hint)
