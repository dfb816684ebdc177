"""Calls from the controller to workers, their encoding as JSON and tensors, and results likewise.

A call is sent as a JSON header followed by its tensors, whose dtypes and shapes the header lists. Only methods of
`REMOTE_OBJECTS` and values of the types below can be sent: nothing that is received is executed or unpickled.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective, DistillationObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import CriticConfig, OptimizerConfig
from quintet.config.native.tracking import ProfileConfig
from quintet.config.native.training import DistillationConfig
from quintet.embodied_records import ChunkBatch, RobotEpisode, RolloutRequest
from quintet.envs.event_messages import event_from_text, event_text
from quintet.envs.hosted_envs import EnvRequest
from quintet.envs.vector_env import EnvEvent
from quintet.records import Batch, ImageInput, PromptRow, Request
from quintet.rollout.engines.shared_weights import SharedTensor
from quintet.runtime.calls.remote_interface import REMOTE_OBJECTS, EngineReport, properties_of, remote_methods
from quintet.training.chunk_learner import ChunkRates
from quintet.training.parallel.broadcast_group import GroupAddress

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
"""Tensor types that can be sent, by name."""
CHECKSUM_BYTES = 4
"""Size of a CRC-32."""


@dataclass(frozen=True, slots=True)
class RemoteRef:
    """Reference to a remote object, as an argument of a call."""

    target: str


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A method call on one of `REMOTE_OBJECTS`, or the request for one of its properties."""

    target: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    broadcasts_tensors: bool = False
    """Whether the tensors follow over the process group of the ranks instead of the connection."""
    discards_result: bool = False
    """Whether the worker answers with None: the controller has the same result."""


STOP = RemoteCall("worker", "stop")
"""Ends the loop of a worker."""


@dataclass(frozen=True, slots=True)
class _Codec:
    """Encoding of one type of argument as a JSON value."""

    type: type | UnionType
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _config_codec(config: Any) -> _Codec:
    return _Codec(config, lambda value: value.model_dump(mode="json"), lambda v: config.model_validate(v, strict=False))


def _record_codec(record: Any) -> _Codec:
    adapter = TypeAdapter(record)
    return _Codec(record, lambda value: adapter.dump_python(value, mode="json"), adapter.validate_python)


_REQUEST = _record_codec(Request)


def _encode_request(request: Request) -> Any:
    images = [[image.key, image.grid, b64encode(image.patches).decode()] for image in request.images]
    fields = _REQUEST.encode(replace(request, images=()) if images else request)
    return {**fields, "images": images}


def _decode_request(fields: dict[str, Any]) -> Request:
    images = [ImageInput(key, tuple(grid), b64decode(patches)) for key, grid, patches in fields["images"]]
    request: Request = _REQUEST.decode({**fields, "images": ()})
    return replace(request, images=tuple(images)) if images else request


_ALGORITHM, _CRITIC = _config_codec(AlgorithmConfig), _config_codec(CriticConfig)
_DISTILLATION = _config_codec(DistillationConfig)
_CODECS: Mapping[str, _Codec] = {
    "path": _Codec(Path, lambda path: str(path.absolute()), Path),
    "remote": _Codec(RemoteRef, lambda ref: ref.target, RemoteRef),
    "aggregation": _Codec(Aggregation, asdict, lambda value: Aggregation(**value)),
    "imitation": _Codec(CrossEntropyObjective, lambda _: None, lambda _: CrossEntropyObjective()),
    "distillation": _Codec(
        DistillationObjective,
        lambda value: _DISTILLATION.encode(value.config),
        lambda v: DistillationObjective(_DISTILLATION.decode(v)),
    ),
    "policy_objective": _Codec(
        PolicyObjective, lambda value: _ALGORITHM.encode(value.config), lambda v: PolicyObjective(_ALGORITHM.decode(v))
    ),
    "critic_objective": _Codec(
        CriticObjective, lambda value: _CRITIC.encode(value.config), lambda v: CriticObjective(_CRITIC.decode(v))
    ),
    "optimizer": _config_codec(OptimizerConfig),
    "experiment": _config_codec(Experiment),
    "profile": _config_codec(ProfileConfig),
    "reward_model": _config_codec(RewardModelConfig),
    "request": _Codec(Request, _encode_request, _decode_request),
    "prompt_row": _record_codec(PromptRow),
    "robot_episode": _record_codec(RobotEpisode),
    "rollout_request": _record_codec(RolloutRequest),
    "chunk_rates": _record_codec(ChunkRates),
    "engine_report": _record_codec(EngineReport),
    "group_address": _record_codec(GroupAddress),
    # one per weight in every weight sync, so without the generic code of a record
    "shared_tensor": _Codec(
        SharedTensor,
        attrgetter(*(each.name for each in fields(SharedTensor))),
        lambda v: SharedTensor(v[0], v[1], tuple(v[2]), *v[3:]),
    ),
    "env_request": _record_codec(EnvRequest),
    "env_event": _Codec(EnvEvent, event_text, event_from_text),
}


