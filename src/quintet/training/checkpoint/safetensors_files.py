"""Safetensors files, written tensor by tensor so that other threads can run meanwhile.

The format is the length of a JSON header, the header, then the bytes of all tensors. The safetensors package writes a
file in one call that holds the GIL; here each tensor is written by a call that releases it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.errors import MachineError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors."""

ALIGNMENT = 8
MAX_HEADER_BYTES = 100 << 20
"""Limit of the safetensors package."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors to a safetensors file and flush it to disk.

    Raises:
        OSError: the file cannot be written.
        KeyError: safetensors does not support a dtype.
    """
    # largest element sizes first, so that all tensors are aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header({name: tensors[name] for name in order})
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in order:
            file.write(_bytes(tensors[name]))
        file.flush()
        os.fsync(file.fileno())


def stored_sizes(path: Path) -> tuple[int, int]:
    """Return the number of elements in a safetensors file and their bytes, from its header.

    Raises:
        MachineError: the header is damaged.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
            rows = [row for name, row in header.items() if name != "__metadata__"]
            return sum(math.prod(row["shape"]) for row in rows), max(
                (row["data_offsets"][1] for row in rows), default=0
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise MachineError(f"{path} has no valid header of safetensors: {error}") from error


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


def _bytes(tensor: Tensor) -> memoryview:
    flat: Tensor = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    raw: Any = flat.numpy()
    return memoryview(raw)
