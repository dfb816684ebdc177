"""Calls from rank 0 to the ranks that follow: a method's name, plain arguments, a batch.

On the wire a call is a header in JSON and then its tensors, one by one, of types and shapes that the header says:
nothing that is received is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.records import Batch

__all__ = ["METHODS", "Call", "decoded", "encoded", "filled", "hear", "tell"]

METHODS = frozenset(
    {
        "open",
        "actor_with",
        "grow_critic",
        "keep_reference",
        "update",
        "update_critic",
        "logprobs",
        "squared_mass",
        "divergence",
        "values",
        "weights",
        "adapters",
        "save",
        "load",
        "stop",
    }
)
"""What can be asked for."""
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64)
}
BATCH, PARTS = "batch.", "parts."
"""How names of a batch's tensors begin, and of those in its `parts`."""


@dataclass(frozen=True, slots=True)
class Call:
    """What all ranks are to do now."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values of JSON."""
    batch: Batch | None = None
    mask: Tensor | None = None
    """bool [N]."""


def encoded(call: Call) -> tuple[bytes, list[Tensor]]:
    """Header and tensors.

    Raises:
        ValueError: there is no such method, or a tensor is of a type that isn't sent.
    """
    if call.method not in METHODS:
        raise ValueError(f"no call {call.method!r}")
    named = _named(call)
    told = [[name, _type_name(tensor), list(tensor.shape)] for name, tensor in named.items()]
    has_parts = call.batch is not None and call.batch.parts is not None
    header = {"method": call.method, "arguments": call.arguments, "tensors": told, "parts": has_parts}
    return json.dumps(header).encode(), [tensor.detach().contiguous().cpu() for tensor in named.values()]


def decoded(header: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header, and room for the tensors in the order in which they follow.

    Raises:
        ValueError: it isn't a header, or asks for something that can't be asked for.
    """
    given = json.loads(header)
    method = given.get("method") if isinstance(given, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"no call {method!r}")
    room: dict[str, Tensor] = {}
    for name, type_name, shape in given["tensors"]:
        if type_name not in TYPES:
            raise ValueError(f"tensors of {type_name!r} aren't received")
        room[str(name)] = torch.empty([int(size) for size in shape], dtype=TYPES[type_name])
    return given, room


def filled(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Call:
    """The call that was `encoded`."""
    own: dict[str, Any] = _under(BATCH, tensors)
    if header["parts"]:
        own["parts"] = _under(PARTS, tensors)
    batch = Batch(**own) if own else None
    return Call(header["method"], header["arguments"], batch, tensors.get("mask"))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def tell(call: Call, line: dist.ProcessGroup) -> None:
    """Tell all others, as rank 0."""
    header, tensors = encoded(call)
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(text)]), 0, group=line)
    dist.broadcast(text, 0, group=line)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(_bytes(tensor), 0, group=line)


def hear(line: dist.ProcessGroup) -> Call:
    """Wait for what rank 0 tells.

    Raises:
        ValueError: it isn't a call.
        RuntimeError: rank 0 has gone.
    """
    length = torch.zeros(1, dtype=torch.long)
    dist.broadcast(length, 0, group=line)
    text = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(text, 0, group=line)
    header, room = decoded(text.numpy().tobytes())
    for tensor in room.values():
        if tensor.numel():
            dist.broadcast(_bytes(tensor), 0, group=line)
    return filled(header, room)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory."""
    return tensor.view(-1).view(torch.uint8)


def _type_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in TYPES:
        raise ValueError(f"tensors of {name} aren't sent")
    return name


def _named(call: Call) -> dict[str, Tensor]:
    named = {} if call.mask is None else {"mask": call.mask}
    for each in fields(Batch) if call.batch else ():
        value = getattr(call.batch, each.name)
        if isinstance(value, Tensor):
            named[f"{BATCH}{each.name}"] = value
        elif value is not None:
            named |= {f"{PARTS}{name}": part for name, part in value.items()}
    return named
