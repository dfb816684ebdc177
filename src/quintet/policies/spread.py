"""Tensors that lie in parts on several ranks, made of this rank's part wherever that is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["spread_tensor"]


def spread_tensor(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """The whole, of that shape and stride, of which this rank has the part: the same memory, without gradient.

    `DTensor.from_local` copies a part to the mesh's kind of device, so that of ranks with GPUs none could have its
    part in main memory.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), part.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
