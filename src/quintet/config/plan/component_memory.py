"""Estimated memory of a component on one device, by formulas; nothing is loaded or measured.

Not included: CUDA context, communication buffers, fragmentation and graphs, together two to four GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from quintet.config.plan.batches import RankWorkload, max_sequence_tokens, rank_workload
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.placement import Component

if TYPE_CHECKING:
    from quintet.config.native.experiment import Experiment
    from quintet.config.native.policy import LoraConfig

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_STATES = {"adamw": 2, "sgd": 0, "muon": 1}
"""Optimizer states per weight."""
LOGIT_BYTES = 16
"""Per entry of predicted tokens × vocabulary: logits, log-probs, probabilities and their product, all float32
(`policies/causal_lm.py`, `log_probs_and_entropy`)."""
MAX_LOGITS_IN_MEMORY = 2**25
"""Entries computed at a time (`policies/causal_lm.py`)."""
HF_SLOTS_PER_REQUEST = 1.5
"""KV cache slots of the `hf` engine per request: one, and half a slot for cached prompts."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device."""

    weights: int = 0
    """Stored weights."""
    copies: int = 0
    """Weights gathered from other devices or cast for a forward pass."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def activation_bytes(shape: ModelShape, tokens: int, width: int, *, tensor: int = 1, sequence: bool = False) -> int:
    """Return the activations that one layer saves for its backward pass, at `width` bytes per number.

    Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count 34·h bytes per token for a layer with an MLP of width
    4·h in 16 bit. The same count for current layers, without dropout masks: inputs of both norms and both blocks (4·h),
    queries, keys, values and the attention output (2·q + 2·k), and four tensors of a gated MLP (4·m; all experts of a
    token). The attention matrix is not saved: flash attention recomputes it. Tensor parallelism (`tensor`) is as in
    their section 4.2.1, sequence parallelism (`sequence`) as in 4.2.2.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    replicated = 4 * shape.hidden
    sharded = 2 * queries + 2 * keys + 4 * shape.active_mlp
    return tokens * width * (replicated // (tensor if sequence else 1) + sharded // tensor)


def attention_bytes(shape: ModelShape, tokens: int, length: int, width: int, tensor: int = 1) -> int:
    """Return the attention matrix that eager attention saves in one layer: heads × tokens × sequence length."""
    return tokens * length * width * max(1, shape.heads // tensor)


def cache_bytes(shape: ModelShape, width: int, tensor: int = 1, pipeline: int = 1) -> int:
    """Return the KV cache of one token on one device: 2 × layers × key-value heads × head dimension × bytes."""
    return shape.cache_numbers(tensor) * width // pipeline


def lora_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Return the parameters of LoRA: rank × (inputs + outputs) per adapted layer. Experts have no adapters."""
    dense = shape.experts.dense_layers if shape.experts else shape.layers
    linears = [(shape.layers, shape.attention_linears), (dense, shape.mlp_linears)]
    all_linear = "all-linear" in lora.target_modules
    return sum(
        count * lora.rank * (inputs + outputs)
        for count, named in linears
        for name, (inputs, outputs) in named.items()
        if all_linear or name in lora.target_modules
    )


def _width(config: Experiment, shape: ModelShape, *types: str | None) -> int:
    """Return the bytes per number of the first type that is set, otherwise the policy's; `auto` is the model's."""
    dtype = next((dtype for dtype in types if dtype is not None), config.policy.dtype)
    return BYTES.get(shape.dtype if dtype == "auto" else dtype, 4)


def active_memory(
    config: Experiment, component: Component, shape: ModelShape, device_bytes: int | None = None
) -> MemoryUse:
    """Return the memory of a component while it computes; `device_bytes` is used for `memory_share` of an engine."""
    if component.name == "rollout":
        return _engine(config, component, shape, device_bytes)
    return _ESTIMATES[component.name](config, component, shape)


def idle_memory(config: Experiment, name: str, full: MemoryUse) -> MemoryUse:
    """Return the memory of a component while others compute on its devices."""
    if name == "rollout":
        options = config.rollout.engine_options
        cache = 0 if options.sleep_between_steps or options.offload else full.cache
        return MemoryUse(weights=0 if options.offload else full.weights, cache=cache)
    if name == "reward":
        model = config.reward.model if config.reward else None
        return MemoryUse(weights=0 if model and model.offload_parameters else full.weights)
    options = getattr(config, name).memory
    offloaded = options.offload_parameters and not (name == "actor" and _engine_shares_weights(config))
    return MemoryUse(
        weights=0 if offloaded else full.weights,
        optimizer=0 if options.offload_optimizer else full.optimizer,
    )


def _engine_shares_weights(config: Experiment) -> bool:
    """Return whether the embedded engine generates with the learner's weights, which then cannot be offloaded."""
    engine = config.rollout.engine_options.dtype or config.policy.dtype
    return config.rollout.engine == "hf" and engine == "float32"


def _device_parameters(component: Component, shape: ModelShape, parameters: int) -> int:
    """Return the parameters that one device computes with.

    Tensor and pipeline parallelism split the model, expert parallelism its experts. The first pipeline stage is the
    largest: it has the embedding.
    """
    parallelism = component.parallelism
    ends = shape.embedding + (shape.head if parallelism.pipeline == 1 else 0)
    routed = shape.routed
    layers = parameters - routed - shape.embedding - (shape.head if parameters > shape.body else 0)
    ends = min(ends, parameters - routed - layers)
    return (
        layers // parallelism.pipeline + routed // (parallelism.expert * parallelism.pipeline) + ends
    ) // parallelism.tensor


def _shards(config: Experiment, component: Component) -> int:
    """Return the number of devices that FSDP shards a component over."""
    devices = max(1, len(component.devices))
    sharding = getattr(config, component.name).sharding
    if sharding.policy == "no_shard":
        return 1
    node = config.placement.devices_per_node if sharding.policy == "hybrid_shard" else devices
    # ranks of a group hold the same slices of tensor-parallel layers
    group = component.parallelism.group
    return min(devices, group * component.parallelism.tensor if group else node)


def _learner(config: Experiment, component: Component, shape: ModelShape) -> MemoryUse:
    """Return the memory of a learner: states (`_fsdp`, `_megatron`), activations and logits."""
    learner = getattr(config, component.name)
    critic = component.name == "critic"
    parameters = shape.body + shape.hidden + 1 if critic else shape.parameters
    lora = None if critic else config.policy.lora
    trained = parameters if lora is None else lora_parameters(shape, lora)
    states = (_megatron if learner.backend == "megatron" else _fsdp)(config, component, shape, parameters, trained)
    work = rank_workload(config, component.name, component.copies)
    inference = rank_workload(config, component.name, component.copies, inference=True)
    predicted = max(work.predicted_tokens, inference.predicted_tokens if config.rollout.recompute_logprobs else 0)
    logits = 0 if critic else _logits(shape, component, predicted)
    return replace(states, activations=_activations(config, component, shape, work), logits=logits)


def _fsdp(config: Experiment, component: Component, shape: ModelShape, parameters: int, trained: int) -> MemoryUse:
    """Return the sharded states and the gathered weights of a learner under FSDP.

    States are weights, gradients and AdamW's two moments in float32, 16 bytes per parameter. Weights are gathered layer
    by layer, two at a time, embedding and head throughout; a device gathers its slice of tensor-parallel layers. On one
    device nothing is gathered, and only a narrower type needs a copy. Gradients are reduced after each micro-batch.
    Weights frozen by LoRA are float32 too, without gradients or moments.
    """
    learner, shards = getattr(config, component.name), _shards(config, component)
    width, lora = _width(config, shape, learner.sharding.parameter_dtype), trained < parameters
    gathered = 2 * shape.largest_layer + shape.embedding + shape.head
    if shards == 1:
        gathered = 0 if width == 4 or lora else parameters
    elif learner.sharding.policy == "shard_grad_op":
        gathered = parameters
    weights = 4 * (parameters + trained * lora) // shards
    summed = learner.sharding.reduce_dtype or learner.sharding.parameter_dtype
    sums = 0 if shards == 1 or lora else shape.largest_layer * _width(config, shape, summed)
    on_device = not learner.memory.sharded_offload
    return MemoryUse(
        weights=weights * on_device,
        copies=min(gathered, parameters) * width // component.parallelism.tensor,
        gradients=sums + 4 * trained // shards * on_device,
        optimizer=4 * OPTIMIZER_STATES[learner.optimizer.kind] * trained // shards * on_device,
    )


def _megatron(config: Experiment, component: Component, shape: ModelShape, parameters: int, trained: int) -> MemoryUse:
    """Return weights in the policy's type, float32 gradients, and float32 master weights with AdamW's two moments; the
    distributed optimizer shards the latter over data-parallel ranks."""
    learner, parallelism = getattr(config, component.name), component.parallelism
    width = _width(config, shape)
    parameters_here = _device_parameters(component, shape, parameters)
    trained_here = parameters_here * trained // parameters
    options = learner.megatron
    ranks = component.copies * parallelism.context if options and options.use_distributed_optimizer else 1
    states = 4 * OPTIMIZER_STATES[learner.optimizer.kind] + (0 if width == 4 else 4)
    adapters = trained_here if trained < parameters else 0
    return MemoryUse(
        weights=(parameters_here + adapters) * width,
        gradients=4 * trained_here,
        optimizer=states * trained_here // ranks,
    )


def _activations(config: Experiment, component: Component, shape: ModelShape, work: RankWorkload) -> int:
    """Return the activations saved by all layers for one micro-batch.

    Activation checkpointing saves the input of each layer and recomputes one layer at a time. The first pipeline stage
    has as many micro-batches in flight as there are stages, which equals all layers for one micro-batch.
    """
    learner, parallelism = getattr(config, component.name), component.parallelism
    tokens = -(-work.tokens // (parallelism.context * parallelism.ulysses))
    width = _width(config, shape, learner.sharding.parameter_dtype)
    layer = activation_bytes(shape, tokens, width, tensor=parallelism.tensor, sequence=learner.parallel.sequence)
    if config.policy.attention == "eager":
        layer += attention_bytes(
            shape, tokens, max_sequence_tokens(config), width, parallelism.tensor * parallelism.ulysses
        )
    saved, recomputed = _saved_layers(config, component.name, shape)
    if learner.memory.offload_activations:
        return 2 * layer
    return layer * (saved + recomputed) + tokens * shape.hidden * width * (shape.layers - saved)


def _saved_layers(config: Experiment, name: str, shape: ModelShape) -> tuple[int, int]:
    """Return the number of layers with saved activations, and of those recomputed at a time."""
    learner = getattr(config, name)
    options = learner.megatron
    if learner.backend == "megatron" and options and options.recompute_granularity == "full":
        count = min(options.recompute_num_layers or 1, shape.layers)
        return (shape.layers - count, 1) if options.recompute_method == "block" else (0, count)
    setting = learner.gradient_checkpointing
    recompute = config.actor.gradient_checkpointing if setting is None else setting
    return (0, 1) if recompute else (shape.layers, 0)


def _logits(shape: ModelShape, component: Component, predicted_tokens: int) -> int:
    parallelism = component.parallelism
    entries = -(-predicted_tokens // (parallelism.context * parallelism.ulysses)) * (
        shape.vocabulary // parallelism.tensor
    )
    return min(entries, MAX_LOGITS_IN_MEMORY) * LOGIT_BYTES


def _reference(config: Experiment, component: Component, shape: ModelShape) -> MemoryUse:
    """Return the memory of the reference: weights, activations of one layer and logits. In one process it is a copy of
    the learner's float32 weights."""
    learner, parallelism = config.reference, component.parallelism
    megatron = learner.backend == "megatron"
    single_process = len(component.devices) == 1 and not megatron and learner.dtype is None
    width = 4 if single_process else _width(config, shape, learner.dtype)
    shards = 1 if megatron else _shards(config, component)
    parameters_here = _device_parameters(component, shape, shape.parameters)
    if config.policy.lora is not None and learner.path is None:
        # the policy's weights with a copy of the initial adapters
        parameters_here = lora_parameters(shape, config.policy.lora)
    gathered = 0 if shards == 1 else min(2 * shape.largest_layer + shape.embedding + shape.head, parameters_here)
    work = rank_workload(config, "reference", component.copies, inference=True)
    tokens = -(-work.tokens // (parallelism.context * parallelism.ulysses))
    return MemoryUse(
        weights=0 if learner.memory.sharded_offload else parameters_here * width // shards,
        copies=gathered * width,
        activations=activation_bytes(shape, tokens, width, tensor=parallelism.tensor),
        logits=_logits(shape, component, work.predicted_tokens),
    )


def _reward(config: Experiment, component: Component, shape: ModelShape) -> MemoryUse:
    """Return the memory of the reward model, sharded over its devices."""
    model = config.reward.model if config.reward else None
    width, devices = _width(config, shape), max(1, len(component.devices))
    length = (model.max_tokens if model else None) or max_sequence_tokens(config)
    tokens = length * ((model.sequences_per_pass if model else None) or 1)
    gathered = 0 if devices == 1 else min(2 * shape.largest_layer + shape.embedding, shape.body)
    return MemoryUse(
        weights=shape.body * width // devices,
        copies=gathered * width,
        activations=activation_bytes(shape, tokens, width),
    )


_ESTIMATES: Mapping[str, Callable[[Experiment, Component, ModelShape], MemoryUse]] = {
    "actor": _learner,
    "critic": _learner,
    "reference": _reference,
    "reward": _reward,
}


def _engine(config: Experiment, component: Component, shape: ModelShape, device_bytes: int | None) -> MemoryUse:
    """Return the weights of an engine and the KV cache of its concurrent requests.

    If `memory_share` and the size of the device are known, an engine takes exactly that share. The `hf` engine
    generates with the learner's weights if those are float32.
    """
    options, parallelism = config.rollout.engine_options, component.parallelism
    width = _width(config, shape, options.dtype)
    weights = shape.parameters // (parallelism.tensor * parallelism.pipeline) * width
    budget = None if options.memory_share is None or device_bytes is None else int(options.memory_share * device_bytes)
    tokens = min(options.max_model_tokens or max_sequence_tokens(config), max_sequence_tokens(config))
    cache_per_request = tokens * cache_bytes(shape, width, parallelism.tensor, parallelism.pipeline)
    slots = config.rollout.max_concurrent
    if options.prompts_per_device is not None:
        slots = min(slots, options.prompts_per_device * config.training.samples_per_group)
    if config.rollout.engine == "hf":
        cache_per_request = int(HF_SLOTS_PER_REQUEST * cache_per_request)
        slots = slots if budget is None else max(0, min(slots, (budget - weights) // cache_per_request))
        shared = len(component.devices) == 1 and width == 4
        return MemoryUse(weights=0 if shared else weights, cache=slots * cache_per_request)
    episodes = config.training.groups_per_step * config.training.samples_per_group
    cache = min(slots, -(-episodes // component.copies)) * cache_per_request
    return MemoryUse(weights=weights, cache=cache if budget is None else max(0, budget - weights))
