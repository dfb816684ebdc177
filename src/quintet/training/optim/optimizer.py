"""Optimizers of the learners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintet.config.native.learners import OptimizerConfig
from quintet.errors import ConfigError
from quintet.policies.parallel.dtensor_shards import dtensor_from_shard

HEAD_NAMES = ("lm_head", "head")
"""Names of the last layers of policies and critics."""


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weight matrices between embedding and head, for Muon."""
    excluded = {
        id(parameter)
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) or name.rpartition(".")[2] in HEAD_NAMES
        for parameter in part.parameters()
    }
    return [p for p in module.parameters() if p.ndim == 2 and p.requires_grad and id(p) not in excluded]


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], matrices: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Build fused AdamW; SGD without momentum, with weight decay as a term of the gradient; or Muon for the `matrices`
    among the parameters and AdamW for the rest. Frozen parameters are skipped.

    Raises:
        ConfigError: there is no matrix for Muon.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if config.kind == "sgd":
        return torch.optim.SGD(trainable, lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.kind == "adamw":
        return _adamw(config, trainable)
    trainable_ids = {id(parameter) for parameter in trainable}
    muon_parameters = [p for p in matrices if id(p) in trainable_ids and p.ndim == 2]
    if not muon_parameters:
        raise ConfigError(
            "optimizer.kind = muon needs weight matrices, but backend fsdp shards flat parameters",
            key="optimizer.kind",
            value="muon",
            hint="set backend=fsdp2 of that learner, or kind=adamw of its optimizer",
        )
    return MuonAndAdamW(config, muon_parameters, trainable)


def _adamw(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for matrices and AdamW for the other parameters, with one learning rate: Muon's updates
    are scaled to the RMS of AdamW's by 0.2 √max(rows, columns) (Liu et al. 2025, arXiv:2502.16982)."""

    def __init__(self, config: OptimizerConfig, matrices: list[nn.Parameter], parameters: list[nn.Parameter]) -> None:
        """`matrices` must be among the `parameters`."""
        matrix_ids = {id(matrix) for matrix in matrices}
        rest = [parameter for parameter in parameters if id(parameter) not in matrix_ids]
        muon = torch.optim.Muon(
            matrices,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self._optimizers: list[torch.optim.Optimizer] = [muon, *([_adamw(config, rest)] if rest else [])]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        super().__init__([dict(group) for group in groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of both optimizers, which share this one's state and parameter groups."""
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=True):
            optimizer.state, optimizer.param_groups = self.state, [group]
            optimizer.step()


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
