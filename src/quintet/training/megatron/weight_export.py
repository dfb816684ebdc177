"""Full Hugging Face weights from and to the sharded parameters of a Megatron model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from quintet.errors import MachineError
from quintet.training.megatron.conversion import (
    ModelDims,
    TensorMapping,
    from_hugging_face,
    join_shards,
    stacked_experts,
    take_shard,
    tensor_mapping,
    to_hugging_face,
)
from quintet.training.megatron.core_package import compute_device
from quintet.training.megatron.model import PackedGPT
from quintet.training.megatron.process_groups import MegatronRanks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
EXPERT = re.compile(r"(.+\.local_experts\.)(\d+)(\..+)")


def global_parameters(chunks: list[PackedGPT]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this process's parameters, with layers and experts numbered globally."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            match = LAYER.fullmatch(name)
            if match:
                layer = chunk.decoder.layers[int(match[2])].layer_number - 1
                name = f"{match[1]}{layer}{match[3]}"
            yield _with_global_expert(name, chunk), parameter


def _with_global_expert(name: str, chunk: PackedGPT) -> str:
    match = EXPERT.fullmatch(name)
    if match is None:
        return name
    per_rank = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{match[1]}{int(match[2]) + per_rank * parallel_state.get_expert_model_parallel_rank()}{match[3]}"


def _tensor_parallel_rank_and_size(name: str) -> tuple[int, int]:
    """Return rank and size of the group that shards the tensor's rows or columns."""
    if ".experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def local_shard(name: str, weights: Mapping[str, Tensor], shape: ModelDims) -> Tensor:
    """Return this process's shard of a Megatron tensor from Hugging Face weights, with experts one by one, as in files,
    or stacked, as in transformers' memory.

    Raises:
        KeyError: a weight is missing.
    """
    mapping, stack = _mapping(name, weights), stacked_experts(name)
    if stack is not None and stack[0] in weights:
        full = weights[stack[0]][stack[1]]
    else:
        full = from_hugging_face([weights[part] for part in mapping.hugging_face], mapping.layout, shape)
    return take_shard(full, mapping.layout, *_tensor_parallel_rank_and_size(name))


def _mapping(name: str, weights: Mapping[str, Tensor]) -> TensorMapping:
    """Return the mapping of a Megatron tensor; a tied head is the embedding."""
    mapping = tensor_mapping(name)
    if name == "output_layer.weight" and "lm_head.weight" not in weights:
        return TensorMapping(name, ("model.embed_tokens.weight",), mapping.layout)
    return mapping


@torch.no_grad()
def load_hf_weights(chunks: list[PackedGPT], weights: Mapping[str, Tensor], shape: ModelDims) -> None:
    """Load Hugging Face weights into this process's shards of the model.

    Raises:
        MachineError: a weight is missing or has another shape.
    """
    for name, parameter in global_parameters(chunks):
        if name.startswith("value_head.") and name not in weights:
            continue  # a critic created from a policy
        try:
            _copy_shard(name, parameter, weights, shape)
        except KeyError as error:
            raise MachineError(f"the weights lack {error}", "use the directory of a complete model") from error


def _copy_shard(name: str, parameter: nn.Parameter, weights: Mapping[str, Tensor], shape: ModelDims) -> None:
    shard = local_shard(name, weights, shape)
    if shard.shape != parameter.shape:
        raise MachineError(f"{name} has shape {list(shard.shape)}, the model expects {list(parameter.shape)}")
    parameter.copy_(shard)


@torch.no_grad()
def load_weight_stream(chunks: list[PackedGPT], weights: Iterable[tuple[str, Tensor]], shape: ModelDims) -> None:
    """Load the weights of another learner, full tensors one after the other, with experts stacked; each is kept only
    until the parameters that have a part of it are complete. A critic's value head is left as it is.

    Raises:
        MachineError: a weight is missing or has another shape.
    """
    is_tied = any(chunk.share_embeddings_and_output_weights for chunk in chunks)
    missing = {name: parameter for name, parameter in global_parameters(chunks) if not name.startswith("value_head.")}
    sources = {name: _source_names(name, is_tied=is_tied) for name in missing}
    users: dict[str, list[str]] = {}
    for name, names in sources.items():
        for source in names:
            users.setdefault(source, []).append(name)
    held: dict[str, Tensor] = {}
    for source, tensor in weights:
        held[source] = tensor
        for name in users.get(source, ()):
            if sources[name] <= held.keys():
                _copy_shard(name, missing.pop(name), held, shape)
        held = {
            source_name: loaded
            for source_name, loaded in held.items()
            if any(name in missing for name in users.get(source_name, ()))
        }
    if missing:
        raise MachineError(f"the weights lack {next(iter(missing))}", "start from a model of the same architecture")


