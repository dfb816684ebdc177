"""Optimizer steps on this rank's parts of parameters that are `DTensor`s.

AdamW and gradient descent treat every number by itself, so a rank can step on its own rows as on any tensor. torch
would ask for each call how the result of hundreds of distributed tensors is spread, which takes longer than the step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintet.policies.spread import spread_tensor

__all__ = ["LocalStep"]

BY_NUMBER = (torch.optim.AdamW, torch.optim.SGD)


class LocalStep:
    """Makes the steps of an optimizer. Between them its state is that of the distributed parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._spread: dict[Tensor, dict[str, tuple[Tensor, DTensor]]] = {}
        """Of each parameter and field, this rank's part and the whole that it belongs to."""

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether there are distributed parameters, and every number of them is treated by itself."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return type(optimizer) in BY_NUMBER and any(isinstance(p, DTensor) for p in parameters)

    def __call__(self) -> None:
        """One step."""
        optimizer = self._optimizer
        whole = [group["params"] for group in optimizer.param_groups]
        parts = {p: _part(p) for params in whole for p in params}
        optimizer.state = defaultdict(dict, {parts[p]: self._own(state) for p, state in optimizer.state.items()})
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [parts[p] for p in params]
        try:
            optimizer.step()
        finally:
            for group, params in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = params
            state = {p: optimizer.state[part] for p, part in parts.items() if part in optimizer.state}
            optimizer.state = defaultdict(dict, {p: self._whole(p, fields) for p, fields in state.items()})

    def forget(self) -> None:
        """Let go of the state's tensors: they are put elsewhere."""
        self._spread.clear()

    def _own(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in fields.items()}

    def _whole(self, parameter: nn.Parameter, fields: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(parameter, DTensor):
            return fields
        return {
            name: self._spread_out(parameter, name, value) if torch.is_tensor(value) and value.dim() else value
            for name, value in fields.items()
        }

    def _spread_out(self, parameter: DTensor, name: str, part: Tensor) -> DTensor:
        known = self._spread.setdefault(parameter, {}).get(name)
        if known is not None and known[0].data_ptr() == part.data_ptr() and known[0].shape == part.shape:
            return known[1]
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = spread_tensor(part, mesh, placements, parameter.shape, parameter.stride())
        self._spread[parameter][name] = (part, whole)
        return whole


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's part as a parameter with the gradient's part; it shares the memory of both."""
    if not isinstance(parameter, DTensor):
        return parameter
    held: Any = parameter.detach()
    part = nn.Parameter(held.to_local(), requires_grad=parameter.requires_grad)
    grad = parameter.grad
    if isinstance(grad, DTensor):
        if grad.placements != parameter.placements:
            grad = grad.redistribute(parameter.device_mesh, parameter.placements)
        part.grad = grad.to_local()
    return part
