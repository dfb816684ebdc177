"""Tensor parallelism (arXiv:1909.08053) of a decoder's layers, by torch's DTensor.

Query, key, value, gate and up projections are sharded by columns, output and down projections by rows, embedding and
head by vocabulary; norms are replicated. All ranks run the same passes on the same tokens, and each rank's attention
function receives the rank's heads. All ranks run the vision encoder of a vision-language model on all images of a pass,
with whole layers: its heads and widths need not be divisible, and the gradients of its features are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup
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
from quintet.policies.lora import ADAPTER_NAME, has_adapters
from quintet.policies.parallel.collectives import copy_to_group
from quintet.policies.vision.image_encoder import text_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quintet.policies.causal_lm import ValueModel

SUPPORTED_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
)
"""`model_type` of the decoders whose layers can be sharded."""
COLWISE_MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE_MODULES = ("self_attn.o_proj", "mlp.down_proj")
EXPERTS_MODULE = "mlp.experts"
"""Experts of a layer. They are not sharded here but by `parallel.expert`."""
TOKENS_DIM, HEADS_DIM = 1, 2
"""Dimensions of activations, [1, tokens, heads, dim] or [1, tokens, hidden]."""


class _ReplicatedWeights(ParallelStyle):
    """Parallel style of a module with replicated weights and inputs of a given placement."""

    def __init__(self, placement: Placement, output: Placement | None = None) -> None:
        super().__init__()
        self._placement, self._output = placement, output or placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch annotates these hooks to return None, but uses their results as inputs and output
        prepare_input, prepare_output = cast(Any, self._prepare_input), cast(Any, self._prepare_output)
        return distribute_module(module, device_mesh, _replicate_parameters, prepare_input, prepare_output)

    def _prepare_input(self, module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        first = inputs[0]
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [self._placement], run_check=False)
        return (first, *inputs[1:])

    def _prepare_output(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[self._output]).to_local()


def _replicate_parameters(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn parameters, equal on all ranks, into replicated DTensors without communication."""
    for parameter_name, parameter in list(module.named_parameters(recurse=False)):
        replicated = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(parameter_name, nn.Parameter(replicated, requires_grad=parameter.requires_grad))


def apply_tensor_parallel(
    model: PreTrainedModel, mesh: DeviceMesh, *, sequence: bool = False, component: str = "actor"
) -> None:
    """Shard a causal language model over the ranks of a 1-D mesh, in place; parameters become DTensors.

    All ranks must hold the same full model. A head tied to the embedding stays tied and returns vocabulary-parallel
    logits as a DTensor, which `compute_token_statistics` supports. With `sequence`, norms and the activations between
    layers are sharded by tokens (arXiv:2205.05198); the number of tokens of a pass must then be divisible by the number
    of ranks (`TokenSharding.pad_multiple`). `component` is the learner whose configuration error messages name.

    Raises:
        ConfigError: the model cannot be sharded over this number of ranks.
    """
    check_tensor_parallel(model, mesh.size(), component)
    decoder: Any = text_decoder(model.model)
    is_tied = model.lm_head.weight is decoder.embed_tokens.weight
    _parallelize_body(model.model, mesh, sequence=sequence)
    head = ColwiseParallel(input_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh, {"lm_head": head}, src_data_rank=None)
    if is_tied:
        model.lm_head.weight = decoder.embed_tokens.weight


