"""What a rank does when it is called: the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, Imitation, PolicyLearning, PolicyObjective
from quintet.config.native import Experiment, OptimizerConfig
from quintet.records import Batch
from quintet.runtime.calls import Call
from quintet.runtime.learners import Learners
from quintet.runtime.tuning import open_tuned
from quintet.training.handles import Critic, Judge, OwnActor
from quintet.training.ranks import Ranks

__all__ = ["ACTOR", "PRACTICE", "REFERENCE", "Performer", "plain_aggregation", "plain_objective"]

ACTOR, PRACTICE, REFERENCE = "actor", "practice", "reference"
"""Whose log-probs are asked for: the policy's, those of `actor_with`'s, the reference's."""


class Performer:
    """Answers calls with the learners of this rank."""

    def __init__(self, config: Experiment, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._learners: Learners | None = None
        self._practice: OwnActor | None = None

    @property
    def learners(self) -> Learners:
        """Those that were opened.

        Raises:
            ValueError: none were.
        """
        if self._learners is None:
            raise ValueError("no learner was opened before it was called")
        return self._learners

    def perform(self, call: Call) -> Any:
        """Do what is asked; gives what the method of the learner gives.

        Raises:
            ValueError: that can't be done now.
        """
        methods: dict[str, Callable[[Call], Any]] = {
            "open": self._open,
            "actor_with": self._actor_with,
            "grow_critic": lambda call: self.learners.grow_critic(),
            "keep_reference": lambda call: self.learners.keep_reference(),
            "update": self._update,
            "update_critic": self._update_critic,
            "logprobs": lambda call: self._scorer(call).logprobs(_batch(call)),
            "squared_mass": lambda call: self._scorer(call).squared_mass(_batch(call)),
            "divergence": self._divergence,
            "values": lambda call: self._critic().values(_batch(call)),
            "weights": lambda call: self._actor(call).weights(),
            "adapters": lambda call: self._actor(call).adapters(),
            "save": lambda call: self.learners.save(Path(call.arguments["directory"])),
            "load": self._load,
        }
        return methods[call.method](call)

    def _open(self, call: Call) -> None:
        self._practice = None
        opened = open_tuned if call.arguments["tuned"] else Learners.open
        self._learners = opened(self._config, Path(call.arguments["policy"]), self._ranks)

    def _load(self, call: Call) -> None:
        given = call.arguments
        self.learners.load(Path(given["directory"]), given["contents"], given["extra"])

    def _actor_with(self, call: Call) -> OwnActor:
        optimizer = OptimizerConfig.model_validate(call.arguments["optimizer"], strict=False)
        self._practice = self.learners.actor_with(optimizer)
        return self._practice

    def _update(self, call: Call) -> dict[str, float]:
        given = call.arguments
        if given["of"] == ACTOR:
            self._practice = None
        return self._actor(call).update(
            _batch(call),
            self._objective(given["objective"]),
            Aggregation(**given["aggregation"]),
            given["rate"],
            reference=self._reference() if given["with_reference"] else None,
            seed=given["seed"],
            decay=given["decay"],
        )

    def _update_critic(self, call: Call) -> dict[str, float]:
        objective, given = CriticObjective(self._config.critic), call.arguments
        return self._critic().update(
            _batch(call),
            objective,
            Aggregation(**given["aggregation"]),
            given["rate"],
            call.mask,
            decay=given["decay"],
        )

    def _objective(self, name: str) -> PolicyLearning:
        return Imitation() if name == "imitation" else PolicyObjective(self._config.algorithm)

    def _divergence(self, call: Call) -> Tensor:
        swapped = bool(call.arguments["swapped"])
        return self._scorer(call).divergence(_batch(call), self._reference(), swapped=swapped)

    def _actor(self, call: Call) -> OwnActor:
        if call.arguments["of"] == ACTOR:
            return self.learners.actor
        if self._practice is None:
            raise ValueError("the policy has no other optimizer now")
        return self._practice

    def _scorer(self, call: Call) -> Judge:
        return self._reference() if call.arguments["of"] == REFERENCE else self._actor(call).scorer

    def _reference(self) -> Judge:
        if self.learners.reference is None:
            raise ValueError("there is no reference yet")
        return self.learners.reference

    def _critic(self) -> Critic:
        if self.learners.critic is None:
            raise ValueError("there is no critic yet")
        return self.learners.critic


def _batch(call: Call) -> Batch:
    if call.batch is None:
        raise ValueError(f"{call.method} needs a batch")
    return call.batch


def plain_objective(objective: PolicyLearning, config: Experiment) -> str:
    """The name under which every rank makes that objective from its own configuration.

    Raises:
        ValueError: it can't.
    """
    if isinstance(objective, Imitation):
        return "imitation"
    if isinstance(objective, PolicyObjective) and objective.config == config.algorithm:
        return "policy"
    raise ValueError(f"ranks that follow don't know the objective {objective!r}")


def plain_aggregation(given: Aggregation | str) -> Mapping[str, Any]:
    """As values of JSON."""
    return asdict(Aggregation(given) if isinstance(given, str) else given)
