"""Estimated memory of a component on one device, by formulas; nothing is loaded or measured.

Not included: CUDA context, communication buffers, fragmentation and graphs, together two to four GiB.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from quintet.config.native.experiment import Experiment
from quintet.config.plan.batches import RankWorkload, max_sequence_tokens, rank_workload
from quintet.config.plan.images import encoder_work, trains_encoder
from quintet.config.plan.kv_blocks import BLOCK, cache_bytes, pool_blocks
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.placed_model import PlacedModel, learner_parameters, learner_work, lora_parameters
from quintet.config.plan.placement import (
    LOGPROBS,
    actor_scores_rollout,
    are_within,
    as_devices,
    learner_section,
    place_components,
)
from quintet.config.plan.robot_batches import robot_arithmetic

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0, "muon": 1}
"""Optimizer states per weight."""
LOGIT_BYTES = 16
"""Per entry of predicted tokens × vocabulary: logits, log-probs, probabilities and their product, all float32
(`policies/causal_lm.py`, `log_probs_and_entropy`)."""
MAX_LOGITS_IN_MEMORY = 2**25
"""Entries computed at a time (`policies/causal_lm.py`)."""
REWARD_BYTES = 2
"""Per weight of the reward model."""


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
    other: int = 0
    """Interpreter and libraries of a process, or copies from which checkpoints are written."""

    @property
    def total(self) -> int:
        parts = self.weights + self.copies + self.gradients + self.optimizer
        return parts + self.activations + self.logits + self.cache + self.other

    def times(self, count: int) -> "MemoryUse":
        """Return the memory of several processes."""
        if count == 1:
            return self
        return MemoryUse(**{part: size * count for part, size in asdict(self).items()})

    def to_json(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


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


def active_memory(placed: PlacedModel) -> MemoryUse:
    """Return the memory of a component on each of its devices while it computes."""
    return _ESTIMATES[placed.component.name](placed).times(placed.component.processes_per_device)


def idle_memory(config: Experiment, name: str, active: MemoryUse) -> MemoryUse:
    """Return the memory of a component while others compute on its devices."""
    if name == "rollout":
        options = config.rollout.engine_options
        offloaded = {"weights": options.offload, "cache": options.sleep_between_steps or options.offload}
    elif name == "reward":
        offloaded = {"weights": bool(config.reward and config.reward.model and config.reward.model.offload_parameters)}
    else:
        memory = getattr(config, learner_section(name)).memory
        # the embedded engine generates with the learner's float32 weights, which then cannot be offloaded
        engine = config.rollout.engine == "hf" and (config.rollout.engine_options.dtype or config.policy.dtype)
        weights = memory.offload_parameters and not (name == "actor" and engine == "float32")
        offloaded = {"weights": weights, "optimizer": memory.offload_optimizer}
    return MemoryUse(**{part: 0 if is_offloaded else getattr(active, part) for part, is_offloaded in offloaded.items()})


def _learner(placed: PlacedModel) -> MemoryUse:
    """Return the memory of a learner: states (`_fsdp`, `_megatron`), activations and logits."""
    config, component = placed.config, placed.component
    parameters, trained = learner_parameters(placed)
    states = (_megatron if placed.learner.backend == "megatron" else _fsdp)(placed, parameters, trained)
    work = learner_work(placed)
    inference = rank_workload(config, component.name, component.copies, inference=True)
    predicted = max(
        work.predicted_tokens_per_micro_batch,
        inference.predicted_tokens_per_micro_batch if actor_scores_rollout(config) else 0,
    )
    return replace(
        states,
        activations=_activations(placed, work.tokens_per_micro_batch),
        logits=0 if component.name == "critic" else _logits(placed, predicted),
    )


def _fsdp(placed: PlacedModel, parameters: int, trained: int) -> MemoryUse:
    """Return the sharded states and the gathered weights of a learner under FSDP.

    States are weights, gradients and AdamW's two moments in float32, 16 bytes per parameter. Weights are gathered layer
    by layer, two at a time, embedding and head throughout; a device gathers its slice of tensor-parallel layers. On one
    device nothing is gathered, and only a narrower type needs a copy. Weights frozen by LoRA are float32 too, without
    gradients or moments.
    """
    learner, shards = placed.learner, placed.fsdp_shards
    width, lora = placed.width(learner.sharding.parameter_dtype), trained < parameters
    gathered = placed.gathered
    if shards == 1:
        gathered = 0 if width == 4 or lora else parameters
    elif learner.sharding.policy == "shard_grad_op":
        gathered = parameters
    on_device = not learner.memory.sharded_offload
    return MemoryUse(
        weights=4 * (parameters + trained * lora) // shards * on_device,
        copies=min(gathered, parameters) * width // placed.parallelism.tensor,
        gradients=_fsdp_gradients(placed, trained, lora=lora),
        optimizer=4 * OPTIMIZER_STATES[placed.optimizer.kind] * trained // shards * on_device,
    )


def _fsdp_gradients(placed: PlacedModel, trained: int, *, lora: bool) -> int:
    """Return the gradients of a learner under FSDP: shards in float32, and one layer before its reduction.

    Unless `sync_every_micro_batch`, several micro-batches accumulate unsharded gradients, which are reduced in the last
    backward pass: in the type of reduction (`FSDPModule.set_requires_gradient_sync`), or in that of the weights
    (`FullyShardedDataParallel.no_sync`).
    """
    learner, shards = placed.learner, placed.fsdp_shards
    layer = 0 if shards == 1 or lora else placed.largest_layer * placed.reduction_width
    if shards > 1 and learner_work(placed).micro_batches > 1 and not learner.sharding.sync_every_micro_batch:
        local = (trained - (0 if lora else placed.remote_experts)) // placed.parallelism.weight_split
        computed = placed.width(learner.sharding.parameter_dtype)
        return layer + local * (computed if learner.backend == "fsdp" else placed.reduction_width)
    return layer + 4 * trained // shards * (not learner.memory.sharded_offload)


def _megatron(placed: PlacedModel, parameters: int, trained: int) -> MemoryUse:
    """Return weights in the policy's type, float32 gradients, and float32 master weights with AdamW's two moments; the
    distributed optimizer shards the latter over data-parallel ranks."""
    learner, width = placed.learner, placed.width()
    local = placed.local_parameters(parameters)
    local_trained = local * trained // parameters
    sharded = learner.megatron and learner.megatron.use_distributed_optimizer
    ranks = placed.component.copies * placed.parallelism.context if sharded else 1
    states = 4 * OPTIMIZER_STATES[placed.optimizer.kind] + (0 if width == 4 else 4)
    adapters = local_trained if trained < parameters else 0
    return MemoryUse(
        weights=(local + adapters) * width,
        gradients=4 * local_trained,
        optimizer=states * local_trained // ranks,
    )


def _activations(placed: PlacedModel, micro_batch_tokens: int) -> int:
    """Return the activations saved by all layers for one micro-batch.

    Activation checkpointing saves the input of each layer and recomputes one layer at a time. The first pipeline stage
    has as many micro-batches in flight as there are stages, which equals all layers for one micro-batch.
    """
    config, learner, shape, parallelism = placed.config, placed.learner, placed.shape, placed.parallelism
    tokens, width = placed.local_tokens(micro_batch_tokens), placed.width(learner.sharding.parameter_dtype)
    layer = activation_bytes(shape, tokens, width, tensor=parallelism.tensor, sequence=learner.parallel.sequence)
    if config.policy.attention == "eager":
        head_devices = parallelism.tensor * parallelism.ulysses
        layer += attention_bytes(shape, tokens, max_sequence_tokens(config), width, head_devices)
    saved, recomputed = saved_layers(placed)
    if learner.memory.offload_activations:
        return 2 * layer
    decoder = layer * (saved + recomputed) + tokens * shape.hidden * width * (shape.layers - saved)
    work = rank_workload(config, placed.component.name, placed.component.copies)
    if not trains_encoder(config, placed.component.name):
        return max(decoder, encoder_activations(placed, work, backward=False))
    return decoder + encoder_activations(placed, work, backward=True)


def encoder_activations(placed: PlacedModel, work: RankWorkload, *, backward: bool) -> int:
    """Return the activations of the vision encoder for one micro-batch: those saved for a `backward` pass, otherwise
    those of one block. Every device that shares a sequence encodes all of its images."""
    encoder = placed.shape.encoder
    if encoder is None:
        return 0
    patches = encoder_work(placed.config, placed.shape, work).patches
    width = placed.width(placed.learner.sharding.parameter_dtype)
    if not backward:
        return encoder.block_activations(patches, width)
    return encoder.activations(patches, width, recompute=saved_layers(placed)[0] < placed.shape.layers)


def saved_layers(placed: PlacedModel) -> tuple[int, int]:
    """Return the number of layers with saved activations, and of those recomputed at a time."""
    learner = placed.learner
    layers = placed.shape.layers
    options = placed.learner.megatron
    if learner.backend == "megatron" and options and options.recompute_granularity == "full":
        count = min(options.recompute_num_layers or 1, layers)
        return (layers - count, 1) if options.recompute_method == "block" else (0, count)
    stage, setting = placed.config.sft_only, learner.gradient_checkpointing
    recompute = placed.config.actor.gradient_checkpointing if setting is None else setting
    if stage is not None:
        recompute = stage.gradient_checkpointing
    return (0, 1) if recompute else (layers, 0)


def _logits(placed: PlacedModel, predicted_tokens: int) -> int:
    entries = placed.local_tokens(predicted_tokens) * (placed.shape.vocabulary // placed.parallelism.tensor)
    return min(entries, MAX_LOGITS_IN_MEMORY) * LOGIT_BYTES


def _scorer(placed: PlacedModel) -> MemoryUse:
    """Return the memory of the reference or of log-prob workers: weights, activations of one layer and logits. Under
    FSDP weights are stored in float32 unless the reference has its own type, and gathered in the type of matrix
    products."""
    config, learner, shape, component = placed.config, placed.learner, placed.shape, placed.component
    megatron, dtype = learner.backend == "megatron", getattr(learner, "dtype", None)
    stored = 4 if not megatron and dtype is None else placed.width(dtype)
    width = placed.width(learner.sharding.parameter_dtype, dtype)
    shards = 1 if megatron else placed.fsdp_shards
    parameters = placed.local_parameters(shape.parameters) if megatron else shape.parameters
    shares_policy = config.reference_has_adapters and not place_components(config).is_standalone("reference")
    if component.name == "reference" and shares_policy and config.policy.lora is not None:
        # the policy's weights with a copy of the initial adapters
        parameters = lora_parameters(shape, config.policy.lora)
    work = rank_workload(config, learner_section(component.name), component.copies, inference=True)
    tokens = placed.local_tokens(work.tokens_per_micro_batch)
    return MemoryUse(
        weights=0 if learner.memory.sharded_offload else parameters * stored // shards,
        copies=0 if shards == 1 else min(placed.gathered, parameters) * width // placed.parallelism.tensor,
        activations=max(
            activation_bytes(shape, tokens, width, tensor=placed.parallelism.tensor),
            encoder_activations(placed, work, backward=False),
        ),
        logits=_logits(placed, work.predicted_tokens_per_micro_batch),
    )


def _reward(placed: PlacedModel) -> MemoryUse:
    """Return the memory of the reward model in bfloat16: a copy on each of its devices (`policies/reward_model.py`), or
    a shard, with two units and the embedding gathered (`training/sharded_reward_model.py`)."""
    config, shape = placed.config, placed.shape
    model = config.reward.model if config.reward else None
    length = (model.max_tokens if model else None) or max_sequence_tokens(config)
    tokens = length * ((model.sequences_per_pass if model else None) or 1)
    unit = model.min_sharded_parameters if model else 0
    shards = placed.component.num_processes if unit else 1
    gathered = min(2 * max(placed.largest_layer, unit) + shape.embedding, shape.body)
    return MemoryUse(
        weights=shape.body * REWARD_BYTES // shards,
        copies=gathered * REWARD_BYTES if shards > 1 else 0,
        activations=activation_bytes(shape, tokens, REWARD_BYTES),
    )


def _engine(placed: PlacedModel) -> MemoryUse:
    """Return the weights of an engine and the KV cache of its concurrent requests.

    If `memory_share` and the size of the device are known, an engine takes exactly that share. The `hf` engine takes
    blocks as its requests need them, and generates with the learner's weights if those are float32.
    """
    if placed.config.env.is_simulator:
        return _policy_of_robots(placed)
    config, parallelism = placed.config, placed.parallelism
    options = config.rollout.engine_options
    width = placed.width(options.dtype)
    share = options.memory_share
    device = placed.device_bytes
    weights = placed.shape.parameters // (parallelism.tensor * parallelism.pipeline) * width
    budget = None if share is None or device is None else int(share * device)
    tokens = min(options.max_model_tokens or max_sequence_tokens(config), max_sequence_tokens(config))
    cache_per_token = placed.shape.cache_numbers(parallelism.tensor) * width // parallelism.pipeline
    if config.rollout.engine == "hf":
        shared = placed.component.num_processes == 1 and width == 4 and config.generation is None
        available = None if device is None else cache_bytes(device, share, weights)
        blocks = pool_blocks(tokens, placed.requests, BLOCK * cache_per_token, available)
        return MemoryUse(weights=0 if shared else weights, cache=blocks * BLOCK * cache_per_token)
    if budget is not None:
        return MemoryUse(weights=weights, cache=max(0, budget - weights))
    episodes = -(-config.groups_per_round * config.samples_per_prompt // placed.component.copies)
    return MemoryUse(weights=weights, cache=min(placed.requests, episodes) * tokens * cache_per_token)


def _policy_of_robots(placed: PlacedModel) -> MemoryUse:
    """Return the memory in which a policy computes the actions of the robots of a stage.

    On devices of the actor it is the learner's. A forward pass has the activations of one layer; `openvla` samples
    token by token with a KV cache.
    """
    config, shape = placed.config, placed.shape
    actor = config.placement.actor.devices
    is_standalone = bool(actor) and not are_within(placed.component.devices, as_devices(sorted(set(actor or ()))))
    width, tokens = placed.width(), max_sequence_tokens(config)
    robots = -(-robot_arithmetic(config).robots // (placed.component.copies * robot_arithmetic(config).stages))
    actions = config.policy.vla.action_chunk * config.policy.vla.action_dim if config.policy.vla else 1
    cache = robots * tokens * shape.cache_numbers() * width if config.policy.kind == "openvla" else 0
    return MemoryUse(
        weights=shape.parameters * width if is_standalone else 0,
        activations=activation_bytes(shape, robots * tokens, width),
        logits=min(robots * actions * shape.vocabulary, MAX_LOGITS_IN_MEMORY) * LOGIT_BYTES,
        cache=cache,
    )


_ESTIMATES: Mapping[str, Callable[[PlacedModel], MemoryUse]] = {
    "actor": _learner,
    "critic": _learner,
    LOGPROBS: _scorer,
    "reference": _scorer,
    "reward": _reward,
    "rollout": _engine,
}