def apply_tensor_parallel_to_critic(model: ValueModel, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Shard a critic as `apply_tensor_parallel` shards a policy; its head is replicated.

    Raises:
        ConfigError: the model cannot be sharded over this number of ranks.
    """
    check_tensor_parallel(model.body, mesh.size(), "critic")
    _parallelize_body(model.body, mesh, sequence=sequence)
    parallelize_module(model, mesh, {"head": _ReplicatedWeights(Replicate())}, src_data_rank=None)


def _parallelize_body(body: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    decoder: Any = text_decoder(body)
    activations: Placement = Shard(TOKENS_DIM) if sequence else Replicate()
    shows_images = decoder is not body
    embeddings = Replicate() if shows_images else activations
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=embeddings),
        "norm": _ReplicatedWeights(activations, Replicate()),
    }
    parallelize_module(decoder, mesh, plan, src_data_rank=None)
    for layer in decoder.layers:
        parallelize_module(layer, mesh, _layer_plan(layer, activations), src_data_rank=None)
    if sequence and shows_images:
        _split_embeddings_with_images(decoder, mesh)


def _split_embeddings_with_images(decoder: Any, mesh: DeviceMesh) -> None:
    """Shard embeddings by tokens after the features of images are among them, and the features that are added to the
    states of further layers (deepstack) with these states."""
    split = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(TOKENS_DIM), use_local_output=True
    )
    parallelize_module(decoder.layers[0], mesh, split)
    add_features = getattr(decoder, "_deepstack_process", None)
    if add_features is None:
        return

    def add_local_features(states: Tensor, is_image: Tensor, features: Tensor) -> Tensor:
        local_mask, local_features = _local_features(states.shape[TOKENS_DIM], is_image, features, mesh.get_group())
        out: Tensor = add_features(states, local_mask, local_features)
        return out

    decoder._deepstack_process = add_local_features


def _local_features(tokens: int, is_image: Tensor, features: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return mask [1, tokens] and features of the image tokens among this rank's `tokens`, for `is_image`, bool
    [1, P], and `features` [k, hidden] of all."""
    start = group.rank() * tokens
    local = is_image[:, start : start + tokens]
    first = int(is_image[:, :start].sum())
    return local, copy_to_group(features, group)[first : first + int(local.sum())]


def _layer_plan(layer: nn.Module, activations: Placement) -> dict[str, ParallelStyle]:
    """Return the parallel styles of a layer's modules; `activations` is the placement between layers."""
    names = {name for name, _ in layer.named_modules()}
    plan: dict[str, ParallelStyle] = {}
    for name in filter(names.__contains__, COLWISE_MODULES):
        plan |= _colwise_with_lora(name) if f"{name}.base_layer" in names else {name: ColwiseParallel()}
    for name in filter(names.__contains__, ROWWISE_MODULES):
        style = RowwiseParallel(output_layouts=activations)
        plan |= _rowwise_with_lora(name, style, activations) if f"{name}.base_layer" in names else {name: style}
    plan |= {name: _ReplicatedWeights(activations) for name in ("input_layernorm", "post_attention_layernorm")}
    plan |= {
        name: _ReplicatedWeights(Shard(HEADS_DIM)) for name in ("self_attn.q_norm", "self_attn.k_norm") if name in names
    }
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": activations}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    plan["mlp"] = PrepareModuleInput(input_layouts=activations, desired_input_layouts=Replicate())
    if EXPERTS_MODULE in names:
        plan["mlp"] = PrepareModuleInputOutput(
            input_layouts=activations,
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=activations,
        )
    return plan


def _colwise_with_lora(name: str) -> dict[str, ParallelStyle]:
    """Column-wise linear layer with LoRA: B is sharded like the layer, A is replicated."""
    return {
        f"{name}.base_layer": ColwiseParallel(),
        f"{name}.lora_A.{ADAPTER_NAME}": _ReplicatedWeights(Replicate()),
        f"{name}.lora_B.{ADAPTER_NAME}": ColwiseParallel(),
    }


def _rowwise_with_lora(name: str, style: RowwiseParallel, activations: Placement) -> dict[str, ParallelStyle]:
    """Row-wise linear layer with LoRA: A is sharded like the layer, B is replicated."""
    return {
        f"{name}.base_layer": style,
        f"{name}.lora_A.{ADAPTER_NAME}": RowwiseParallel(),
        f"{name}.lora_B.{ADAPTER_NAME}": _ReplicatedWeights(Replicate(), activations),
    }


def check_tensor_parallel(model: PreTrainedModel, ranks: int, component: str = "actor") -> None:
    """Check that a model can be sharded over `ranks` before anything is changed.

    Raises:
        ConfigError: the model's sizes are not divisible by `ranks`, or its architecture is not supported.
    """
    key = f"{component}.parallel.tensor"
    config = model.config.get_text_config()
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{key} = {ranks}: tensor parallelism does not support {type(model).__name__}",
            key=key,
            value=ranks,
            hint=f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}; else set {key}=1",
        )
    if any(has_adapters(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())):
        raise ConfigError(
            f"{key} = {ranks}: an embedding or head with LoRA adapters cannot be sharded",
            key=key,
            value=ranks,
            hint=f"remove them from policy.lora.target_modules, or set {key}=1",
        )
    for description, count in _iter_divided_sizes(model, config):
        if count % ranks:
            nearest = nearest_divisor(gcd(*(other for _, other in _iter_divided_sizes(model, config))), ranks)
            raise ConfigError(
                f"{key} = {ranks} does not divide the {count} {description} of the model",
                key=key,
                value=ranks,
                hint=f"nearest valid value: {key}={nearest}",
            )


def _iter_divided_sizes(model: nn.Module, config: Any) -> Iterator[tuple[str, int]]:
    yield "key-value heads", config.num_key_value_heads
    yield "attention heads", config.num_attention_heads
    if any(name.endswith("mlp.up_proj") for name, _ in model.named_modules()):
        yield "hidden units", config.intermediate_size
