"""Megatron's learners as parts of a run: opened in place of the plain ones, and stored as they are.

Whatever its ranks have of a tensor, a checkpoint holds it whole and under its Hugging Face name, as the plain
learners' checkpoints do: any backend goes on from any other's.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from quintet.config.backends import backend_faults
from quintet.config.compose import Composed
from quintet.config.faults import raise_faults
from quintet.config.native.megatron import ConversionConfig, MegatronConfig
from quintet.errors import MachineError
from quintet.runtime.stored_types import with_types
from quintet.training.learner_files import MODEL, OPTIMIZER, LearnerCopies
from quintet.training.pieces import Held, Stored
from quintet.training.ranks import Ranks
from quintet.training.snapshot import HostMemory

if TYPE_CHECKING:
    from quintet.config.native import Experiment
    from quintet.config.native.learners import LearnerConfig, OptimizerConfig
    from quintet.training.handles import Critic, Judge, OwnActor

__all__ = [
    "Gathering",
    "Share",
    "Weighing",
    "copy_gathered",
    "copy_weights",
    "is_megatron",
    "open_megatron_policy",
    "open_megatron_reference",
    "open_megatron_values",
    "restore_from_directory",
    "restore_gathered",
    "restore_weights",
]

CRITIC = "critic"
CRITIC_NAMES = {"model.": "body.", "value_head.": "head."}
"""How a critic's tensors begin as Megatron's learner gives them, and how in a checkpoint."""
HUGGING_FACE_NAMES = {theirs: ours for ours, theirs in CRITIC_NAMES.items()}


def _changed(name: str, table: Mapping[str, str]) -> str:
    begin = next((begin for begin in table if name.startswith(begin)), None)
    return name if begin is None else table[begin] + name.removeprefix(begin)


class Weighing(Protocol):
    """Something of which full tensors can be had, and put back, under Hugging Face names; all ranks call it."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other, the same on all ranks."""
        ...

    def load_weights(self, given: Mapping[str, Tensor]) -> None:
        """Raises KeyError where one is missing, RuntimeError where one has another shape."""
        ...


class Gathering(Weighing, Protocol):
    """The same with an optimizer."""

    def state(self) -> dict[str, Tensor]:
        """As `<parameter>.<field>`."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        ...

    def loss_scale(self) -> dict[str, float]:
        """Of float16; empty for other types."""
        ...

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        """Put back what `loss_scale` gave."""
        ...


def is_megatron(own: LearnerConfig) -> bool:
    """Whether Megatron is to hold it."""
    return own.backend == "megatron"


def open_megatron_policy(
    config: Experiment, policy: Path, optimizer: OptimizerConfig, *, tuned: bool = False
) -> OwnActor:
    """The actor of the policy at that directory, on all ranks; `tuned` is that of supervised fine-tuning, after which
    the policy is the stage's and no longer what `actor.megatron` starts from.

    Raises:
        ConfigError: megatron-core isn't installed, or can't do what is asked for.
    """
    from quintet.training.megatron.opening import open_megatron_actor

    raise_faults(backend_faults(Composed(config, {})))
    begun = config if tuned or config.sft is None else _from_the_stage(config)
    with _quiet():
        # a reference that it learns from is one of Megatron's own, which is seen to before a run
        return cast("OwnActor", open_megatron_actor(with_types(begun), policy, optimizer))


def _from_the_stage(config: Experiment) -> Experiment:
    options = config.actor.megatron or MegatronConfig()
    started = options.model_copy(update={"checkpoint": None, "conversion": ConversionConfig()})
    return config.model_copy(update={"actor": config.actor.model_copy(update={"megatron": started})})


def open_megatron_values(config: Experiment, weights: Iterable[tuple[str, Tensor]], policy: Path) -> Critic:
    """A critic grown from the model that the configuration names, or else from those weights of the policy, which
    began as the model at `policy`."""
    from quintet.training.megatron.opening import open_megatron_critic

    path, config = config.critic.path, with_types(config)
    with _quiet():
        return open_megatron_critic(config, Path(path)) if path else open_megatron_critic(config, policy, dict(weights))


def open_megatron_reference(config: Experiment, weights: Iterable[tuple[str, Tensor]], policy: Path) -> Judge:
    """The model that the configuration names, or else those weights of the policy, which began as the model at
    `policy`."""
    from quintet.training.megatron import opening

    path = config.reference.path
    with _quiet():
        judge = opening.open_megatron_reference(with_types(config), Path(path or policy))
    if path is None:
        judge.load_weights(dict(weights))
    return cast("Judge", judge)  # only Megatron's learners view it, in their own way


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron warns of Apex, and of its own defaults, at each model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        yield


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the tensors, that all ranks get, this one writes."""

    ranks: Ranks
    each: bool = False
    """Every rank writes as many; without it the first writes all."""

    @classmethod
    def of(cls, config: Experiment, ranks: Ranks) -> Share:
        """As `use_dist_ckpt` of the actor has it."""
        options = config.actor.megatron
        return cls(ranks, options is not None and options.use_dist_ckpt)

    def has(self, number: int) -> bool:
        """Whether the tensor of that number is this rank's."""
        return number % (self.ranks.size if self.each else 1) == self.ranks.rank

    def copies(
        self, name: str, tensors: Mapping[str, Iterable[tuple[str, Tensor]]], memory: HostMemory
    ) -> LearnerCopies:
        """In main memory, one tensor after the other; of the stem that a file's name has."""
        parts = {stem: self._held(given, f"{name}/{stem}", memory) for stem, given in tensors.items()}
        return LearnerCopies(name, self.ranks, parts, gathered=not self.each)

    def _held(self, tensors: Iterable[tuple[str, Tensor]], place: str, memory: HostMemory) -> list[Held]:
        held = []
        for number, (own, tensor) in enumerate(tensors):
            if self.has(number):
                name = _changed(own, CRITIC_NAMES) if place.startswith(CRITIC) else own
                copied = memory.copy({name: tensor}, place)[name]
                held.append(Held(name, tuple(tensor.shape), (0,) * tensor.dim(), copied))
        return held


