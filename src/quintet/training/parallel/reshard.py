"""Free weights that FSDP keeps gathered between passes, so that each rank has its shards alone."""

from __future__ import annotations

from typing import Any

from torch import nn


def reshard(module: nn.Module) -> None:
    """Free the gathered weights of all units. The root keeps those of the last forward pass, which changes of the
    shards would not reach."""
    for part in module.modules():
        unit: Any = part
        if hasattr(unit, "_get_fsdp_state"):
            unit.reshard()
        elif getattr(unit, "_handle", None) is not None:
            reshard_flat_parameter(unit)


def reshard_flat_parameter(unit: Any) -> None:
    """Free the gathered weights of a unit of FSDP1; the root keeps them even while it uses its shard."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle = unit._handle
    if not handle.uses_sharded_strategy:
        return
    gathered = getattr(handle.flat_param, "_full_param_padded", None)
    if not handle.is_sharded(handle.flat_param):
        _reshard(unit, handle, free_unsharded_flat_param=True)
    elif gathered is not None and gathered.untyped_storage().size():
        handle._free_unsharded_flat_param()
