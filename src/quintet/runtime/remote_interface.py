"""Objects of a worker that the controller can call, and their methods, derived from their protocols."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from quintet.config.native.experiment import Experiment
from quintet.policies.reward_model import ResponseScorer
from quintet.runtime.groups import LearnerGroup
from quintet.training.protocols import Actor, Critic, DivergenceReference, LogProbScorer

WORKER: Final = "worker"
LEARNERS: Final = "learners"
ACTOR, WARM_START_ACTOR = f"{LEARNERS}.actor", f"{LEARNERS}.warm_start_actor"
CRITIC, REFERENCE = f"{LEARNERS}.critic", f"{LEARNERS}.reference"
REWARD_MODEL = f"{LEARNERS}.reward_model"


class LearnerBuilder(Protocol):
    """Interface of a worker itself."""

    def build_learners(self, config: Experiment, policy: Path, *, sft: bool = False) -> None:
        """Build the actor from the model at `policy`; with `sft` the learner of supervised fine-tuning."""


REMOTE_OBJECTS: Final[Mapping[str, type]] = {
    WORKER: LearnerBuilder,
    LEARNERS: LearnerGroup,
    ACTOR: Actor,
    f"{ACTOR}.scorer": LogProbScorer,
    WARM_START_ACTOR: Actor,
    f"{WARM_START_ACTOR}.scorer": LogProbScorer,
    CRITIC: Critic,
    REFERENCE: LogProbScorer,
    REWARD_MODEL: ResponseScorer,
}
"""Protocols of the remote objects by target: the attribute path that leads to them in a worker."""


@cache
def remote_methods(protocol: type) -> Mapping[str, inspect.Signature]:
    """Return the signatures of a protocol's public methods, without `self`, by name."""
    return {
        name: _without_self(member)
        for parent in reversed(protocol.__mro__)
        for name, member in vars(parent).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def _without_self(function: object) -> inspect.Signature:
    signature = inspect.signature(function)  # type: ignore[arg-type]  # checked by isfunction
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@cache
def properties_of(protocol: type) -> Mapping[str, str]:
    """Return the annotated types of a protocol's public properties by name."""
    return {
        name: str(inspect.signature(member.fget).return_annotation)
        for parent in reversed(protocol.__mro__)
        for name, member in vars(parent).items()
        if isinstance(member, property) and member.fget is not None and not name.startswith("_")
    }


LOCAL_METHODS: Final = frozenset([*remote_methods(DivergenceReference), *remote_methods(ResponseScorer)])
"""Methods that run on one worker alone: a forward pass of another learner calls those of a `DivergenceReference` on
each rank, and only rank 0 has a reward model."""