def encode(call: RemoteCall) -> tuple[bytes, list[Tensor]]:
    """Return the header of a call and its tensors.

    Raises:
        ValueError: the method is not a remote method, or an argument or a tensor has a type that cannot be sent.
    """
    _check_method(call.target, call.method)
    tensors: list[Tensor] = []
    arguments = {name: _to_json(value, tensors) for name, value in call.arguments.items()}
    header = {
        "target": call.target,
        "method": call.method,
        "arguments": arguments,
        "tensors": _tensor_specs(tensors),
        "broadcasts_tensors": call.broadcasts_tensors,
        "discards_result": call.discards_result,
    }
    return json.dumps(header).encode(), _on_host(tensors)


def encode_value(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return the header of a result and its tensors.

    Raises:
        ValueError: it has a type that cannot be sent.
    """
    tensors: list[Tensor] = []
    content = _to_json(value, tensors)
    return json.dumps({"value": content, "tensors": _tensor_specs(tensors)}).encode(), _on_host(tensors)


def decode_value(content: Any) -> tuple[list[Tensor], Callable[[], Any]]:
    """Return empty tensors to receive into, and a function that returns the result once they are filled; `content` is
    the JSON value of its header.

    Raises:
        ValueError: the header lists tensors of another type.
    """
    tensors = [_empty(dtype, shape) for dtype, shape in content["tensors"]]
    return tensors, lambda: _from_json(content["value"], tensors)


def _tensor_specs(tensors: Sequence[Tensor]) -> list[Any]:
    return [[_dtype_name(tensor), list(tensor.shape)] for tensor in tensors]


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().contiguous().cpu() for tensor in tensors]


def decode_header(content: Any) -> tuple[list[Tensor], Callable[[], RemoteCall]]:
    """Return empty tensors to receive into, and a function that returns the call once they are filled; `content` is the
    JSON value of its header.

    Raises:
        ValueError: the header is no call of a remote method, or lists tensors of another type.
    """
    if not isinstance(content, dict):
        raise ValueError("the header of a call is a JSON object")
    target, method = content.get("target"), content.get("method")
    if not isinstance(target, str) or not isinstance(method, str):
        raise ValueError(f"{target}.{method} is not a remote method")
    _check_method(target, method)
    tensors = [_empty(dtype, shape) for dtype, shape in content["tensors"]]
    broadcasts_tensors = bool(content.get("broadcasts_tensors"))

    def decoded() -> RemoteCall:
        arguments = {name: _from_json(value, tensors) for name, value in content["arguments"].items()}
        return RemoteCall(target, method, arguments, broadcasts_tensors, bool(content.get("discards_result")))

    return tensors, decoded


def _check_method(target: str, method: str) -> None:
    if (target, method) == (STOP.target, STOP.method):
        return
    protocol = REMOTE_OBJECTS.get(target)
    if protocol is None or method not in {**remote_methods(protocol), **properties_of(protocol)}:
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
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)))
        return {"array": len(tensors) - 1}
    if isinstance(value, Batch):
        return {"batch": {each.name: _to_json(getattr(value, each.name), tensors) for each in fields(Batch)}}
    if isinstance(value, ChunkBatch):
        return {"chunk_batch": {each.name: _to_json(getattr(value, each.name), tensors) for each in fields(ChunkBatch)}}
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
    if tag == "array":
        return tensors[content].numpy()
    if tag == "batch":
        return Batch(**{name: _from_json(item, tensors) for name, item in content.items()})
    if tag == "chunk_batch":
        return ChunkBatch(**{name: _from_json(item, tensors) for name, item in content.items()})
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


def broadcast_tensors(tensors: Sequence[Tensor], control_group: dist.ProcessGroup) -> None:
    """Send tensors on the host from rank 0 to all ranks of the group, which receive into theirs."""
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0, group=control_group)