def _source_names(name: str, *, is_tied: bool) -> set[str]:
    """Return the Hugging Face tensors in memory of which a Megatron tensor has a part."""
    if name == "output_layer.weight" and is_tied:
        return {"model.embed_tokens.weight"}
    stack = stacked_experts(name)
    return {stack[0]} if stack else set(tensor_mapping(name).hugging_face)


GetTensor = Callable[[nn.Parameter], Tensor]
"""Function that returns a parameter, or one of its moments in the same shape."""


class WeightGatherer:
    """Gathers full tensors from the processes that have shards of them. All processes create it together."""

    def __init__(self, chunks: list[PackedGPT], ranks: MegatronRanks) -> None:
        self._ranks = ranks
        with ranks.active():
            self._parameters = dict(global_parameters(chunks))
        last = chunks[-1]
        if last.share_embeddings_and_output_weights and not last.pre_process:
            self._parameters.pop("output_layer.weight", None)  # the last stage's copy of a tied embedding
        self._source_rank: dict[str, int] = {}
        for key in ranks.world.all_reduce_dict({f"{ranks.world.rank} {name}": 1.0 for name in self._parameters}):
            rank, name = key.split(" ")
            self._source_rank.setdefault(name, int(rank))
        self._is_on_all_ranks = len(set(self._source_rank.values())) == 1
        self._experts_per_stack = Counter(
            stack[0] for stack in map(stacked_experts, self._source_rank) if stack is not None
        )

    def gather(self, shape: ModelDims, get_tensor: GetTensor) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names on every process, layer by layer, with a layer's experts stacked
        as in transformers; all processes call it. A tensor may share memory with the parameter."""
        return self._ranks.iterate(self._gather(shape, get_tensor))

    def _gather(self, shape: ModelDims, get_tensor: GetTensor) -> Iterator[tuple[str, Tensor]]:
        stacked: dict[str, list[Tensor]] = {}
        for name in sorted(self._source_rank, key=_order):
            shard = get_tensor(self._parameters[name]) if name in self._parameters else None
            full = None if shard is None else _gather_tensor_parallel(name, shard)
            if not self._is_on_all_ranks:
                full = _broadcast(full, self._source_rank[name])
            if full is None:
                raise AssertionError(f"no process has {name}")
            mapping, stack = tensor_mapping(name), stacked_experts(name)
            if stack is not None:
                experts = stacked.setdefault(stack[0], [])
                experts.append(full)
                if len(experts) == self._experts_per_stack[stack[0]]:
                    yield stack[0], torch.stack(stacked.pop(stack[0]))
                continue
            yield from zip(mapping.hugging_face, to_hugging_face(full, mapping.layout, shape), strict=True)


def _order(name: str) -> tuple[int, ...]:
    """Sort key: embedding, layers with their experts in order, head."""
    numbers = tuple(int(number) for number in re.findall(r"\.(\d+)\.", name))
    return (1, *numbers) if numbers else (0 if name.startswith("embedding") else 2,)


def _gather_tensor_parallel(name: str, shard: Tensor) -> Tensor:
    """Return the full tensor from the shards of tensor-parallel ranks."""
    layout, (_, ranks) = tensor_mapping(name).layout, _tensor_parallel_rank_and_size(name)
    if ranks == 1 or layout == "replicated":
        return shard
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if ".experts." in name
        else parallel_state.get_tensor_model_parallel_group()
    )
    shards = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return join_shards(shards, layout)


def _broadcast(tensor: Tensor | None, source: int) -> Tensor:
    """Return the tensor of rank `source` on all ranks, which need not know its shape."""
    is_source = dist.get_rank() == source
    header = torch.zeros(4, dtype=torch.long, device=compute_device())
    if is_source and tensor is not None:
        header[: 2 + tensor.dim()] = torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape])
    dist.broadcast(header, source)
    dtype, dims, *shape = header.tolist()
    if is_source and tensor is not None:
        full = tensor.contiguous()
    else:
        full = torch.empty(shape[:dims], dtype=DTYPES[dtype], device=compute_device())
    dist.broadcast(full, source)
    return full
