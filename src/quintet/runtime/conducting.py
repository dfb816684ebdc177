"""Rank 0 of several: it runs the pipelines as they are, and what it asks of its learners all ranks do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyLearning
from quintet.config.native import Experiment, OptimizerConfig
from quintet.policies.causal_lm import Packed, View
from quintet.records import Batch
from quintet.runtime.calls import Call, tell
from quintet.runtime.learners import Learners
from quintet.runtime.performing import ACTOR, PRACTICE, REFERENCE, Performer, plain_aggregation, plain_objective
from quintet.training.handles import Actor, Critic, Judge
from quintet.training.learner import Viewed
from quintet.training.meeting import LostRank, Meeting, ended
from quintet.training.saving import Write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ConductedActor", "ConductedCritic", "ConductedJudge", "ConductedLearners", "Conductor"]


class Conductor:
    """Tells the other ranks what to do, and does it with them."""

    def __init__(self, config: Experiment, meeting: Meeting) -> None:
        self.config = config
        self._meeting = meeting
        self._performer = Performer(config, meeting.ranks)
        self._busy = False
        """In a call that the others haven't got or done as a whole."""

    def call(self, method: str, batch: Batch | None = None, mask: Tensor | None = None, **arguments: Any) -> Any:
        """What the learner of this rank gives, once all have done their part.

        Raises:
            LostRank: another rank has ended; the message names it.
        """
        call = Call(method, arguments, batch, mask)
        self._busy = True
        with self.noticing():
            tell(call, self._meeting.line)
            found = self._performer.perform(call)
        self._busy = False
        return found

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Faults inside that come of another rank's end are told as that.

        Raises:
            LostRank: another rank has ended; the message names it.
        """
        try:
            yield
        except RuntimeError as error:
            if told := self._meeting.ended(error):
                raise _ended(told) from error
            raise

    def check(self) -> None:
        """Whether all ranks are still there.

        Raises:
            LostRank: one isn't; the message names it.
        """
        if gone := self._meeting.gone():
            raise _ended(ended(gone))

    @property
    def others(self) -> int:
        """How many ranks there are beside this one."""
        return self._meeting.ranks.size - 1

    @property
    def learners(self) -> Learners:
        """Those of this rank."""
        return self._performer.learners

    def open(self, policy: Path, *, tuned: bool = False) -> ConductedLearners:
        """On all ranks, the actor of the policy at that directory; `tuned` is that of supervised fine-tuning."""
        self.call("open", policy=str(policy.absolute()), tuned=tuned)
        return ConductedLearners(self, self.learners.actor)

    def stop(self) -> None:
        """The others end; those that have already don't hinder it. From the middle of a call they are left by this
        rank's own end."""
        if self._busy:
            return
        try:
            tell(Call("stop"), self._meeting.line)
        except RuntimeError:
            return


def _ended(told: str) -> LostRank:
    hint = "what it said before stands above; the same command goes on from the last checkpoint"
    return LostRank(f"{told}, and a run needs all of its ranks", hint)


class ConductedLearners:
    """The learners of all ranks; see `Learners`."""

    def __init__(self, conductor: Conductor, actor: Actor) -> None:
        self._conductor = conductor
        self.actor = ConductedActor(conductor, ACTOR, actor)
        self.critic: ConductedCritic | None = None
        self.reference: ConductedJudge | None = None

    @property
    def whole(self) -> bool:
        """See `Learners.whole`."""
        return self._conductor.learners.whole

    def actor_with(self, optimizer: OptimizerConfig) -> ConductedActor:
        """See `Learners.actor_with`."""
        own = self._conductor.call("actor_with", optimizer=optimizer.model_dump(mode="json"))
        return ConductedActor(self._conductor, PRACTICE, own)

    def grow_critic(self) -> ConductedCritic:
        """See `Learners.grow_critic`."""
        self.critic = ConductedCritic(self._conductor, self._conductor.call("grow_critic"))
        return self.critic

    def keep_reference(self) -> ConductedJudge:
        """See `Learners.keep_reference`."""
        self.reference = ConductedJudge(self._conductor, REFERENCE, self._conductor.call("keep_reference"))
        return self.reference

    def save(self, directory: Path) -> Write:
        """See `Learners.save`."""
        written: Write = self._conductor.call("save", directory=str(directory.absolute()))
        return written

    def extra(self) -> dict[str, Any]:
        """See `Learners.extra`."""
        return self._conductor.learners.extra()

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """See `Learners.load`."""
        place = str(directory.absolute())
        self._conductor.call("load", directory=place, contents=list(contents), extra=dict(extra))
        own = self._conductor.learners
        if own.critic is not None:
            self.critic = ConductedCritic(self._conductor, own.critic)
        if own.reference is not None:
            self.reference = ConductedJudge(self._conductor, REFERENCE, own.reference)


