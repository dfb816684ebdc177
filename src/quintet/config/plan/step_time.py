"""Estimated time of one training step, by formulas, to rank configurations; nothing is measured.

Every episode is taken to have its maximum length. Phases follow one another, except that a rollout may overlap with
training. Matrix products take FLOPs / (peak × `COMPUTE_SHARE`), transfers bytes / (bandwidth × `BANDWIDTH_SHARE`). Not
included: environments, rewards other than those of a reward model, tokenization, optimizer steps, kernel launches, the
imbalance of episodes of different length, `memory.offload_activations` and `memory.sharded_offload`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quintet.config.native.experiment import Experiment
from quintet.config.plan.batches import (
    RankWorkload,
    max_mini_batches,
    max_sequence_tokens,
    max_sequences_per_episode,
    packed_tokens,
    rank_workload,
)
from quintet.config.plan.component_memory import (
    MemoryUse,
    saved_layers,
)
from quintet.config.plan.costs import Cost
from quintet.config.plan.devices import DeviceFigures
from quintet.config.plan.images import encoder_work, largest_images, trains_encoder
from quintet.config.plan.memory import MemoryPlan
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.models import Models
from quintet.config.plan.overlap import overlaps_training
from quintet.config.plan.placed_model import PlacedModel, lora_parameters
from quintet.config.plan.placement import LOGPROBS, Component, Placement, actor_scores_rollout, learner_section

COMPUTE_SHARE = 0.4
"""Share of the peak that training reaches: 38 to 43 % for Llama 3 on H100 (Grattafiori et al. 2024, arXiv:2407.21783,
table 4)."""
HALF_RATE_TOKENS = 512
"""Tokens of a micro-batch on one device with which products of whole matrices reach half of their share, an assumption;
those that tensor parallelism divides need as many times more."""
BANDWIDTH_SHARE = 0.7
"""Share of a peak bandwidth that long transfers reach; an assumption."""
ALL_REDUCE_SECONDS = 1e-5
"""Latency of an all-reduce of a few tokens within a node; an assumption."""
ROLLOUT_PHASES = frozenset({"prefill", "decode"})
"""Phases that an overlapped rollout has beside the others."""
PASSES = {"actor": "log-probs", LOGPROBS: "log-probs", "reference": "reference", "critic": "values"}
"""Phases of forward-only passes."""
STORED_BYTES = 4
"""Per weight of a learner."""
Seconds = Mapping[str, float]
"""Seconds of each phase of a step."""
Costs = Mapping[str, Cost]
"""Seconds and transfers of each phase of a step."""


def forward_flops(shape: ModelShape, length: int) -> float:
    """Return the FLOPs of a forward pass per token of a sequence: 2 per weight, and 2 · layers · width · length for
    causal attention (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), with the experts that a token passes."""
    inactive = shape.routed - shape.routed * shape.experts.active // shape.experts.count if shape.experts else 0
    # the lookup in the embedding is no product; the body has as many parameters with the head in its place
    return 2.0 * (shape.body - shape.vision - inactive) + 2.0 * shape.layers * shape.heads * shape.head_dim * length


@dataclass(frozen=True, slots=True)
class _TimedModel:
    """A model on its devices, timed with their figures."""

    placed: PlacedModel
    figures: DeviceFigures

    @property
    def width(self) -> int:
        """Bytes per number in matrix products."""
        learner = self.placed.learner
        return self.placed.width(learner.sharding.parameter_dtype, getattr(learner, "dtype", None))

    @property
    def shards(self) -> int:
        """Devices over which FSDP shards the weights that tensor and pipeline parallelism leave to each."""
        parallelism = self.placed.parallelism
        is_sharded = parallelism.backend != "megatron"
        return max(1, self.placed.fsdp_shards // parallelism.weight_split) if is_sharded else 1

    def send(self, purpose: str, count: float, devices: int, extent: int | None = None) -> Cost:
        """Return the cost of gathering, or reducing, `count` bytes in a ring of devices. The ring is evenly taken from
        `extent` neighbouring devices, by default from `devices`.

        Between nodes, the devices of a node that are in the ring use their network adapters side by side, as NCCL does:
        between DGX H100 systems, `nccl-tests` shows the bandwidth of all eight. Each adapter then sends an equal part
        of the bytes.
        """
        extent = extent or devices
        bandwidth = self.figures.link
        sent = count * (devices - 1) / devices
        per_node = self.placed.config.placement.devices_per_node
        neighbours = min(devices, max(1, devices * per_node // extent))
        by_link = {("link", purpose): sent} if neighbours > 1 else {}
        if extent > per_node:
            bandwidth = min(bandwidth, self.figures.network * neighbours)
            by_link["network", purpose] = sent / neighbours
        return Cost(sent / (bandwidth * BANDWIDTH_SHARE), by_link if sent else {})

    def compute(self, flops: float, width: int) -> float:
        """Return the seconds of matrix products of numbers of `width` bytes."""
        peak = self.figures.flops if width < 4 else self.figures.float32_flops
        return flops / (peak * COMPUTE_SHARE)

    def passes(self, work: RankWorkload, *, backward: bool) -> Cost:
        """Return the cost of all micro-batches of a data-parallel rank.

        A backward pass has twice the FLOPs of a forward pass, the same with LoRA, whose frozen weights have no
        gradients; recomputed layers run forward again. FSDP gathers the weights once per pass of a micro-batch,
        beside the computation (Zhao et al. 2023, arXiv:2304.11277). Pipeline stages idle for (stages − 1) / (virtual
        stages × micro-batches) of that time (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
        """
        placed, parallelism = self.placed, self.placed.parallelism
        length = max_sequence_tokens(placed.config)
        tokens = packed_tokens(placed.config, work.sequences_per_rank, work.data_parallel_ranks)
        micro_batches = max(1, work.micro_batches)
        again = 1 - saved_layers(placed)[0] / placed.shape.layers if backward else 0
        flops = tokens * forward_flops(placed.shape, length) * decoder_passes(placed, backward=backward)
        flops /= parallelism.devices_per_copy
        local = (placed.shape.parameters - placed.remote_experts) * self.width / parallelism.weight_split
        gathered = micro_batches * (1 + backward) * local
        gathers = self.send("gather of weights", gathered, self.shards, placed.fsdp_shards)
        slowdown = 1 + HALF_RATE_TOKENS * parallelism.tensor / placed.local_tokens(work.tokens_per_micro_batch)
        busy = gathers.lasting(max(self.compute(flops, self.width) * slowdown, gathers.seconds))
        busy += (1 + backward + again) * self._exchange(tokens)
        idle = (parallelism.pipeline - 1) / (parallelism.virtual_pipeline * micro_batches)
        return busy.lasting(busy.seconds * (1 + idle))

    def images(self, work: RankWorkload, *, backward: bool) -> Cost:
        """Return the cost of the vision encoder, which each device that shares a sequence runs on all of its images."""
        flops = encoder_work(self.placed.config, self.placed.shape, work).flops
        return Cost(self.compute(flops * encoder_passes(self.placed, backward=backward), self.width))

    def _exchange(self, tokens: int) -> Cost:
        """Return the cost of exchanging activations between devices in a forward pass.

        Tensor parallelism: two all-reduces of the hidden states per layer (Shoeybi et al. 2019, arXiv:1909.08053,
        section 3), each a reduction and a gather. Context parallelism gathers keys and values; Ulysses exchanges
        queries, keys, values and outputs (Jacobs et al. 2023, arXiv:2309.14509, section 3.2). Expert parallelism sends
        the hidden states of a token to all its experts and back (Lepikhin et al. 2021, arXiv:2006.16668).
        """
        shape, parallelism = self.placed.shape, self.placed.parallelism
        local, layers = self.placed.local_tokens(tokens), shape.layers / parallelism.pipeline
        tensor, context, ulysses, expert = (
            getattr(parallelism, name) for name in ("tensor", "context", "ulysses", "expert")
        )
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        experts = shape.experts.active if shape.experts else 0
        numbers = (
            ("tensor", 4 * local * shape.hidden, tensor, tensor),
            ("context", 2 * local * context * keys / tensor, context, context * ulysses * tensor),
            ("ulysses", 2 * local * (queries + keys) / tensor, ulysses, ulysses * tensor),
            ("expert", 2 * local * experts * shape.hidden, expert, expert * tensor),
        )
        sends = (self.send(f"{name} parallelism", *sizes) for name, *sizes in numbers)
        return layers * self.width * sum(sends, Cost())

    def reduction(self) -> Cost:
        """Return the cost of summing gradients over the ranks with the same weights: a reduction to shards,
        and between their copies a reduction and a gather."""
        placed, parallelism = self.placed, self.placed.parallelism
        lora = placed.config.policy.lora if placed.component.name == "actor" else None
        local = placed.shape.parameters - placed.remote_experts if lora is None else lora_parameters(placed.shape, lora)
        split, devices = parallelism.weight_split, placed.component.num_processes
        count, copies = placed.reduction_width * local / split, max(1, devices // (split * self.shards))
        # pipeline stages are the outermost dimension of Megatron's ranks
        extent = devices // parallelism.pipeline if parallelism.backend == "megatron" else devices
        purpose = "reduction of gradients"
        shard = self.send(purpose, count, self.shards, placed.fsdp_shards)
        return shard + 2 * self.send(purpose, count / self.shards, copies, extent)


def decoder_passes(placed: PlacedModel, *, backward: bool) -> float:
    """Return the FLOPs of the language model in multiples of a forward pass."""
    if not backward:
        return 1.0
    is_adapted = placed.config.policy.lora is not None and placed.component.name == "actor"
    return (2 if is_adapted else 3) + 1 - saved_layers(placed)[0] / placed.shape.layers


def encoder_share(placed: PlacedModel, work: RankWorkload) -> float:
    """Return the share of the vision encoder in the FLOPs of an update by one device."""
    length = max_sequence_tokens(placed.config)
    tokens = packed_tokens(placed.config, work.sequences_per_rank, work.data_parallel_ranks)
    decoder = tokens * forward_flops(placed.shape, length)
    decoder *= decoder_passes(placed, backward=True) / placed.parallelism.devices_per_copy
    encoder = encoder_work(placed.config, placed.shape, work).flops * encoder_passes(placed, backward=True)
    return encoder / (decoder + encoder)


def encoder_passes(placed: PlacedModel, *, backward: bool) -> int:
    """Return the FLOPs of the vision encoder in multiples of a forward pass: a backward pass takes twice as many, and
    recomputation one more. A frozen encoder has no backward pass."""
    if not backward or not trains_encoder(placed.config, placed.component.name):
        return 1
    return 3 + (saved_layers(placed)[0] < placed.shape.layers)


def learner_seconds(config: Experiment, placement: Placement, models: Models, figures: DeviceFigures) -> Seconds:
    """Return the seconds in which learners and the reward model compute in a step."""
    return _seconds(_learner_costs(config, placement, models, figures))


def _seconds(costs: Costs) -> Seconds:
    return {phase: cost.seconds for phase, cost in costs.items()}


def _lasting(costs: Costs) -> Costs:
    """Return the phases that take any time."""
    return {phase: cost for phase, cost in costs.items() if cost.seconds}


def _learner_costs(config: Experiment, placement: Placement, models: Models, figures: DeviceFigures) -> Costs:
    costs: dict[str, Cost] = {}
    for component in placement.components:
        shape = models.of(component.name)
        if shape is not None and component.devices and component.name != "rollout":
            timed = _TimedModel(PlacedModel(config, component, shape), figures)
            costs |= dict(_reward(timed) if component.name == "reward" else _learner(timed))
    return _lasting(costs)


def offload_seconds(config: Experiment, memory: MemoryPlan, figures: DeviceFigures) -> Seconds:
    """Return the seconds in which the weights and optimizer state of components come from host memory and return
    there."""
    return _seconds(_offload_costs(config, memory, figures))


def _offload_costs(config: Experiment, memory: MemoryPlan, figures: DeviceFigures) -> Costs:
    """Return the costs of offloads; bytes are those of both directions.

    Learners do so around each call: every update, the pass for log-probs or values, and for an actor the weight sync;
    the optimizer state moves for updates alone (`training/offload.py`).
    """
    costs: dict[str, Cost] = {}
    for name, active in memory.active.items():
        idle = memory.idle[name]
        updates = _updates(config) if name in ("actor", "critic") else 0
        calls = updates + 1 + (name == "actor" and actor_scores_rollout(config))
        moved = (active.weights - idle.weights) * calls + (active.optimizer - idle.optimizer) * updates
        both_ways = {("host", "offload"): 2.0 * moved}
        costs[f"offload of {name}"] = Cost(2 * moved / (figures.host * BANDWIDTH_SHARE), both_ways)
    return _lasting(costs)


def _learner(timed: _TimedModel) -> Iterator[tuple[str, Cost]]:
    """Yield the phases of a learner: a pass for the log-probs or values that the step needs, the updates, and the
    vision encoder in all of them."""
    config = timed.placed.config
    component = timed.placed.component
    images = Cost()
    if component.name != "actor" or actor_scores_rollout(config):
        work = rank_workload(config, learner_section(component.name), component.copies, inference=True)
        yield PASSES[component.name], timed.passes(work, backward=False)
        images += timed.images(work, backward=False)
    if component.name == LOGPROBS:
        devices = config.placement.nodes * config.placement.devices_per_node
        yield "weight sync of log-prob workers", _transfer(timed, STORED_BYTES, devices)
    if component.name in ("actor", "critic"):
        work = rank_workload(config, component.name, component.copies)
        reductions = max(1, work.micro_batches) if timed.placed.learner.sharding.sync_every_micro_batch else 1
        update = timed.passes(work, backward=True) + reductions * timed.reduction()
        yield f"update of {component.name}", _updates(config) * update
        images += _updates(config) * timed.images(work, backward=True)
    yield f"images of {component.name}", images


def _updates(config: Experiment) -> int:
    """Return the optimizer steps of a step."""
    if config.sft_only is not None:
        return 1
    return max_mini_batches(config) * config.training.epochs


def _reward(timed: _TimedModel) -> Iterator[tuple[str, Cost]]:
    placed, training = timed.placed, timed.placed.config.training
    length = max_sequence_tokens(placed.config)
    tokens = training.groups_per_step * training.samples_per_group * length
    flops = tokens * forward_flops(placed.shape, length) / placed.component.num_processes
    yield "reward model", Cost(timed.compute(flops, placed.width()))


def step_seconds(
    config: Experiment, placement: Placement, models: Models, memory: MemoryPlan, figures: DeviceFigures
) -> Seconds:
    """Return the seconds of each phase of a step."""
    return _seconds(step_costs(config, placement, models, memory, figures))


def total_seconds(config: Experiment, seconds: Seconds) -> float:
    """Return the seconds of a step with these phases. A rollout that overlaps with training takes place beside the
    other phases but the weight sync, for which engines pause."""
    rollout = sum(seconds.get(phase, 0.0) for phase in ROLLOUT_PHASES)
    others = sum(seconds.values()) - rollout
    if not overlaps_training(config):
        return rollout + others
    sync = seconds.get("weight sync", 0.0)
    return max(rollout, others - sync) + sync


def step_costs(
    config: Experiment, placement: Placement, models: Models, memory: MemoryPlan, figures: DeviceFigures
) -> Costs:
    """Return the seconds of each phase of a step, and the bytes that a device sends in it."""
    return {
        **_engine_costs(config, placement, models, memory, figures),
        **_learner_costs(config, placement, models, figures),
        **_offload_costs(config, memory, figures),
    }


def engine_seconds(
    config: Experiment, placement: Placement, models: Models, memory: MemoryPlan, figures: DeviceFigures
) -> Seconds:
    """Return the seconds of prefill, decode and weight sync of the engines in a step."""
    return _seconds(_engine_costs(config, placement, models, memory, figures))


def _timed_engine(
    config: Experiment, placement: Placement, models: Models, figures: DeviceFigures
) -> _TimedModel | None:
    component, shape = placement.of("rollout"), models.of("rollout")
    if component is None or shape is None or not component.devices:
        return None
    return _TimedModel(PlacedModel(config, component, shape), figures)


def _engine_costs(
    config: Experiment, placement: Placement, models: Models, memory: MemoryPlan, figures: DeviceFigures
) -> Costs:
    timed = _timed_engine(config, placement, models, figures)
    if timed is None:
        return {}
    use = memory.active["rollout"]
    sync = _sync(timed, use, len(placement.devices))
    # the engines of a device share its compute and its memory bandwidth
    count = timed.placed.component.processes_per_device
    costs = {"prefill": _prefill(timed), "decode": _decode(timed, use), "weight sync": sync}
    return _lasting({name: count * cost for name, cost in costs.items()})


def episodes_per_slot(
    config: Experiment, placement: Placement, models: Models, memory: MemoryPlan, figures: DeviceFigures
) -> float:
    """Return how many episodes of a step follow one another in a slot of an engine; 0 without an engine."""
    timed = _timed_engine(config, placement, models, figures)
    if timed is None:
        return 0.0
    return _episodes(config, timed.placed.component) / _running(timed, memory.active["rollout"])


def _episodes(config: Experiment, component: Component) -> int:
    """Return the episodes of one engine in a step."""
    return -(-config.groups_per_round * config.training.samples_per_group // component.copies)


def _prefill(timed: _TimedModel) -> Cost:
    """Return the cost of prompts: a group shares that of its first turn, a sliding window has one per sequence."""
    config, component = timed.placed.config, timed.placed.component
    prompts: float = _episodes(config, component) * max_sequences_per_episode(config)
    if config.env.reads_prompts or config.rollout.max_turns == 1:
        prompts = max(1, prompts / config.training.samples_per_group)
    tokens = prompts * config.rollout.max_prompt_tokens
    flops = tokens * forward_flops(timed.placed.shape, config.rollout.max_prompt_tokens)
    flops += _images_of_engine(timed)
    return Cost(timed.compute(flops / timed.placed.parallelism.devices_per_copy, _engine_width(timed)))


def _images_of_engine(timed: _TimedModel) -> float:
    """Return the FLOPs of encoding the images of an engine's episodes, each of which it encodes once."""
    shape, config = timed.placed.shape, timed.placed.config
    images = largest_images(config, shape)
    if images is None or shape.encoder is None:
        return 0.0
    turns = 1 if config.env.reads_prompts else config.rollout.max_turns
    return float(_episodes(config, timed.placed.component) * turns * shape.encoder.flops(images.rows, images.columns))


def _engine_width(timed: _TimedModel) -> int:
    return timed.placed.width(timed.placed.config.rollout.engine_options.dtype)


def _cache_per_token(timed: _TimedModel) -> float:
    """Return the bytes of the KV cache of one token on one device."""
    parallelism = timed.placed.parallelism
    return timed.placed.shape.cache_numbers(parallelism.tensor) * _engine_width(timed) / parallelism.pipeline


def _running(timed: _TimedModel, use: MemoryUse) -> float:
    """Return the requests that run at once in an engine."""
    config = timed.placed.config
    per_token, length = _cache_per_token(timed), max_sequence_tokens(config)
    slots = use.cache / (per_token * length)
    slots /= timed.placed.component.processes_per_device
    return min(max(1.0, slots), _episodes(config, timed.placed.component), config.rollout.max_concurrent)


def _decode(timed: _TimedModel, use: MemoryUse) -> Cost:
    """Return the cost of decoding: each step reads the KV cache of the running requests and the weights that they use,
    or computes for longer (Pope et al. 2022, arXiv:2211.05102, section 2), and makes two all-reduces per layer.

    Tokens choose experts independently of one another.
    """
    config, shape, parallelism = timed.placed.config, timed.placed.shape, timed.placed.parallelism
    width = _engine_width(timed)
    tensor = parallelism.tensor
    running = _running(timed, use)
    devices, length = tensor * parallelism.pipeline, max_sequence_tokens(config)
    chosen = shape.experts.active / shape.experts.count if shape.experts else 1
    weights = shape.parameters - shape.routed * math.pow(1 - chosen, running)
    mean_length = length - config.rollout.max_response_tokens / 2
    read = weights * width / devices + running * mean_length * _cache_per_token(timed)
    flops = running * forward_flops(shape, length) / devices
    busy = max(read / (timed.figures.memory_bandwidth * BANDWIDTH_SHARE), timed.compute(flops, width))
    step = Cost(busy)
    if tensor > 1:
        sent = timed.send("tensor parallelism", 2 * running * shape.hidden * width, tensor)
        step += 2 * shape.layers * (Cost(ALL_REDUCE_SECONDS) + sent)
    return _episodes(config, timed.placed.component) / running * config.max_episode_tokens * step


def _sync(timed: _TimedModel, use: MemoryUse, devices: int) -> Cost:
    """Return the cost of bringing the weights to every engine; an engine that shares the learner's needs none."""
    return Cost() if use.weights == 0 else _transfer(timed, _engine_width(timed), devices)


def _transfer(timed: _TimedModel, width: int, devices: int) -> Cost:
    """Return the cost of copying the policy's weights, of `width` bytes each, and sending them to other devices."""
    count = timed.placed.shape.parameters * width
    copy = count / (timed.figures.memory_bandwidth * BANDWIDTH_SHARE)
    return Cost(copy) + timed.send("weight sync", count, devices)
