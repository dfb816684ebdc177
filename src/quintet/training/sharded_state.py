"""A module's weights and its optimizer's moments by name, however they lie over ranks.

Plain tensors and DTensors (`fully_shard`, tensor parallelism) are taken from the module and the optimizer themselves.
FSDP keeps flat parts of many parameters together; torch.distributed.checkpoint.state_dict takes them apart and puts
them back. Names are those of the model, whatever is wrapped around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from quintet.policies.expert_parallel import expert_places, in_whole
from quintet.policies.stages import copied_names
from quintet.training.lay import own_name
from quintet.training.pieces import Stored

__all__ = ["is_flat", "load_moments", "load_weights", "moments", "weights"]

FLAT = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
STATE = "state."


def is_flat(module: nn.Module) -> bool:
    """Whether FSDP has its weights in flat parts, which it takes apart only where they compute."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored buffers by name, tied ones once; nothing is copied."""
    if is_flat(module):
        return _flat_weights(module)[0]
    places, copied = expert_places(module), copied_names(module)
    return {own_name(copied.get(name, name)): _placed(tensor, tensor, places) for name, tensor in _held(module).items()}


def moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as `<parameter>.<field>`; empty before its first step. Every rank calls it."""
    if not optimizer.state:
        return {}
    if is_flat(module):
        return {own_name(name.removeprefix(STATE)): value for name, value in _flat_moments(module, optimizer).items()}
    places, copied = expert_places(module), copied_names(module)
    return {
        f"{own_name(copied.get(name, name))}.{field}": _placed(value, parameter, places)
        for name, parameter in module.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_weights(module: nn.Module, stored: Stored) -> None:
    """Put back what `weights` gave, from whatever number of ranks.

    Raises:
        MachineError: they are those of another model.
    """
    if not is_flat(module):
        stored.load_into(weights(module))
        return
    own, names = _flat_weights(module)
    # of tied parameters the file holds one, which fills both
    stored.load_into(own)
    state: dict[str, Any] = {full: own[name] for full, name in names.items()}
    dcp.set_model_state_dict(module, state)


def load_moments(module: nn.Module, optimizer: torch.optim.Optimizer, stored: Stored) -> None:
    """Put back what `moments` gave, from whatever number of ranks.

    Raises:
        MachineError: they are those of another model.
    """
    names = set(stored.names)
    if not names:
        return
    if is_flat(module):
        _load_flat_moments(module, optimizer, stored)
        return
    wanted: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    on_device = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    apart = {id(parameter) for group in on_device for parameter in group["params"]}
    places, copied = expert_places(module), copied_names(module)
    for name, parameter in module.named_parameters():
        begin = f"{own_name(copied.get(name, name))}."
        for field in (key.removeprefix(begin) for key in names if key.rpartition(".")[0] == begin[:-1]):
            key = begin + field
            if stored.shape(key) == _placed(parameter, parameter, places).shape:
                tensor = torch.zeros_like(parameter, dtype=stored.dtype(key), requires_grad=False)
            else:
                device = parameter.device if id(parameter) in apart else torch.device("cpu")
                tensor = torch.zeros(stored.shape(key), dtype=stored.dtype(key), device=device)
            optimizer.state[parameter][field] = tensor
            wanted[key] = _placed(tensor, parameter, places)
    stored.load_into(wanted)


def _placed(tensor: Tensor, parameter: Tensor, places: Mapping[nn.Parameter, DeviceMesh]) -> Tensor:
    """A tensor of that parameter as part of the whole one: of experts that are shared out, others have others."""
    mesh = places.get(parameter) if isinstance(parameter, nn.Parameter) else None
    return tensor if mesh is None or tensor.shape != parameter.shape else in_whole(tensor, mesh)


def _held(module: nn.Module) -> dict[str, Tensor]:
    """What `state_dict` names, each tensor once."""
    seen: set[int] = set()
    held: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            held[name] = tensor
    return held


def _flat_weights(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by plain name, tied ones once, and that name of each full one."""
    state: dict[str, Any] = dcp.get_model_state_dict(module)
    same = _tied(module)
    names = {name: same.get(own_name(name), own_name(name)) for name in state}
    return {plain: state[name] for name, plain in reversed(names.items())}, names


def _tied(module: nn.Module) -> Mapping[str, str]:
    """Of each tied parameter, the one that it is."""
    for part in module.modules():
        keys: dict[str, str] | None = getattr(part, "all_tied_weights_keys", None)
        if keys:
            return keys
    return {}


def _flat_moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Any] = dcp.get_optimizer_state_dict(module, optimizer, options=FLAT)
    return {name: value for name, value in found.items() if name.startswith(STATE) and isinstance(value, Tensor)}


def _load_flat_moments(module: nn.Module, optimizer: torch.optim.Optimizer, stored: Stored) -> None:
    """FSDP's: what the optimizer would hold is filled, and put back."""
    whole: dict[str, Any] = dcp.get_optimizer_state_dict(module, optimizer, options=FLAT)
    tensors = {name: value for name, value in whole.items() if name.startswith(STATE) and isinstance(value, Tensor)}
    stored.load_into({own_name(name.removeprefix(STATE)): value for name, value in tensors.items()})
    dcp.set_optimizer_state_dict(module, optimizer, whole, options=FLAT)
