"""Trained weights at an earlier time, with which a learner computes the log-probs of its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quintet.training.checkpoint.shards import ShardReader
from quintet.training.checkpoint.state_dict import has_flat_parameters, load_model_state_dict, model_state_dict
from quintet.training.parallel.reshard import reshard
from quintet.training.parallel.strategy import ParallelStrategy, parameter_name


class ReferenceWeights:
    """A copy of the trained weights of a module, which takes their place for a while. Frozen weights are shared: of a
    policy with LoRA it has the adapters alone."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        """Copy the current weights."""
        self._module = strategy.module
        # the modules of FSDP1 have no parameters while they are gathered
        reshard(self._module)
        self._parameters = [parameter for parameter in strategy.parameters() if parameter.requires_grad]
        self._copies = self._current()

    def _current(self) -> list[Tensor]:
        reshard(self._module)
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _set(self, weights: list[Tensor]) -> None:
        reshard(self._module)
        for parameter, tensor in zip(self._parameters, weights, strict=True):
            parameter.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the weights of the module by the copy within the context."""
        trained = self._current()
        self._set(self._copies)
        try:
            yield
        finally:
            self._set(trained)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the weights by name, for a checkpoint. All ranks call it."""
        with self.in_place():
            return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, shards: ShardReader) -> None:
        """Load the result of `state_dict`, saved by any number of ranks.

        Raises:
            MachineError: the weights belong to another model.
        """
        with self.in_place():
            if has_flat_parameters(self._module):
                load_model_state_dict(self._module, shards)
            else:
                shards.load_into(self._tensors())
            self._copies = self._current()

    def _tensors(self) -> Mapping[str, Tensor]:
        """Return the module's trained weights by name, of FSDP1 all weights."""
        tensors = model_state_dict(self._module)
        if has_flat_parameters(self._module):
            return tensors
        trained = {parameter_name(name) for name, weight in self._module.named_parameters() if weight.requires_grad}
        return {name: tensor for name, tensor in tensors.items() if name in trained}
