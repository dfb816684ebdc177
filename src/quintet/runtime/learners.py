"""Learners from a configuration: what learns, what judges, and how their weights lie."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from quintet.config.layouts import refuse_layout
from quintet.config.native import Experiment, OptimizerConfig, SftConfig
from quintet.config.native.learners import MemoryConfig
from quintet.kernels.build import compiler
from quintet.policies.adapters import add_lora, has_lora, merge
from quintet.policies.attention_kernels import use_attention
from quintet.policies.causal_lm import (
    PolicyModule,
    ValueModel,
    cast_weights,
    compiled_measures,
    keep_activations,
    load_model,
    recompute_activations,
)
from quintet.policies.liger import use_liger
from quintet.policies.routers import freeze_routers
from quintet.rollout.agent_loop import derive_seed
from quintet.runtime.device import compute_device
from quintet.runtime.engines import policy_dtype
from quintet.runtime.megatron import (
    Gathering,
    is_megatron,
    open_megatron_policy,
    open_megatron_reference,
    open_megatron_values,
)
from quintet.runtime.memory import keep_freed_memory
from quintet.runtime.stored_types import with_types
from quintet.runtime.storing import Storing, restore
from quintet.training.handles import Critic, Judge, OwnActor
from quintet.training.kept import KeptPolicy
from quintet.training.lay import TYPES, Lay, Whole, take_weights
from quintet.training.learner import ActorLearner, CriticLearner, Scorer
from quintet.training.mesh import Mesh
from quintet.training.offload import Offload, keeping_activations
from quintet.training.packing import Budget
from quintet.training.ranks import Ranks
from quintet.training.saving import PartSaver, Write
from quintet.training.scaling import LossScale

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quintet.config.native.learners import LearnerConfig

__all__ = ["Learners", "open_actor", "open_critic", "open_reference", "open_tuned_actor"]

ALONE = Ranks()
logger = logging.getLogger(__name__)


def _spread(config: Experiment, name: str, ranks: Ranks) -> Mesh:
    """The ranks as the learner called `name` shares itself out over them.

    Raises:
        ConfigError: it can't be.
    """
    own: LearnerConfig = getattr(config, name)
    refuse_layout(config, name, ranks.size, on_gpu=compute_device().type != "cpu")
    return Mesh.over(ranks, own.parallel, own.sharding.group_size, compute_device().type)


def _lay(config: Experiment, name: str, module: PolicyModule | ValueModel, mesh: Mesh) -> Lay:
    """How the weights of the learner called `name` lie, after layers and tokens are shared out, with what saves memory
    in its passes; on the device of this process. torch's sharding is loaded where there is something to shard."""
    own: LearnerConfig = getattr(config, name)
    module.to(compute_device())
    _save_memory(module, own.memory, name)
    use_attention(module, config.policy.attention)
    if mesh.devices is None:
        return Whole.of(module, own.sharding)
    from quintet.training.sharding import lay_out
    from quintet.training.splitting import share_out

    shared = share_out(module, mesh, own, name, _dtype(config, name))
    return lay_out(module, own.backend, mesh, own.sharding, own.memory, _own_dtype(config, name), shared)


def _save_memory(module: PolicyModule | ValueModel, memory: MemoryConfig, name: str) -> None:
    """Put what the configuration of the learner called `name` asks for around and into its passes.

    Raises:
        ConfigError: there are no such kernels here.
    """
    device = next(module.parameters()).device
    module.keeping = keeping_activations(memory, device, name)
    inner = module.policy if isinstance(module, PolicyModule) else module.body
    if memory.liger:
        use_liger(inner, f"{name}.memory.liger")
    if memory.pin and device.type == "cpu" and not torch.cuda.is_available():
        logger.info("%s.memory.pin: without CUDA there is nothing to pin memory for", name)
    if memory.torch_compile and isinstance(module, PolicyModule):
        if device.type == "cpu" and compiler() is None:
            logger.warning("%s.memory.torch_compile: no C++ compiler here, log-probs are computed as they are", name)
        else:
            module.measures = compiled_measures()


def _own_dtype(config: Experiment, name: str) -> torch.dtype:
    """The learner's own type, or the policy's."""
    named = getattr(with_types(config), name)
    own = getattr(named, "dtype", None)
    return TYPES[own] if own else policy_dtype(config)


def _dtype(config: Experiment, name: str) -> torch.dtype:
    """Type of matrix products under autocast, which has nothing wider than float32. A reference that is the policy as
    it was computes as that does, where it isn't told otherwise."""
    own = getattr(config, name)
    named = own.sharding.autocast or own.sharding.parameter_dtype
    if name == "reference" and named is None and own.dtype is None and own.path is None:
        return _dtype(config, "actor")
    return _own_dtype(config, name) if named is None else TYPES["float32" if named == "float64" else named]


