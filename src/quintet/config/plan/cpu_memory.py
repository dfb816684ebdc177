"""Estimated memory of components that compute on the CPU of this machine, and of their process.

Differences from a device: compiled kernels save fewer activations (`policies/training_decoder.py`) and overwrite logits
in place (`policies/fused_log_probs.py`), nothing is offloaded, and the interpreter and the copies from which
checkpoints are written are in the same memory.
"""

from collections.abc import Mapping
from dataclasses import replace

from quintet.config.native.experiment import Experiment
from quintet.config.plan.batches import max_sequence_tokens, rank_workload
from quintet.config.plan.component_memory import (
    MAX_LOGITS_IN_MEMORY,
    OPTIMIZER_STATES,
    MemoryUse,
    active_memory,
    attention_bytes,
    encoder_activations,
    idle_memory,
    saved_layers,
)
from quintet.config.plan.images import trains_encoder
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.placed_model import PlacedModel, learner_parameters, learner_work
from quintet.config.plan.placement import learner_section

PROCESS, CHECKPOINT = "process", "checkpoint"
"""Names of what a process has besides its components: interpreter and libraries, and copies for checkpoints."""
PROCESS_BYTES = 480 << 20
"""Resident memory of a process that has imported torch and transformers, with its data and thread stacks; measured."""
KERNEL_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"})
"""Families whose decoder layers the training kernels compute (`policies/training_decoder.py`)."""
KERNEL_LANES = 16
"""The head dimension has to be a multiple of this number."""
KERNEL_HEAP, MODULE_HEAP = 1.3, 1.9
"""Memory that saved activations take of the heap, relative to their size, with kernels and with the modules of
transformers, which free more temporary tensors between saved ones. glibc leaves holes between tensors of different
sizes, and the process keeps what it has freed (`runtime/memory.py`); measured."""
PREFILL_TOKENS = 8192
"""Prompt tokens of a pass of the embedded engine, by default (`rollout/engines/hf/engine.py`)."""


def cpu_active_memory(placed: PlacedModel) -> MemoryUse:
    """Return the memory of a component while it computes on a CPU."""
    use, name = active_memory(placed), placed.component.name
    if placed.component.num_processes > 1 or placed.config.env.is_simulator:
        return use
    if name in ("actor", "critic"):
        return _learner(placed, use)
    if name == "rollout":
        return _engine(placed, use)
    return replace(use, logits=use.logits and _logits(placed, inference=True))


def cpu_idle_memory(config: Experiment, name: str, active: MemoryUse) -> MemoryUse:
    """Return the memory of a component while others compute: nothing is offloaded from a CPU."""
    if name == "rollout":
        return idle_memory(config, name, active)
    return MemoryUse(weights=active.weights, optimizer=active.optimizer, other=active.other)


def process_memory(
    learners: Mapping[str, PlacedModel], steps: int | None
) -> tuple[dict[str, MemoryUse], dict[str, MemoryUse]]:
    """Return what the process of the learners has besides them, while a checkpoint is copied and otherwise. `steps` is
    the number of steps of the run, None if it is unknown."""
    process = {PROCESS: MemoryUse(other=PROCESS_BYTES)}
    if not learners:
        return process, process
    copied = (_checkpoint_copies(placed, steps) for placed in learners.values())
    active, idle = (sum(sizes) for sizes in zip(*copied, strict=True))
    return process | {CHECKPOINT: MemoryUse(other=active)}, process | {CHECKPOINT: MemoryUse(other=idle)}


def _checkpoint_copies(placed: PlacedModel, steps: int | None) -> tuple[int, int]:
    """Return the bytes of a learner's copies while a checkpoint is saved, and while it learns: buffers of the first
    checkpoint stay (`training/checkpoint/snapshot.py`).

    With adapters, frozen weights are not copied but merged, which the final weights of fine-tuning are once more.
    """
    config, ranks = placed.config, placed.component.num_processes
    parameters, trained = learner_parameters(placed)
    weights = 4 * (trained if trained == parameters else parameters + trained)
    merged = 4 * parameters if config.sft_only is not None and trained < parameters else 0
    optimizer = (
        4 * OPTIMIZER_STATES[placed.optimizer.kind] * trained if "optimizer" in config.checkpoint.contents else 0
    )
    every = config.checkpoint.every_steps
    is_saved_often = steps is None or (0 < every < steps)
    if config.sft_only is not None:
        kept = weights + optimizer if is_saved_often or config.sft_only.epochs > 1 else 0
    else:
        kept = weights + (optimizer if is_saved_often or config.warm_start is not None else 0)
    return (weights + optimizer + merged) // ranks, kept // ranks