class ConductedJudge:
    """A policy on all ranks that says how likely words are; see `Scorer`."""

    def __init__(self, conductor: Conductor, name: str, own: Judge) -> None:
        self._conductor = conductor
        self._name = name
        self._own = own

    @property
    def model(self) -> PreTrainedModel:
        """As this rank holds it."""
        return self._own.model

    @property
    def dtype(self) -> torch.dtype:
        """See `Judge.dtype`."""
        return self._own.dtype

    def view(self, packed: Packed) -> View:
        """See `Viewed.view`; of this rank alone."""
        return self._own.view(packed)

    def expect(self, passes: Sequence[Packed]) -> None:
        """See `Viewed.expect`; of this rank alone."""
        self._own.expect(passes)

    def at_hand(self) -> AbstractContextManager[None]:
        """See `Viewed.at_hand`; of this rank alone."""
        return self._own.at_hand()

    def logprobs(self, batch: Batch) -> Tensor:
        """See `Scorer.logprobs`."""
        found: Tensor = self._conductor.call("logprobs", batch, of=self._name)
        return found

    def squared_mass(self, batch: Batch) -> Tensor:
        """See `Scorer.squared_mass`."""
        found: Tensor = self._conductor.call("squared_mass", batch, of=self._name)
        return found

    def divergence(self, batch: Batch, reference: Viewed, *, swapped: bool = False) -> Tensor:
        """See `Scorer.divergence`; from the reference of all ranks, whichever is given."""
        found: Tensor = self._conductor.call("divergence", batch, of=self._name, swapped=swapped)
        return found


class ConductedActor:
    """The policy's learner on all ranks; see `ActorLearner`."""

    def __init__(self, conductor: Conductor, name: str, own: Actor) -> None:
        self._conductor = conductor
        self._name = name
        self._own = own
        self.scorer = ConductedJudge(conductor, name, own.scorer)

    @property
    def model(self) -> PreTrainedModel:
        """As this rank holds it."""
        return self._own.model

    def update(
        self,
        batch: Batch,
        objective: PolicyLearning,
        aggregation: Aggregation | str,
        rate: float,
        *,
        reference: Viewed | None = None,
        seed: int = 0,
        decay: float | None = None,
    ) -> dict[str, float]:
        """See `ActorLearner.update`; the reference is that of all ranks, whichever is given."""
        found: dict[str, float] = self._conductor.call(
            "update",
            batch,
            of=self._name,
            objective=plain_objective(objective, self._conductor.config),
            aggregation=plain_aggregation(aggregation),
            rate=rate,
            with_reference=reference is not None,
            seed=seed,
            decay=decay,
        )
        return found

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""
        return self._gathered("weights")

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """See `ActorLearner.adapters`."""
        return self._gathered("adapters")

    def _gathered(self, method: str) -> Iterator[tuple[str, Tensor]]:
        """Tensors one after the other, gathered to the last also where nobody takes them."""
        gathered = self._conductor.call(method, of=self._name)
        try:
            with self._conductor.noticing():
                for each in gathered:  # noqa: UP028  `yield from` would close it with this one
                    yield each
        finally:
            for _ in gathered:
                pass


class ConductedCritic:
    """The critic on all ranks; see `CriticLearner`."""

    def __init__(self, conductor: Conductor, own: Critic) -> None:
        self._conductor = conductor
        self._own = own

    def values(self, batch: Batch) -> Tensor:
        """See `CriticLearner.values`."""
        found: Tensor = self._conductor.call("values", batch)
        return found

    def update(
        self,
        batch: Batch,
        objective: CriticObjective,
        aggregation: Aggregation | str,
        rate: float,
        mask: Tensor | None = None,
        *,
        decay: float | None = None,
    ) -> dict[str, float]:
        """See `CriticLearner.update`.

        Raises:
            ValueError: the objective isn't the configured one.
        """
        if objective.config != self._conductor.config.critic:
            raise ValueError("ranks that follow know the configured objective of the critic alone")
        found: dict[str, float] = self._conductor.call(
            "update_critic", batch, mask, aggregation=plain_aggregation(aggregation), rate=rate, decay=decay
        )
        return found
