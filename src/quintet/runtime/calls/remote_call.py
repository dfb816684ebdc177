"""Calls from the controller to workers, their encoding as JSON and tensors, and results likewise.

A call is sent as a JSON header followed by its tensors, whose dtypes and shapes the header lists. Only methods of
`REMOTE_OBJECTS` and values of the types below can be sent: nothing that is received is executed or unpickled, and what
names code of a file or module is given to a check before it is used (`runtime/calls/code_check.py`).
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from quintet.config.native.section import Section
from quintet.config.native.tracking import ProfileConfig
from quintet.config.native.training import DistillationConfig
from quintet.embodied_records import ChunkBatch, RobotEpisode, RolloutRequest
from quintet.envs.event_messages import event_from_text, event_text
from quintet.envs.hosted_envs import EnvRequest
from quintet.envs.vector_env import EnvEvent
from quintet.hardware import memory_bytes
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
MAX_TENSORS = 1 << 20
"""Tensors of a message; a model has fewer weights. All together must fit into the memory of the machine."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError)
"""What decoding raises, besides ValueError, if a message is not what `encode` writes."""
SectionType = type[Section]
CheckReceived = Callable[[Section | Path], None]
"""Raises a `MachineError` for a path or a section of the configuration that would run code which may not be run."""


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
    section: SectionType | None = None
    """Section of the configuration that the value is decoded from, instead of JSON."""


def _config_codec(config: type[Section]) -> _Codec:
    return _Codec(config, _encode_section, lambda section: section, config)


def _encode_section(section: Section) -> Any:
    return section.model_dump(mode="json")


def _decode_reference(target: str) -> RemoteRef:
    if target not in REMOTE_OBJECTS:
        raise ValueError(f"{target!r:.200} is not a remote object")
    return RemoteRef(target)


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


_CODECS: Mapping[str, _Codec] = {
    "path": _Codec(Path, lambda path: str(path.absolute()), Path),
    "remote": _Codec(RemoteRef, lambda ref: ref.target, _decode_reference),
    "aggregation": _Codec(Aggregation, asdict, lambda value: Aggregation(**value)),
    "imitation": _Codec(CrossEntropyObjective, lambda _: None, lambda _: CrossEntropyObjective()),
    "distillation": _Codec(
        DistillationObjective,
        lambda value: _encode_section(value.config),
        DistillationObjective,
        DistillationConfig,
    ),
    "policy_objective": _Codec(
        PolicyObjective, lambda value: _encode_section(value.config), PolicyObjective, AlgorithmConfig
    ),
    "critic_objective": _Codec(
        CriticObjective, lambda value: _encode_section(value.config), CriticObjective, CriticConfig
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
        lambda v: SharedTensor(v[0], v[1], tuple(v[2]), *v[3:]),  # checked where the file is opened
    ),
    "env_request": _record_codec(EnvRequest),
    "env_event": _Codec(EnvEvent, event_text, event_from_text),
}


_MAPPINGS: Mapping[str, Callable[..., Any]] = {"batch": Batch, "chunk_batch": ChunkBatch, "mapping": dict}
"""What is encoded as values by name."""


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


def decode_value(content: Any, check: CheckReceived) -> tuple[list[Tensor], Callable[[], Any]]:
    """Return empty tensors to receive into, and a function that returns the result once they are filled; `content` is
    the JSON value of its header. Both raise as `decode_header` does."""
    with _malformed():
        tensors = _empty_tensors(content["tensors"])

    def decoded() -> Any:
        with _malformed():
            return _from_json(content["value"], tensors, check)

    return tensors, decoded


@contextmanager
def _malformed() -> Iterator[None]:
    """
    Raises:
        ValueError: what is decoded is not what `encode` writes.
    """
    try:
        yield
    except MALFORMED as error:
        raise ValueError(f"received a message of another form ({type(error).__name__}: {error!s:.200})") from error


def _tensor_specs(tensors: Sequence[Tensor]) -> list[Any]:
    return [[_dtype_name(tensor), list(tensor.shape)] for tensor in tensors]


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().contiguous().cpu() for tensor in tensors]


def decode_header(content: Any, check: CheckReceived) -> tuple[list[Tensor], Callable[[], RemoteCall]]:
    """Return empty tensors to receive into, and a function that returns the call once they are filled; `content` is the
    JSON value of its header.

    Raises:
        ValueError: the header is no call of a remote method, or lists tensors of another type or too many.
        MachineError: the call would run code that may not be run (`check`).
    """
    if not isinstance(content, dict):
        raise ValueError("the header of a call is a JSON object")
    target, method = content.get("target"), content.get("method")
    if not isinstance(target, str) or not isinstance(method, str):
        raise ValueError(f"{target}.{method} is not a remote method")
    _check_method(target, method)
    with _malformed():
        tensors = _empty_tensors(content["tensors"])
    broadcasts_tensors = bool(content.get("broadcasts_tensors"))

    def decoded() -> RemoteCall:
        with _malformed():
            arguments = {name: _from_json(value, tensors, check) for name, value in content["arguments"].items()}
        return RemoteCall(target, method, arguments, broadcasts_tensors, bool(content.get("discards_result")))

    return tensors, decoded


def _check_method(target: str, method: str) -> None:
    if (target, method) == (STOP.target, STOP.method):
        return
    protocol = REMOTE_OBJECTS.get(target)
    if protocol is None or method not in {**remote_methods(protocol), **properties_of(protocol)}:
        raise ValueError(f"{target:.200}.{method:.200} is not a remote method")


def _empty_tensors(specs: Sequence[Any]) -> list[Tensor]:
    """Return tensors of these types and shapes. Memory that nothing is written to is none, so that the other end has to
    send what it makes this process use."""
    if len(specs) > MAX_TENSORS:
        raise ValueError(f"a message with {len(specs):,} tensors")
    count = sum(_num_bytes(*spec) for spec in specs)
    if count > memory_bytes():
        raise ValueError(f"a message of {count:,} bytes, more than this machine has")
    return [torch.empty(shape, dtype=DTYPES[dtype]) for dtype, shape in specs]


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"tensors of {dtype!r:.200} cannot be received")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape!r:.200}")
    return math.prod(shape) * DTYPES[dtype].itemsize


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


def _from_json(value: Any, tensors: Sequence[Tensor], check: CheckReceived) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "array":
        return tensors[content].numpy()
    if tag == "list":
        return [_from_json(item, tensors, check) for item in content]
    if tag in _MAPPINGS:
        return _MAPPINGS[tag](**{name: _from_json(item, tensors, check) for name, item in content.items()})
    codec = _CODECS[tag]
    if codec.section is None:
        decoded = codec.decode(content)
        if isinstance(decoded, Path):
            check(decoded)
        return decoded
    section = codec.section.model_validate(content, strict=False)
    check(section)  # first: an objective loads the function that its section names
    return codec.decode(section)


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
