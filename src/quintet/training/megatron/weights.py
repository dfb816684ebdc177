"""A Megatron model's tensors, whole and under Hugging Face names, whatever rank holds which part of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from quintet.errors import MachineError
from quintet.training.megatron.conversion import (
    Entry,
    Shape,
    cut,
    entry_of,
    from_hugging_face,
    join,
    stack_of,
    to_hugging_face,
)
from quintet.training.megatron.model import PackedGPT
from quintet.training.megatron.package import device
from quintet.training.ranks import Ranks

__all__ = ["Directory", "numbered_parameters", "own_part", "put_weights"]

KINDS = (torch.float32, torch.bfloat16, torch.float16)

NUMBER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
EXPERT = re.compile(r"(.+\.local_experts\.)(\d+)(\..+)")


def numbered_parameters(chunks: list[PackedGPT]) -> Iterator[tuple[str, nn.Parameter]]:
    """This process's parameters, with layers and experts numbered over all processes."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            found = NUMBER.fullmatch(name)
            if found:
                layer = chunk.decoder.layers[int(found[2])].layer_number - 1
                name = f"{found[1]}{layer}{found[3]}"
            yield _numbered_expert(name, chunk), parameter


def _numbered_expert(name: str, chunk: PackedGPT) -> str:
    found = EXPERT.fullmatch(name)
    if found is None:
        return name
    each = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{found[1]}{int(found[2]) + each * parallel_state.get_expert_model_parallel_rank()}{found[3]}"


def _sharers(name: str) -> tuple[int, int]:
    """Rank among, and number of, those that share out the tensor's rows or columns."""
    if ".experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def own_part(name: str, given: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """This process's part of the named tensor, from Hugging Face's: of experts one by one, as in files, or stacked, as
    transformers has them in memory.

    Raises:
        KeyError: one of those is missing.
    """
    entry, stack = _entry(name, given), stack_of(name)
    if stack is not None and stack[0] in given:
        whole = given[stack[0]][stack[1]]
    else:
        whole = from_hugging_face([given[part] for part in entry.hugging_face], entry.kind, shape)
    return cut(whole, entry.kind, *_sharers(name))


def _entry(name: str, given: Mapping[str, Tensor]) -> Entry:
    """What holds it; a tied head is the embedding."""
    entry = entry_of(name)
    if name == "output_layer.weight" and "lm_head.weight" not in given:
        return Entry(name, ("model.embed_tokens.weight",), entry.kind)
    return entry


@torch.no_grad()
def put_weights(chunks: list[PackedGPT], given: Mapping[str, Tensor], shape: Shape) -> None:
    """Hugging Face weights into this process's part of the model.

    Raises:
        MachineError: one is missing, or has another shape.
    """
    for name, parameter in numbered_parameters(chunks):
        if name.startswith("value_head.") and name not in given:
            continue  # a critic grown from a policy
        try:
            part = own_part(name, given, shape)
        except KeyError as error:
            raise MachineError(f"the weights lack {error}", "give the directory of a whole model") from error
        if part.shape != parameter.shape:
            raise MachineError(f"{name} is {list(part.shape)}, the model's is {list(parameter.shape)}")
        parameter.copy_(part)


Field = Callable[[nn.Parameter], Tensor]
"""What of a parameter is gathered: itself or one of its moments, as large as it is."""


class Directory:
    """Which process has which tensor; made by all of them together."""

    def __init__(self, chunks: list[PackedGPT], world: Ranks) -> None:
        self.own = dict(numbered_parameters(chunks))
        last = chunks[-1]
        if last.share_embeddings_and_output_weights and not last.pre_process:
            self.own.pop("output_layer.weight", None)  # the last stage's copy of a tied embedding
        self.source: dict[str, int] = {}
        for told in world.sum_values({f"{world.rank} {name}": 1.0 for name in self.own}):
            rank, name = told.split(" ")
            self.source.setdefault(name, int(rank))
        self._everywhere = len(set(self.source.values())) == 1
        self._stacks = Counter(stack[0] for stack in map(stack_of, self.source) if stack is not None)

    def gathered(self, shape: Shape, field: Field) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names on every process, one after the other, by layer, a layer's experts
        stacked as in other learners' models; all processes call it. What a process gets may be its own memory."""
        stacked: dict[str, list[Tensor]] = {}
        for name in sorted(self.source, key=_order):
            part = field(self.own[name]) if name in self.own else None
            whole = None if part is None else _over_tensor(name, part)
            if not self._everywhere:
                whole = _told(whole, self.source[name])
            if whole is None:
                raise AssertionError(f"nobody has {name}")
            entry, stack = entry_of(name), stack_of(name)
            if stack is not None:
                experts = stacked.setdefault(stack[0], [])
                experts.append(whole)
                if len(experts) == self._stacks[stack[0]]:
                    yield stack[0], torch.stack(stacked.pop(stack[0]))
                continue
            yield from zip(entry.hugging_face, to_hugging_face(whole, entry.kind, shape), strict=True)


def _order(name: str) -> tuple[int, ...]:
    """Embedding, layers with their experts in order, head."""
    numbers = tuple(int(number) for number in re.findall(r"\.(\d+)\.", name))
    return (1, *numbers) if numbers else (0 if name.startswith("embedding") else 2,)


def _over_tensor(name: str, part: Tensor) -> Tensor:
    """The whole of what tensor-parallel ranks have parts of."""
    kind, (_, ranks) = entry_of(name).kind, _sharers(name)
    if ranks == 1 or kind == "whole":
        return part
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if ".experts." in name
        else parallel_state.get_tensor_model_parallel_group()
    )
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return join(parts, kind)


def _told(whole: Tensor | None, source: int) -> Tensor:
    """A tensor of process `source`, on all; they may not know its shape."""
    has = dist.get_rank() == source
    head = torch.zeros(4, dtype=torch.long, device=device())
    if has and whole is not None:
        head[: 2 + whole.dim()] = torch.tensor([KINDS.index(whole.dtype), whole.dim(), *whole.shape])
    dist.broadcast(head, source)
    kind, size, *shape = head.tolist()
    told = (
        whole.contiguous()
        if has and whole is not None
        else torch.empty(shape[:size], dtype=KINDS[kind], device=device())
    )
    dist.broadcast(told, source)
    return told
