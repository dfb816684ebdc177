"""The policy as it was, where adapters alone are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.policies.adapters import head_weight, is_adapted, is_adapter
from quintet.policies.causal_lm import Packed, TokenMeasures, View
from quintet.training.learner import Scorer, Viewed
from quintet.training.packing import Budget

__all__ = ["KeptPolicy"]


class KeptPolicy(Scorer):
    """A policy whose adapters alone are trained, as it was: the weights are the learner's own, and its adapters as
    they were then take their place while it judges."""

    def __init__(self, policy: Scorer, budget: Budget) -> None:
        """As `policy` is now."""
        super().__init__(
            policy.model,
            budget=budget,
            dtype=policy.dtype,
            temperature=policy._temperature,
            ranks=policy._ranks,
            lay=policy.lay,
            offload=policy._offload,
        )
        self._trained = [one for one in policy.lay.parameters() if one.requires_grad]
        self._kept = _copies(self._trained)

    def measures(
        self, packed: Packed, other: Viewed | None = None, *, swapped: bool = False, squared_mass: bool = False
    ) -> TokenMeasures:
        """See `Scorer.measures`; without gradients."""
        with self.at_hand(), torch.no_grad(), self._in_place():
            return super().measures(packed, other, swapped=swapped, squared_mass=squared_mass)

    def view(self, packed: Packed) -> View:
        """See `Scorer.view`; a head with adapters is copied."""
        with self.at_hand(), self._in_place():
            found = super().view(packed)
            head = self.model.lm_head
            return View(found.hidden, partial(F.linear, weight=head_weight(head))) if is_adapted(head) else found

    def state(self) -> dict[str, Tensor]:
        """The adapters."""
        with self.at_hand(), self._in_place():
            return {name: tensor.clone() for name, tensor in self.lay.weights() if is_adapter(name)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Scorer.load_state`."""
        with self.at_hand(), self._in_place():
            super().load_state(state)
            self._kept = _copies(self._trained)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        learnt = _copies(self._trained)
        _put(self._trained, self._kept)
        try:
            yield
        finally:
            _put(self._trained, learnt)


def _copies(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _put(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