def _plays(config: Experiment, lay: Lay) -> bool:
    """Whether the engine in this process plays with these very weights."""
    engine = config.rollout.engine_options.dtype or with_types(config).policy.dtype
    return config.rollout.engine == "hf" and isinstance(lay, Whole) and engine == "float32"


def _evenly(config: Experiment, mesh: Mesh) -> int:
    """Ranks that are to have as much to do."""
    return mesh.data.size if config.actor.balance_ranks else 1


def open_actor(
    config: Experiment,
    model: PreTrainedModel,
    optimizer: OptimizerConfig,
    temperature: float = 1.0,
    ranks: Ranks = ALONE,
) -> ActorLearner:
    """What trains that policy on those ranks, each of which brings the same weights; `temperature` divides its
    logits."""
    mesh = _spread(config, "actor", ranks)
    lay = _lay(config, "actor", PolicyModule(model), mesh)
    even = _evenly(config, mesh)
    return ActorLearner(
        model,
        optimizer,
        budget=Budget.of(config.actor.budget, config.training, even),
        inference_budget=Budget.of(config.actor.inference_budget, config.training, even),
        dtype=_dtype(config, "actor"),
        temperature=temperature,
        ranks=mesh.data,
        lay=lay,
        scale=LossScale.of(config.actor.sharding),
        offload=Offload.of(config.actor.memory, lay.module, "actor", played=_plays(config, lay)),
    )


def open_tuned_actor(config: Experiment, sft: SftConfig, model: PreTrainedModel, ranks: Ranks = ALONE) -> ActorLearner:
    """What fine-tunes that model, over the ranks as the actor is."""
    mesh = _spread(config, "actor", ranks)
    passes, even = sft.sequences_per_pass, _evenly(config, mesh)
    tokens = config.training.micro_batch_tokens if passes is None else None
    return ActorLearner(
        model,
        sft.optimizer,
        budget=Budget(tokens, passes, even),
        dtype=_dtype(config, "actor"),
        ranks=mesh.data,
        lay=_lay(config, "actor", PolicyModule(model), mesh),
        scale=LossScale.of(config.actor.sharding),
    )


def open_critic(config: Experiment, actor: OwnActor, policy: Path, ranks: Ranks = ALONE) -> CriticLearner:
    """A critic grown from the model that the configuration names, or from the policy as it is now, which began as the
    model at `policy`; adapters are merged, and all weights are trained."""
    path, trusted = config.critic.path, config.policy.trust_remote_code
    grown = load_model(path, trust_remote_code=trusted) if path else _plain(config, actor, policy)
    model, mesh = ValueModel(grown), _spread(config, "critic", ranks)
    if has_lora(model.body):
        merge(model.body)
    own = config.critic.gradient_checkpointing
    if config.actor.gradient_checkpointing if own is None else own:
        recompute_activations(model.body, "critic.gradient_checkpointing")
    else:
        keep_activations(model.body)
    lay = _lay(config, "critic", model, mesh)
    return CriticLearner(
        model,
        config.critic.optimizer,
        budget=Budget.of(config.critic.budget, config.training),
        inference_budget=Budget.of(config.critic.inference_budget, config.training),
        dtype=_dtype(config, "critic"),
        ranks=mesh.data,
        lay=lay,
        scale=LossScale.of(config.critic.sharding),
        offload=Offload.of(config.critic.memory, lay.module, "critic"),
    )


def open_reference(config: Experiment, actor: OwnActor, policy: Path, ranks: Ranks = ALONE) -> Scorer:
    """The model that the configuration names, or the policy as it is now, which stays as it is; the policy began as
    the model at `policy`. Where adapters alone are trained, it is the policy's own model with those of now, unless it
    is to have another type."""
    own, budget = config.reference, Budget.of(config.reference.inference_budget, config.training)
    if own.path is None and own.dtype is None and isinstance(actor, ActorLearner) and has_lora(actor.model):
        if own.memory != MemoryConfig():
            logger.warning("reference.memory: the reference has the policy's weights and moves as actor.memory says")
        return KeptPolicy(actor.scorer, budget)
    trusted = config.policy.trust_remote_code
    model = load_model(own.path, trust_remote_code=trusted) if own.path else _plain(config, actor, policy)
    if model is actor.model:
        model = copy.deepcopy(model)
    if own.dtype is not None:
        cast_weights(model, _own_dtype(config, "reference"))
    mesh = _spread(config, "reference", ranks)
    lay = _lay(config, "reference", PolicyModule(model.requires_grad_(requires_grad=False)), mesh)
    return Scorer(
        model,
        budget=budget,
        dtype=_dtype(config, "reference"),
        temperature=config.rollout.temperature,
        ranks=mesh.data,
        lay=lay,
        offload=Offload.of(own.memory, lay.module, "reference"),
    )


def _plain(config: Experiment, actor: OwnActor, policy: Path) -> PreTrainedModel:
    """The policy as it is now as a model of its own whose weights are whole; where they are so already, itself."""
    if isinstance(actor, ActorLearner) and isinstance(actor.lay, Whole):
        return actor.model
    trusted = config.policy.trust_remote_code
    model = load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides)
    take_weights(model, actor.weights())
    return model