def _learner(placed: PlacedModel, use: MemoryUse) -> MemoryUse:
    """Return the memory of an update. The gradients of a single micro-batch take the place of its activations, which
    the backward pass frees."""
    critic = placed.component.name == "critic"
    work, inference = learner_work(placed), rank_workload(placed.config, placed.component.name, 1, inference=True)
    use = replace(
        use,
        copies=use.copies or _concatenated(placed),
        activations=max(
            _activations(placed, work.tokens_per_micro_batch),
            _pass_bytes(placed, inference.tokens_per_micro_batch),
        ),
        logits=0 if critic else _logits(placed, inference=False),
    )
    if work.micro_batches > 1:
        return use
    freed = use.activations + use.copies + use.logits
    return replace(use, gradients=max(0, use.gradients - freed))


def has_kernels(placed: PlacedModel) -> bool:
    """Return whether the training kernels compute the decoder layers of a learner."""
    shape = placed.shape
    is_plain = (
        placed.lora is None and saved_layers(placed)[0] == shape.layers and placed.config.policy.attention is None
    )
    return is_plain and shape.family in KERNEL_FAMILIES and shape.head_dim % KERNEL_LANES == 0


def _concatenated(placed: PlacedModel) -> int:
    """Return the concatenated weights of projections with the same input, which a pass saves for its backward pass."""
    shape = placed.shape
    attention = sum(inputs * outputs for name, (inputs, outputs) in shape.attention_linears.items() if name != "o_proj")
    return 4 * shape.layers * (attention + 2 * shape.hidden * shape.mlp) if has_kernels(placed) else 0


def _layer_numbers(placed: PlacedModel) -> tuple[int, int]:
    """Return the numbers of a layer per token that are saved in float32, and in the type of matrix products.

    Kernels save the inputs of both norms in float32; the inputs of projections, queries, keys, values and the attention
    output, gate and up projections. Modules also save the normalized inputs, unless the weights of norms are frozen,
    the activated gate and the gated product.
    """
    shape = placed.shape
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * queries + 2 * keys
    if has_kernels(placed):
        return 2 * shape.hidden, 2 * shape.hidden + attention + 2 * shape.mlp
    return 2 * shape.hidden, (2 if placed.lora else 4) * shape.hidden + attention + 4 * shape.active_mlp


def _activations(placed: PlacedModel, tokens: int) -> int:
    """Return the activations saved by all layers, and those of images, for one micro-batch."""
    config, shape, width = placed.config, placed.shape, placed.width(placed.learner.sharding.parameter_dtype)
    wide, narrow = _layer_numbers(placed)
    layer = tokens * (4 * wide + width * narrow)
    if config.policy.attention == "eager":
        layer += attention_bytes(shape, tokens, max_sequence_tokens(config), width)
    layer = int(layer * (KERNEL_HEAP if has_kernels(placed) else MODULE_HEAP))
    saved, recomputed = saved_layers(placed)
    decoder = layer * (saved + recomputed) + 4 * tokens * shape.hidden * (shape.layers - saved)
    backward = trains_encoder(config, placed.component.name)
    return decoder + encoder_activations(placed, learner_work(placed), backward=backward)


def _pass_bytes(placed: PlacedModel, tokens: int) -> int:
    """Return the buffers of one layer in a pass without gradients."""
    return tokens * 4 * _buffer_numbers(placed.shape)


def _buffer_numbers(shape: ModelShape) -> int:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 4 * shape.hidden + 2 * queries + 2 * keys + 3 * shape.active_mlp


def _logits(placed: PlacedModel, *, inference: bool) -> int:
    """Return the logits of a chunk, which gradients overwrite, and the gradient of the head, also of a frozen one."""
    name, width = learner_section(placed.component.name), placed.width(placed.learner.sharding.parameter_dtype)
    work = rank_workload(placed.config, name, 1, inference=True) if inference else learner_work(placed)
    entries = min(work.predicted_tokens_per_micro_batch * placed.shape.vocabulary, MAX_LOGITS_IN_MEMORY)
    return entries * width + (0 if inference else 4 * placed.shape.embedding)


def _engine(placed: PlacedModel, use: MemoryUse) -> MemoryUse:
    """Return the cache of the engine, the buffers of a prefill pass and the logits of its running requests."""
    options, shape = placed.config.rollout.engine_options, placed.shape
    prompts = placed.requests * placed.config.rollout.max_prompt_tokens
    tokens = min(options.max_batched_tokens or PREFILL_TOKENS, prompts)
    return replace(use, activations=_pass_bytes(placed, tokens), logits=4 * placed.requests * shape.vocabulary)
