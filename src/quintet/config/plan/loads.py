"""Bytes that a component takes of one device, by formulas; nothing is loaded or measured.

Not counted: the CUDA context, communication buffers, fragmentation and graphs, together two to four GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from quintet.config.plan.batches import Share, longest, share
from quintet.config.plan.placement import Component
from quintet.config.plan.shapes import Shape

if TYPE_CHECKING:
    from quintet.config.native import Experiment
    from quintet.config.native.policy import LoraConfig

__all__ = ["Load", "activation_bytes", "adapters", "attention_bytes", "cache_bytes", "idle_load", "working_load"]

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS = {"adamw": 2, "sgd": 0, "muon": 1}
"""Numbers that an optimizer keeps of each weight."""
LOGIT_BYTES = 16
"""Of each entry of predicted places × vocabulary: logits, log-probs, probabilities and their product, all float32
(`policies/causal_lm.py`, `token_statistics`)."""
LOGITS_AT_ONCE = 2**25
"""Entries that are made at a time (`policies/causal_lm.py`)."""
SLOTS = 1.5
"""Slots of the `hf` engine's cache for each request: its own, and half a one for prompts that are kept."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes on one device."""

    weights: int = 0
    """As they lie there all the time."""
    copies: int = 0
    """Weights as a pass multiplies with them, gathered from other devices or in a narrower type."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def activation_bytes(shape: Shape, tokens: int, width: int, *, tensor: int = 1, sequence: bool = False) -> int:
    """What one layer keeps of so many tokens for its backward pass, `width` bytes a number.

    Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count 34·h bytes a token for a layer whose feed-forward
    part is 4·h wide, in 16 bit. The same count for layers as they are now, without dropout masks: the inputs of both
    norms and both parts (4·h), queries, keys, values and attention's result (2·q + 2·k), and four tensors of a gated
    feed-forward part (4·m; all experts that see the token). The attention matrix isn't kept: flash attention makes it
    anew. What `tensor` splits is their section 4.2.1, `sequence` their 4.2.2.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    whole = 4 * shape.hidden
    split = 2 * queries + 2 * keys + 4 * shape.active_mlp
    return tokens * width * (whole // (tensor if sequence else 1) + split // tensor)


def attention_bytes(shape: Shape, tokens: int, length: int, width: int, tensor: int = 1) -> int:
    """The matrix that plain attention keeps in one layer: heads × tokens × the sequence's length."""
    return tokens * length * width * max(1, shape.heads // tensor)


def cache_bytes(shape: Shape, width: int, tensor: int = 1, pipeline: int = 1) -> int:
    """Keys and values of one token on one device: 2 × layers × key-value heads × head dimension × bytes."""
    return shape.cache_numbers(tensor) * width // pipeline


def adapters(shape: Shape, lora: LoraConfig) -> int:
    """Parameters of LoRA: rank × (inputs + outputs) of each adapted layer. Experts have none."""
    dense = shape.experts.dense_layers if shape.experts else shape.layers
    linears = [(shape.layers, shape.attention_linears), (dense, shape.mlp_linears)]
    everything = "all-linear" in lora.target_modules
    return sum(
        count * lora.rank * (inputs + outputs)
        for count, named in linears
        for name, (inputs, outputs) in named.items()
        if everything or name in lora.target_modules
    )


def _width(config: Experiment, shape: Shape, *types: str | None) -> int:
    """Bytes of a number: of the first type that is given, else the policy's; `auto` is the model's own."""
    first = next((one for one in types if one is not None), config.policy.dtype)
    return BYTES.get(shape.dtype if first == "auto" else first, 4)


def working_load(config: Experiment, component: Component, shape: Shape, device_bytes: int | None = None) -> Load:
    """A component at its fullest; `device_bytes` is what an engine takes its share of."""
    if component.name == "rollout":
        return _engine(config, component, shape, device_bytes)
    return _LOADS[component.name](config, component, shape)


def idle_load(config: Experiment, name: str, full: Load) -> Load:
    """What it holds while others compute."""
    if name == "rollout":
        options = config.rollout.engine_options
        cache = 0 if options.sleep_between_steps or options.offload else full.cache
        return Load(weights=0 if options.offload else full.weights, cache=cache)
    if name == "reward":
        model = config.reward.model if config.reward else None
        return Load(weights=0 if model and model.offload_parameters else full.weights)
    moved = getattr(config, name).memory
    away = moved.offload_parameters and not (name == "actor" and _played_in_place(config))
    return Load(
        weights=0 if away else full.weights,
        optimizer=0 if moved.offload_optimizer else full.optimizer,
    )


def _played_in_place(config: Experiment) -> bool:
    """Whether the embedded engine plays with the learner's own weights, which then stay where they are."""
    engine = config.rollout.engine_options.dtype or config.policy.dtype
    return config.rollout.engine == "hf" and engine == "float32"


def _own(component: Component, shape: Shape, parameters: int) -> int:
    """Parameters that one device computes with: tensor and pipeline parallelism split the model, expert parallelism
    its experts. Of a pipeline's stages the first has most: the whole embedding."""
    split = component.split
    ends = shape.embedding + (shape.head if split.pipeline == 1 else 0)
    routed = shape.routed
    between = parameters - routed - shape.embedding - (shape.head if parameters > shape.body else 0)
    ends = min(ends, parameters - routed - between)
    return (between // split.pipeline + routed // (split.expert * split.pipeline) + ends) // split.tensor


def _shards(config: Experiment, component: Component) -> int:
    """Devices among which FSDP cuts a component up."""
    devices = max(1, len(component.devices))
    sharding = getattr(config, component.name).sharding
    if sharding.policy == "no_shard":
        return 1
    node = config.placement.devices_per_node if sharding.policy == "hybrid_shard" else devices
    # a group's ranks hold the same parts of layers that are split
    own = component.split.group
    return min(devices, own * component.split.tensor if own else node)


def _learner(config: Experiment, component: Component, shape: Shape) -> Load:
    """A model that learns: see `_fsdp` and `_megatron` for what is kept, `_activations` for passes."""
    learner = getattr(config, component.name)
    critic = component.name == "critic"
    parameters = shape.body + shape.hidden + 1 if critic else shape.parameters
    lora = None if critic else config.policy.lora
    trained = parameters if lora is None else adapters(shape, lora)
    load = (_megatron if learner.backend == "megatron" else _fsdp)(config, component, shape, parameters, trained)
    work = share(config, component.name, component.copies)
    again = share(config, component.name, component.copies, inference=True)
    places = max(work.places, again.places if config.rollout.recompute_logprobs else 0)
    logits = 0 if critic else _logits(shape, component, places)
    return replace(load, activations=_activations(config, component, shape, work), logits=logits)


def _fsdp(config: Experiment, component: Component, shape: Shape, parameters: int, trained: int) -> Load:
    """Weights, gradients and AdamW's two moments in float32, 16 bytes a parameter, cut into shards; besides them the
    copy in which a pass multiplies: gathered layer by layer, two at a time, embedding and head all along. On one
    device nothing is gathered, and only a narrower type makes a copy. Gradients are summed over devices after each
    micro-batch. Weights that LoRA leaves alone are kept in float32 too, without gradients or moments. Of layers that
    are split a device gathers its part."""
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
    return Load(
        weights=weights * on_device,
        copies=min(gathered, parameters) * width // component.split.tensor,
        gradients=sums + 4 * trained // shards * on_device,
        optimizer=4 * MOMENTS[learner.optimizer.kind] * trained // shards * on_device,
    )


def _megatron(config: Experiment, component: Component, shape: Shape, parameters: int, trained: int) -> Load:
    """Weights in the type of the policy, gradients in float32, and float32 masters with AdamW's two moments; the
    latter are cut up among data-parallel ranks by the distributed optimizer."""
    learner, split = getattr(config, component.name), component.split
    width = _width(config, shape)
    own = _own(component, shape, parameters)
    learnt = own * trained // parameters
    options = learner.megatron
    ranks = component.copies * split.context if options and options.use_distributed_optimizer else 1
    states = 4 * MOMENTS[learner.optimizer.kind] + (0 if width == 4 else 4)
    added = learnt if trained < parameters else 0
    return Load(weights=(own + added) * width, gradients=4 * learnt, optimizer=states * learnt // ranks)


def _activations(config: Experiment, component: Component, shape: Shape, work: Share) -> int:
    """What the layers keep of one pass.

    Recomputing keeps the input of each layer and makes one layer anew at a time. A pipeline's first stage has as many
    micro-batches under way as there are stages, which is what all layers would keep of one.
    """
    learner, split = getattr(config, component.name), component.split
    tokens = -(-work.tokens // (split.context * split.ulysses))
    width = _width(config, shape, learner.sharding.parameter_dtype)
    layer = activation_bytes(shape, tokens, width, tensor=split.tensor, sequence=learner.parallel.sequence)
    if config.policy.attention == "eager":
        layer += attention_bytes(shape, tokens, longest(config), width, split.tensor * split.ulysses)
    kept, anew = _layers_kept(config, component.name, shape)
    if learner.memory.offload_activations:
        return 2 * layer
    return layer * (kept + anew) + tokens * shape.hidden * width * (shape.layers - kept)


def _layers_kept(config: Experiment, name: str, shape: Shape) -> tuple[int, int]:
    """Layers whose activations are kept, and those that are made anew at a time."""
    learner = getattr(config, name)
    options = learner.megatron
    if learner.backend == "megatron" and options and options.recompute_granularity == "full":
        count = min(options.recompute_num_layers or 1, shape.layers)
        return (shape.layers - count, 1) if options.recompute_method == "block" else (0, count)
    own = learner.gradient_checkpointing
    recompute = config.actor.gradient_checkpointing if own is None else own
    return (0, 1) if recompute else (shape.layers, 0)


def _logits(shape: Shape, component: Component, places: int) -> int:
    """Of the predicted places of one pass; so many at a time."""
    split = component.split
    entries = -(-places // (split.context * split.ulysses)) * (shape.vocabulary // split.tensor)
    return min(entries, LOGITS_AT_ONCE) * LOGIT_BYTES


def _reference(config: Experiment, component: Component, shape: Shape) -> Load:
    """A model that only judges: its weights, one layer at work and the logits. In one process the reference is a
    copy of the learner's own float32 weights."""
    learner, split = config.reference, component.split
    megatron = learner.backend == "megatron"
    alone = len(component.devices) == 1 and not megatron and learner.dtype is None
    width = 4 if alone else _width(config, shape, learner.dtype)
    shards = 1 if megatron else _shards(config, component)
    own = _own(component, shape, shape.parameters)
    if config.policy.lora is not None and learner.path is None:
        # the policy's own weights with the adapters that it began with
        own = adapters(shape, config.policy.lora)
    gathered = 0 if shards == 1 else min(2 * shape.largest_layer + shape.embedding + shape.head, own)
    work = share(config, "reference", component.copies, inference=True)
    tokens = -(-work.tokens // (split.context * split.ulysses))
    return Load(
        weights=0 if learner.memory.sharded_offload else own * width // shards,
        copies=gathered * width,
        activations=activation_bytes(shape, tokens, width, tensor=split.tensor),
        logits=_logits(shape, component, work.places),
    )


def _reward(config: Experiment, component: Component, shape: Shape) -> Load:
    """A model that judges answers, cut up among its devices."""
    model = config.reward.model if config.reward else None
    width, devices = _width(config, shape), max(1, len(component.devices))
    length = (model.max_tokens if model else None) or longest(config)
    tokens = length * ((model.sequences_per_pass if model else None) or 1)
    gathered = 0 if devices == 1 else min(2 * shape.largest_layer + shape.embedding, shape.body)
    return Load(
        weights=shape.body * width // devices,
        copies=gathered * width,
        activations=activation_bytes(shape, tokens, width),
    )


_LOADS: Mapping[str, Callable[[Experiment, Component, Shape], Load]] = {
    "actor": _learner,
    "critic": _learner,
    "reference": _reference,
    "reward": _reward,
}


def _engine(config: Experiment, component: Component, shape: Shape, device_bytes: int | None) -> Load:
    """An engine's weights, and the cache of as many requests as it runs side by side; of an engine that takes a share
    of a device whose size is known, all of that. The `hf` engine plays with the learner's own weights where those are
    float32."""
    options, split = config.rollout.engine_options, component.split
    width = _width(config, shape, options.dtype)
    own = shape.parameters // (split.tensor * split.pipeline) * width
    room = None if options.memory_share is None or device_bytes is None else int(options.memory_share * device_bytes)
    tokens = min(options.max_model_tokens or longest(config), longest(config))
    one = tokens * cache_bytes(shape, width, split.tensor, split.pipeline)
    slots = config.rollout.max_concurrent
    if options.prompts_per_device is not None:
        slots = min(slots, options.prompts_per_device * config.training.samples_per_group)
    if config.rollout.engine == "hf":
        one = int(SLOTS * one)
        slots = slots if room is None else max(0, min(slots, (room - own) // one))
        shared = len(component.devices) == 1 and width == 4
        return Load(weights=0 if shared else own, cache=slots * one)
    games = config.training.groups_per_step * config.training.samples_per_group
    asked = min(slots, -(-games // component.copies)) * one
    return Load(weights=own, cache=asked if room is None else max(0, room - own))