@dataclass(slots=True)
class Learners:
    """What learns and what judges in this process. With several ranks each has one of these, and all of them call the
    same methods in the same order."""

    experiment: Experiment
    policy: Path
    """The model that the policy began as."""
    ranks: Ranks
    actor: OwnActor
    critic: Critic | None = None
    reference: Judge | None = None
    storing: Storing = field(default_factory=Storing)
    """Memory for copies of them, of which checkpoints are written."""
    parts: PartSaver | None = None
    base: Path | None = None
    """The model that its adapters belong to, where that isn't `policy`: a checkpoint's `hf/` has them in it already."""
    tuned: bool = False
    """They are those of supervised fine-tuning, which has neither critic nor reference."""

    @classmethod
    def open(cls, config: Experiment, policy: Path, ranks: Ranks = ALONE) -> Learners:
        """The actor of the policy at that directory, and settings of the process that its numbers depend on.

        Raises:
            MachineError: the directory isn't a model.
            ConfigError: Megatron isn't installed, or can't do what is asked for.
        """
        keep_freed_memory()
        torch.set_num_threads(config.training.threads or torch.get_num_threads())
        torch.manual_seed(derive_seed(config.seed, "torch"))
        if is_megatron(config.actor):
            return cls(config, policy, ranks, open_megatron_policy(config, policy, config.actor.optimizer))
        trusted = config.policy.trust_remote_code
        model = load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides)
        if config.policy.lora is not None:
            add_lora(model, config.policy.lora, seed=derive_seed(config.seed, "adapters"))
        if config.policy.freeze_router:
            freeze_routers(model)
        if config.actor.gradient_checkpointing:
            recompute_activations(model)
        actor = open_actor(config, model, config.actor.optimizer, config.rollout.temperature, ranks)
        return cls(config, policy, ranks, actor)

    @property
    def whole(self) -> bool:
        """Every rank has all of the policy's weights."""
        return isinstance(self.actor, ActorLearner) and isinstance(self.actor.lay, Whole)

    def actor_with(self, optimizer: OptimizerConfig) -> OwnActor:
        """The same policy under a fresh optimizer, scored as it is, whatever temperature play has."""
        return self.actor.under(optimizer)

    def grow_critic(self) -> Critic:
        """A critic from the policy as it is now."""
        config, policy = self.experiment, self.policy
        if is_megatron(config.critic):
            self.critic = open_megatron_values(config, self.actor.weights(), policy)
        else:
            self.critic = open_critic(config, self.actor, policy, self.ranks)
        return self.critic

    def keep_reference(self) -> Judge:
        """The policy as it is now becomes the reference, or the model that the configuration names does."""
        config, policy = self.experiment, self.policy
        if config.reference.path is not None and self.reference is not None:
            return self.reference
        if is_megatron(config.reference):
            self.reference = open_megatron_reference(config, self.actor.weights(), policy)
        else:
            self.reference = open_reference(config, self.actor, policy, self.ranks)
        return self.reference

    def save(self, directory: Path) -> Write:
        """Take copies of everything that a later run goes on from, as far as `checkpoint.contents` names it. What the
        first rank has to write into the checkpoint in that directory is given back; the others begin to write theirs,
        in the background."""
        write = self.storing.copies(self)
        if self.ranks.rank == 0:
            return write
        self.parts = self.parts or PartSaver(self.ranks.rank)
        self.parts.save(directory, write)
        return lambda place: None

    def extra(self) -> dict[str, Any]:
        """What besides tensors they go on by, for JSON: the same in all ranks."""
        scales = {name: _scale(learner) for name, learner in self._learning()}
        return {name: scale for name, scale in scales.items() if scale}

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """Take up what a checkpoint holds, as far as `contents` names it, and what `extra` gave.

        Raises:
            MachineError: it is that of another model.
        """
        restore(self, directory, contents)
        for name, learner in self._learning():
            if name in extra:
                _load_scale(learner, extra[name])

    def _learning(self) -> Iterator[tuple[str, object]]:
        """What learns, by the name of its loss scale."""
        yield "actor_scale", self.actor
        if self.critic is not None:
            yield "critic_scale", self.critic


def _scale(learner: object) -> dict[str, float]:
    """By what its losses are multiplied; empty where they aren't."""
    if isinstance(learner, ActorLearner | CriticLearner):
        return learner.scale.state() if learner.scale else {}
    return cast("Gathering", learner).loss_scale()


def _load_scale(learner: object, state: dict[str, float]) -> None:
    """Of another backend's learner, whose scale goes by other rules, nothing is taken."""
    if isinstance(learner, ActorLearner | CriticLearner):
        if learner.scale and "factor" in state:
            learner.scale.load(state)
    elif "scale" in state:
        cast("Gathering", learner).load_loss_scale(state)
