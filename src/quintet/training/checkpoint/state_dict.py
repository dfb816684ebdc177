"""Weights and optimizer state by parameter name under any parallel strategy.

Plain tensors and DTensors (`fully_shard`, tensor parallelism) are read from module and optimizer directly. FSDP1 stores
many parameters in one flat tensor, which torch.distributed.checkpoint.state_dict splits and reassembles. Names are
those of the model, without the prefixes of wrapper modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from quintet.policies.parallel.expert_parallel import as_full_experts, expert_meshes
from quintet.policies.parallel.pipeline_stages import tied_copy_names
from quintet.training.checkpoint.shards import ShardReader
from quintet.training.parallel.strategy import parameter_name

FLAT = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
STATE = "state."


def has_flat_parameters(module: nn.Module) -> bool:
    """Return whether FSDP1 has flattened the parameters; then they must be on the device to be read."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def model_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once, without copying."""
    if has_flat_parameters(module):
        return _flat_weights(module)[0]
    meshes, tied_copies = expert_meshes(module), tied_copy_names(module)
    return {
        parameter_name(tied_copies.get(name, name)): _as_full_expert(tensor, tensor, meshes)
        for name, tensor in _unique_tensors(module).items()
    }


def optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors as `<parameter>.<field>`; empty before its first step. All ranks call it."""
    if not optimizer.state:
        return {}
    if has_flat_parameters(module):
        return {
            parameter_name(name.removeprefix(STATE)): value
            for name, value in _flat_optimizer_state(module, optimizer).items()
        }
    meshes, tied_copies = expert_meshes(module), tied_copy_names(module)
    return {
        f"{parameter_name(tied_copies.get(name, name))}.{field}": _as_full_expert(value, parameter, meshes)
        for name, parameter in module.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_model_state_dict(module: nn.Module, reader: ShardReader) -> None:
    """Load the result of `model_state_dict`, saved by any number of ranks.

    Raises:
        MachineError: the weights belong to another model.
    """
    if not has_flat_parameters(module):
        reader.load_into(model_state_dict(module))
        return
    tensors, names = _flat_weights(module)
    # the file has tied parameters once, for both
    reader.load_into(tensors)
    state: dict[str, Any] = {full: tensors[name] for full, name in names.items()}
    dcp.set_model_state_dict(module, state)


def load_optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer, reader: ShardReader) -> None:
    """Load the result of `optimizer_state_dict`, saved by any number of ranks.

    Raises:
        MachineError: the state belongs to another model.
    """
    names = set(reader.names)
    if not names:
        return
    if has_flat_parameters(module):
        _load_flat_optimizer_state(module, optimizer, reader)
        return
    targets: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    on_device_groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    with_device_state = {id(parameter) for group in on_device_groups for parameter in group["params"]}
    meshes, tied_copies = expert_meshes(module), tied_copy_names(module)
    for name, parameter in module.named_parameters():
        prefix = f"{parameter_name(tied_copies.get(name, name))}."
        for field in (key.removeprefix(prefix) for key in names if key.rpartition(".")[0] == prefix[:-1]):
            key = prefix + field
            if reader.shape(key) == _as_full_expert(parameter, parameter, meshes).shape:
                tensor = torch.zeros_like(parameter, dtype=reader.dtype(key), requires_grad=False)
            else:
                device = parameter.device if id(parameter) in with_device_state else torch.device("cpu")
                tensor = torch.zeros(reader.shape(key), dtype=reader.dtype(key), device=device)
            optimizer.state[parameter][field] = tensor
            targets[key] = _as_full_expert(tensor, parameter, meshes)
    reader.load_into(targets)


def _as_full_expert(tensor: Tensor, parameter: Tensor, meshes: Mapping[nn.Parameter, DeviceMesh]) -> Tensor:
    """Return a tensor of this parameter as a shard of all experts, if ranks divide its experts among them."""
    mesh = meshes.get(parameter) if isinstance(parameter, nn.Parameter) else None
    return tensor if mesh is None or tensor.shape != parameter.shape else as_full_experts(tensor, mesh)


def _unique_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the entries of `state_dict`, each tensor once."""
    ids: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in ids:
            ids.add(id(tensor))
            tensors[name] = tensor
    return tensors


def _flat_weights(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by parameter name, tied ones once, and that name by the state dict's name."""
    state: dict[str, Any] = dcp.get_model_state_dict(module)
    tied = _tied(module)
    names = {name: tied.get(parameter_name(name), parameter_name(name)) for name in state}
    return {plain: state[name] for name, plain in reversed(names.items())}, names


def _tied(module: nn.Module) -> Mapping[str, str]:
    """Return the source parameter's name by the name of each tied parameter."""
    for part in module.modules():
        keys: dict[str, str] | None = getattr(part, "all_tied_weights_keys", None)
        if keys:
            return keys
    return {}


def _flat_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state: dict[str, Any] = dcp.get_optimizer_state_dict(module, optimizer, options=FLAT)
    return {name: value for name, value in state.items() if name.startswith(STATE) and isinstance(value, Tensor)}


def _load_flat_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, reader: ShardReader) -> None:
    """Fill FSDP1's optimizer state dict and set it."""
    state: dict[str, Any] = dcp.get_optimizer_state_dict(module, optimizer, options=FLAT)
    tensors = {name: value for name, value in state.items() if name.startswith(STATE) and isinstance(value, Tensor)}
    reader.load_into({parameter_name(name.removeprefix(STATE)): value for name, value in tensors.items()})
    dcp.set_optimizer_state_dict(module, optimizer, state, options=FLAT)
