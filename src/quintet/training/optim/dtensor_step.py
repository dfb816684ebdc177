"""Optimizer steps on local shards of `DTensor` parameters.

AdamW and SGD are element-wise, so a rank can step on its shard as on any tensor. With DTensors torch propagates the
placement of hundreds of results in each step, which takes longer than the step itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintet.policies.parallel.dtensor_shards import dtensor_from_shard

ELEMENTWISE_OPTIMIZERS = (torch.optim.AdamW, torch.optim.SGD)


class DTensorStep:
    """Steps of an optimizer on local shards. Between steps its state belongs to the DTensor parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._dtensors: dict[Tensor, dict[str, tuple[Tensor, DTensor]]] = {}
        """Local shard and DTensor by parameter and field of its state."""

    @staticmethod
    def supports(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer is element-wise and has DTensor parameters."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return type(optimizer) in ELEMENTWISE_OPTIMIZERS and any(isinstance(p, DTensor) for p in parameters)

    def __call__(self) -> None:
        """Make one optimizer step."""
        optimizer = self._optimizer
        params_by_group = [group["params"] for group in optimizer.param_groups]
        shards = {p: _local_shard(p) for params in params_by_group for p in params}
        optimizer.state = defaultdict(dict, {shards[p]: _local_state(state) for p, state in optimizer.state.items()})
        for group, params in zip(optimizer.param_groups, params_by_group, strict=True):
            group["params"] = [shards[p] for p in params]
        try:
            optimizer.step()
        finally:
            for group, params in zip(optimizer.param_groups, params_by_group, strict=True):
                group["params"] = params
            state = {p: optimizer.state[shard] for p, shard in shards.items() if shard in optimizer.state}
            optimizer.state = defaultdict(dict, {p: self._dtensor_state(p, fields) for p, fields in state.items()})

    def clear_cache(self) -> None:
        """Forget the state's tensors, because they move to another device."""
        self._dtensors.clear()

    def _dtensor_state(self, parameter: nn.Parameter, fields: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(parameter, DTensor):
            return fields
        return {
            name: self._as_dtensor(parameter, name, value) if torch.is_tensor(value) and value.dim() else value
            for name, value in fields.items()
        }

    def _as_dtensor(self, parameter: DTensor, name: str, shard: Tensor) -> DTensor:
        cached = self._dtensors.setdefault(parameter, {}).get(name)
        if cached is not None and cached[0].data_ptr() == shard.data_ptr() and cached[0].shape == shard.shape:
            return cached[1]
        mesh, placements = parameter.device_mesh, parameter.placements
        dtensor = dtensor_from_shard(shard, mesh, placements, parameter.shape, parameter.stride())
        self._dtensors[parameter][name] = (shard, dtensor)
        return dtensor


def _local_state(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in fields.items()}


def _local_shard(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's shard as a parameter with its shard of the gradient; both share memory with the DTensors."""
    if not isinstance(parameter, DTensor):
        return parameter
    dtensor: Any = parameter.detach()
    shard = nn.Parameter(dtensor.to_local(), requires_grad=parameter.requires_grad)
    grad = parameter.grad
    if isinstance(grad, DTensor):
        if grad.placements != parameter.placements:
            grad = grad.redistribute(parameter.device_mesh, parameter.placements)
        shard.grad = grad.to_local()
    return shard
