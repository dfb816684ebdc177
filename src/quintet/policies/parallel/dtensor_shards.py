"""DTensors from local shards on any device, and the full tensors of DTensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def dtensor_from_shard(
    shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """Return a DTensor of the given global shape and stride around this rank's shard: no copy, no gradient.

    `DTensor.from_local` would copy the shard to the mesh's device type; a rank with a GPU could not keep its shard in
    host memory.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), shard.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, on every rank; all ranks call it."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full
