"""Tensor parallelism (arXiv:1909.08053): the layers of a decoder split over ranks by torch's DTensor.

Queries, keys, values and the first half of the feed-forward network are split by columns, what follows them by rows,
embedding and head by vocabulary; norms are on all ranks. A model so split computes the same passes on the same tokens
in every rank, and each rank's attention function sees its own heads alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

from quintet.config.divisors import nearest_divisor
from quintet.errors import ConfigError
from quintet.policies.adapters import ADAPTER, is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quintet.policies.causal_lm import ValueModel

__all__ = ["FAMILIES", "full_weights", "refuse_split", "split_critic", "split_layers"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Kinds of decoders whose layers can be split, by `model_type`."""
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
EXPERTS = "mlp.experts"
"""Where a layer holds a mixture. It isn't split here: its experts are what `parallel.expert` shares out."""
TOKENS, HEADS = 1, 2
"""Dimensions of activations, [1, tokens, heads, dim] or [1, tokens, hidden]."""


class _Everywhere(ParallelStyle):
    """A module whose weights are on all ranks, and whose inputs lie as `placement` says."""

    def __init__(self, placement: Placement, output: Placement | None = None) -> None:
        super().__init__()
        self._placement, self._output = placement, output or placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch's types say that these give nothing; what they give takes the place of inputs and output
        take, give = cast(Any, self._take), cast(Any, self._give)
        return distribute_module(module, device_mesh, _on_all, take, give)

    def _take(self, module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        first = inputs[0]
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [self._placement], run_check=False)
        return (first, *inputs[1:])

    def _give(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[self._output]).to_local()


def _on_all(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters become DTensors without a word between ranks: all hold the same."""
    for own, parameter in list(module.named_parameters(recurse=False)):
        shared = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(own, nn.Parameter(shared, requires_grad=parameter.requires_grad))


def split_layers(model: PreTrainedModel, mesh: DeviceMesh, *, sequence: bool = False, component: str = "actor") -> None:
    """Split a causal language model over the ranks of a mesh of one dimension, all of which hold it whole and alike;
    its parameters become DTensors, so that each keeps its part alone. Head and embedding that are one stay one.

    With `sequence` norms and what stands between layers are split by tokens (arXiv:2205.05198); a pass then has to have
    a number of tokens that the ranks divide (`TokenSplit.multiple`). The head gives logits of its rank's vocabulary, as
    a DTensor; `token_measures` knows. `component` is whose configuration it is, as faults name it.

    Raises:
        ConfigError: the model can't be split so.
    """
    refuse_split(model, mesh.size(), component)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    _split_body(model.model, mesh, sequence=sequence)
    head = ColwiseParallel(input_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh, {"lm_head": head}, src_data_rank=None)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def split_critic(model: ValueModel, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """The same of a critic, whose head is on all ranks.

    Raises:
        ConfigError: the model can't be split so.
    """
    refuse_split(model.body, mesh.size(), "critic")
    _split_body(model.body, mesh, sequence=sequence)
    parallelize_module(model, mesh, {"head": _Everywhere(Replicate())}, src_data_rank=None)


def _split_body(body: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
    between: Placement = Shard(TOKENS) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "norm": _Everywhere(between, Replicate()),
    }
    parallelize_module(body, mesh, plan, src_data_rank=None)
    for layer in body.layers:
        parallelize_module(layer, mesh, _plan(layer, between), src_data_rank=None)


def _plan(layer: nn.Module, between: Placement) -> dict[str, ParallelStyle]:
    """How the parts of a layer lie; activations between layers lie as `between` says."""
    names = {name for name, _ in layer.named_modules()}
    plan: dict[str, ParallelStyle] = {}
    for name in filter(names.__contains__, COLUMNS):
        plan |= _columns(name) if f"{name}.base_layer" in names else {name: ColwiseParallel()}
    for name in filter(names.__contains__, ROWS):
        rows = RowwiseParallel(output_layouts=between)
        plan |= _rows(name, rows, between) if f"{name}.base_layer" in names else {name: rows}
    plan |= {name: _Everywhere(between) for name in ("input_layernorm", "post_attention_layernorm")}
    plan |= {name: _Everywhere(Shard(HEADS)) for name in ("self_attn.q_norm", "self_attn.k_norm") if name in names}
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    plan["mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    if EXPERTS in names:
        plan["mlp"] = PrepareModuleInputOutput(
            input_layouts=between,
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=between,
        )
    return plan


def _columns(name: str) -> dict[str, ParallelStyle]:
    """A layer with adapters: the second matrix is split as the layer is, the first is on all ranks."""
    return {
        f"{name}.base_layer": ColwiseParallel(),
        f"{name}.lora_A.{ADAPTER}": _Everywhere(Replicate()),
        f"{name}.lora_B.{ADAPTER}": ColwiseParallel(),
    }


def _rows(name: str, rows: RowwiseParallel, between: Placement) -> dict[str, ParallelStyle]:
    """A layer with adapters: the first matrix is split as the layer is, the second is on all ranks."""
    return {
        f"{name}.base_layer": rows,
        f"{name}.lora_A.{ADAPTER}": RowwiseParallel(),
        f"{name}.lora_B.{ADAPTER}": _Everywhere(Replicate(), between),
    }


def refuse_split(model: PreTrainedModel, ranks: int, component: str = "actor") -> None:
    """Hold a model against a degree of tensor parallelism before anything is split.

    Raises:
        ConfigError: so many ranks can't have equal parts of the model, or it isn't known how to split it.
    """
    key = f"{component}.parallel.tensor"
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"{key} = {ranks}: layers of {type(model).__name__} can't be split",
            key=key,
            value=ranks,
            hint=f"known are {', '.join(FAMILIES)}; nearest: {key}=1",
        )
    if any(is_adapted(end) for end in (model.get_input_embeddings(), model.get_output_embeddings())):
        raise ConfigError(
            f"{key} = {ranks}: an embedding or a head with adapters can't be split",
            key=key,
            value=ranks,
            hint=f"leave them out of policy.lora.target_modules, or set {key}=1",
        )
    for words, count in _counts(model, config):
        if count % ranks:
            near = nearest_divisor(count, ranks)
            raise ConfigError(
                f"{key} = {ranks} doesn't divide the {count} {words} of the model",
                key=key,
                value=ranks,
                hint=f"nearest: {key}={near}",
            )


def _counts(model: nn.Module, config: Any) -> Iterator[tuple[str, int]]:
    """What the ranks share out evenly."""
    yield "key-value heads", config.num_key_value_heads
    yield "attention heads", config.num_attention_heads
    if any(name.endswith("mlp.up_proj") for name, _ in model.named_modules()):
        yield "hidden units", config.intermediate_size


def full_weights(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole, one after the other; all ranks call it alike."""
    for name, tensor in parameters.items():
        held = tensor.detach()
        yield name, held.full_tensor() if isinstance(held, DTensor) else held
