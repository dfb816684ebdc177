"""Calls from the controller to workers, and their encoding as JSON and tensors.

A call is sent as a JSON header followed by its tensors, whose dtypes and shapes the header lists. Only methods of
`REMOTE_OBJECTS` and values of the types below can be sent: nothing that is received is executed or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import CriticConfig, OptimizerConfig
from quintet.records import Batch
from quintet.runtime.remote_interface import REMOTE_OBJECTS, remote_methods

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64)
}
"""Tensor types that can be sent, by name."""


@dataclass(frozen=True, slots=True)
class RemoteRef:
    """Reference to a remote object, as an argument of a call."""

    target: str


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A method call on one of `REMOTE_OBJECTS`."""

    target: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


STOP = RemoteCall("worker", "stop")
"""Ends the loop of a worker."""


@dataclass(frozen=True, slots=True)
class _Codec:
    """Encoding of one type of argument as a JSON value."""

    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _config_codec(config: Any) -> _Codec:
    return _Codec(config, lambda value: value.model_dump(mode="json"), lambda v: config.model_validate(v, strict=False))


_ALGORITHM, _CRITIC = _config_codec(AlgorithmConfig), _config_codec(CriticConfig)
_CODECS: Mapping[str, _Codec] = {
    "path": _Codec(Path, lambda path: str(path.absolute()), Path),
    "remote": _Codec(RemoteRef, lambda ref: ref.target, RemoteRef),
    "aggregation": _Codec(Aggregation, asdict, lambda value: Aggregation(**value)),
    "imitation": _Codec(CrossEntropyObjective, lambda _: None, lambda _: CrossEntropyObjective()),
    "policy_objective": _Codec(
        PolicyObjective, lambda value: _ALGORITHM.encode(value.config), lambda v: PolicyObjective(_ALGORITHM.decode(v))
    ),
    "critic_objective": _Codec(
        CriticObjective, lambda value: _CRITIC.encode(value.config), lambda v: CriticObjective(_CRITIC.decode(v))
    ),
    "optimizer": _config_codec(OptimizerConfig),
    "experiment": _config_codec(Experiment),
}


def encode(call: RemoteCall) -> tuple[bytes, list[Tensor]]:
    """Return the header of a call and its tensors.

    Raises:
        ValueError: the method is not a remote method, or an argument or a tensor has a type that cannot be sent.
    """
    _check_method(call.target, call.method)
    tensors: list[Tensor] = []
    arguments = {name: _to_json(value, tensors) for name, value in call.arguments.items()}
    listed = [[_dtype_name(tensor), list(tensor.shape)] for tensor in tensors]
    header = {"target": call.target, "method": call.method, "arguments": arguments, "tensors": listed}
    return json.dumps(header).encode(), [tensor.detach().contiguous().cpu() for tensor in tensors]


def decode_header(header: bytes) -> tuple[list[Tensor], Callable[[], RemoteCall]]:
    """Return empty tensors to receive into, and a function that returns the call once they are filled.

    Raises:
        ValueError: the header is no call of a remote method, or lists tensors of another type.
    """
    content = json.loads(header)
    if not isinstance(content, dict):
        raise ValueError("the header of a call is a JSON object")
    target, method = content.get("target"), content.get("method")
    if not isinstance(target, str) or not isinstance(method, str):
        raise ValueError(f"{target}.{method} is not a remote method")
    _check_method(target, method)
    tensors = [_empty(dtype, shape) for dtype, shape in content["tensors"]]

    def decoded() -> RemoteCall:
        arguments = {name: _from_json(value, tensors) for name, value in content["arguments"].items()}
        return RemoteCall(target, method, arguments)

    return tensors, decoded


def _check_method(target: str, method: str) -> None:
    if (target, method) == (STOP.target, STOP.method):
        return
    protocol = REMOTE_OBJECTS.get(target)
    if protocol is None or method not in remote_methods(protocol):
        raise ValueError(f"{target}.{method} is not a remote method")


def _empty(dtype: str, shape: Sequence[int]) -> Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"tensors of {dtype!r} cannot be received")
    return torch.empty([int(size) for size in shape], dtype=DTYPES[dtype])


def _to_json(value: Any, tensors: list[Tensor]) -> Any:
    """Return a JSON value: scalars as they are, everything else as `{type: value}`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Batch):
        return {"batch": {each.name: _to_json(getattr(value, each.name), tensors) for each in fields(Batch)}}
    if isinstance(value, Mapping):
        return {"mapping": {name: _to_json(item, tensors) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [_to_json(item, tensors) for item in value]}
    for tag, codec in _CODECS.items():
        if isinstance(value, codec.type):
            return {tag: codec.encode(value)}
    raise ValueError(f"an argument of type {type(value).__name__} cannot be sent to other ranks")


def _from_json(value: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "batch":
        return Batch(**{name: _from_json(item, tensors) for name, item in content.items()})
    if tag == "mapping":
        return {name: _from_json(item, tensors) for name, item in content.items()}
    if tag == "list":
        return [_from_json(item, tensors) for item in content]
    return _CODECS[tag].decode(content)


def _dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"tensors of {name} cannot be sent")
    return name


def send(call: RemoteCall, control_group: dist.ProcessGroup) -> None:
    """Broadcast a call from rank 0 to all other ranks."""
    header, tensors = encode(call)
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(text)]), 0, group=control_group)
    dist.broadcast(text, 0, group=control_group)
    _broadcast_tensors(tensors, control_group)


def receive(control_group: dist.ProcessGroup) -> RemoteCall:
    """Wait for the next call of rank 0.

    Raises:
        ValueError: the message is not a call.
        RuntimeError: the connection to rank 0 broke.
    """
    length = torch.zeros(1, dtype=torch.long)
    dist.broadcast(length, 0, group=control_group)
    text = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(text, 0, group=control_group)
    tensors, decoded = decode_header(text.numpy().tobytes())
    _broadcast_tensors(tensors, control_group)
    return decoded()


def _broadcast_tensors(tensors: Sequence[Tensor], control_group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0, group=control_group)