def copy_gathered(
    learner: object, name: str, contents: Collection[str], memory: HostMemory, share: Share
) -> LearnerCopies:
    """Weights and optimizer, as far as `contents` names them, as they are now. All ranks call it."""
    own, found = cast("Gathering", learner), {}
    if MODEL in contents:
        found[MODEL] = own.weights()
    if "optimizer" in contents:
        found[OPTIMIZER] = iter(own.state().items())
    return share.copies(name, found, memory)


def copy_weights(judge: object, name: str, memory: HostMemory, share: Share) -> LearnerCopies:
    """The same of what doesn't learn."""
    return share.copies(name, {MODEL: cast("Weighing", judge).weights()}, memory)


def restore_gathered(learner: object, checkpoint: Path, name: str, contents: Collection[str]) -> None:
    """Take up what any backend's learner had stored, as far as `contents` names it; all ranks call it.

    Raises:
        MachineError: it isn't there, or it is that of another model.
    """
    own = cast("Gathering", learner)
    if MODEL in contents:
        restore_weights(own, checkpoint, name)
    if "optimizer" in contents:
        state = _read(checkpoint, f"{name}/{OPTIMIZER}")
        with _of_this_model(checkpoint):
            own.load_state(state)


def restore_weights(holder: object, checkpoint: Path, name: str) -> None:
    """The weights alone; raises as `restore_gathered` does."""
    given = _read(checkpoint, f"{name}/{MODEL}")
    with _of_this_model(checkpoint):
        cast("Weighing", holder).load_weights(given)


def restore_from_directory(holder: object, directory: Path) -> None:
    """Weights of a Hugging Face directory; raises as `restore_gathered` does."""
    from quintet.training.megatron.stored import StoredWeights

    with _of_this_model(directory):
        cast("Weighing", holder).load_weights(StoredWeights(directory))


def _read(checkpoint: Path, stem: str) -> dict[str, Tensor]:
    stored = Stored.at(checkpoint, stem)
    if stored is None:
        raise MachineError(f"{checkpoint} has no {stem}", "checkpoint.load_contents says what is read")
    state = {name: torch.empty(stored.shape(name), dtype=stored.dtype(name)) for name in stored.names}
    stored.load_into(state)
    return {_changed(name, HUGGING_FACE_NAMES): tensor for name, tensor in state.items()}


@contextmanager
def _of_this_model(place: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, RuntimeError) as error:
        raise MachineError(f"{place} is of another model: {error}", "it was made with another model") from error
