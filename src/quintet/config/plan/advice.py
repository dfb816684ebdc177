"""Warnings about settings that are valid and probably unwise, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quintet.config.composed import ComposedConfig
from quintet.config.config_values import describe_value
from quintet.config.plan.batch_arithmetic import BatchArithmetic
from quintet.config.plan.batches import max_sequence_tokens, micro_batch_budget
from quintet.config.plan.memory import MemoryPlan
from quintet.config.plan.memory_fit import format_bytes, memory_savings
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Placement, format_ranges, nearest_batches
from quintet.config.plan.row_counts import TrainingRows
from quintet.config.plan.steps import sft_only

LARGE_RATE = 1e-4
"""Learning rate above which full-parameter training of a pretrained model usually diverges."""
TIGHT_FIT = 0.9
"""Share of device memory above which memory that is not estimated may not fit."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Input of the checks."""

    composed: ComposedConfig
    numbers: BatchArithmetic
    steps: int | None
    placement: Placement
    models: Models
    memory: MemoryPlan
    device_bytes: int | None = None
    data: TrainingRows | None = None


def advice(planned: PlannedRun) -> tuple[str, ...]:
    """Return all warnings, those that affect results first."""
    config = planned.composed.experiment
    if sft_only(config) is not None or config.evaluation is not None:
        return (*_devices(planned), *_tight(planned), *_family(planned))
    checks = (
        _rate,
        _warmup,
        _divergence,
        _context,
        _history,
        _validation,
        _budgets,
        _uneven,
        _recompute,
        _cache,
        _devices,
    )
    return tuple(line for check in (*checks, _tight, _family) for line in check(planned))


def _rate(planned: PlannedRun) -> Iterator[str]:
    config = planned.composed.experiment
    rate = config.actor.optimizer.learning_rate
    if config.policy.path is not None and config.policy.lora is None and rate > LARGE_RATE:
        setting = describe_value(planned.composed, "actor.optimizer.learning_rate")
        yield f"{setting} suits the small preset policies; for a pretrained model use about 1e-06"


def _warmup(planned: PlannedRun) -> Iterator[str]:
    learners = ("actor", "critic") if planned.placement.of("critic") else ("actor",)
    for name in learners:
        warmup = getattr(planned.composed.experiment, name).optimizer.warmup_steps
        if planned.steps is not None and 0 < planned.steps <= warmup:
            setting = describe_value(planned.composed, f"{name}.optimizer.warmup_steps")
            yield f"{setting}: the warm-up outlasts the {planned.steps} steps, the learning rate never reaches its peak"


def _divergence(planned: PlannedRun) -> Iterator[str]:
    kl = planned.composed.experiment.algorithm.kl
    if kl is not None and kl.coefficient == 0 and kl.target is None:
        at = describe_value(planned.composed, "algorithm.kl.coefficient")
        load = planned.memory.active.get("reference")
        cost = f", {format_bytes(load.weights)}" if load else ""
        yield f"{at} has no effect, and a reference model is loaded for it{cost}: set algorithm.kl=null"


def _context(planned: PlannedRun) -> Iterator[str]:
    config, shape = planned.composed.experiment, planned.models.of("actor")
    engine = config.rollout.engine_options.max_model_tokens
    limits = {"the model supports": shape.context if shape else None, "the engine allows": engine}
    for supporter, limit in limits.items():
        if limit is not None and max_sequence_tokens(config) > limit:
            at = f"{describe_value(planned.composed, 'rollout.max_prompt_tokens')} and "
            at += describe_value(planned.composed, "rollout.max_response_tokens")
            yield f"{at} are {max_sequence_tokens(config):,} tokens, more than the {limit:,} that {supporter}"


def _history(planned: PlannedRun) -> Iterator[str]:
    """Warn if episodes without a window may exceed the prompt before their last turn."""
    rollout = planned.composed.experiment.rollout
    start, seen = rollout.max_start_tokens, rollout.max_observation_tokens
    if rollout.window_size is not None or start is None or seen is None:
        return
    last = start + (rollout.max_turns - 1) * (rollout.max_response_tokens + seen)
    if last > rollout.max_prompt_tokens:
        setting = describe_value(planned.composed, "rollout.max_prompt_tokens")
        yield f"{setting}: the last of {rollout.max_turns} turns may need {last:,} tokens; longer episodes end early"


def _validation(planned: PlannedRun) -> Iterator[str]:
    config, numbers = planned.composed.experiment, planned.numbers
    starts = config.validation_start_states if planned.data is None else planned.data.held_out or 0
    episodes = numbers.validations * starts * config.validation.sampling.samples
    if not config.validation.only and planned.steps and episodes > numbers.episodes:
        times = f"{numbers.validations} × {starts:,}"
        yield f"validation runs {episodes:,} episodes ({times}), more than the {numbers.episodes:,} of training"


def _budgets(planned: PlannedRun) -> Iterator[str]:
    config = planned.composed.experiment
    budget = micro_batch_budget(config, "actor")
    if budget.tokens is not None and budget.tokens < max_sequence_tokens(config):
        setting = describe_value(planned.composed, budget.key)
        length = f"{max_sequence_tokens(config):,} tokens"
        yield f"{setting} is less than the longest sequence, {length}, which then is a micro-batch alone"


def _uneven(planned: PlannedRun) -> Iterator[str]:
    """Warn about idle ranks; results are not affected, since losses average over all tokens of a mini-batch."""
    training = planned.composed.experiment.training
    episodes, parts = planned.numbers.episodes_per_step, training.mini_batches
    for component in filter(None, map(planned.placement.of, ("actor", "critic"))):
        if planned.numbers.episodes_per_mini_batch % component.copies:
            setting = describe_value(planned.composed, "training.mini_batches")
            yield (
                f"{setting}: its {episodes // parts} episodes cannot be divided "
                f"evenly over the {component.copies} data-parallel ranks of {component.name}, so some ranks wait for "
                f"others; {nearest_batches(training.groups_per_step, episodes, parts, component.copies)}"
            )
            return


def _recompute(planned: PlannedRun) -> Iterator[str]:
    """Suggest gradient checkpointing if it halves a large peak."""
    config, load, peak = planned.composed.experiment, planned.memory.active.get("actor"), planned.memory.fullest
    if load is None or peak is None or config.actor.gradient_checkpointing or load.activations < 8 << 30:
        return
    known = memory_savings(config, planned.placement, planned.models, planned.device_bytes)
    best = next((one for one in known if one.key == "actor.gradient_checkpointing"), None)
    if best is not None and best.total < peak.total / 2:
        yield (
            f"activations take {format_bytes(load.activations)}: actor.gradient_checkpointing=true lowers the peak "
            f"from {format_bytes(peak.total)} to {format_bytes(best.total)}"
        )


def _cache(planned: PlannedRun) -> Iterator[str]:
    """Warn about unused slots: the `hf` engine allocates one for each of `max_concurrent` requests."""
    config, load = planned.composed.experiment, planned.memory.active.get("rollout")
    validation_rows = config.validation_start_states if planned.data is None else planned.data.held_out or 0
    max_running = max(planned.numbers.episodes_per_step, validation_rows)
    if load and config.rollout.engine == "hf" and config.rollout.max_concurrent > max_running and load.cache > 1 << 30:
        setting = describe_value(planned.composed, "rollout.max_concurrent")
        cache = format_bytes(load.cache)
        yield f"{setting}: at most {max_running:,} episodes run at once, and the KV cache takes {cache}"


def _devices(planned: PlannedRun) -> Iterator[str]:
    placement, config = planned.placement, planned.composed.experiment
    if placement.idle and placement.components:
        yield f"devices {format_ranges(placement.idle)} are unused"
    engine = placement.of("rollout")
    if engine and engine.parallelism.tensor > placement.devices_per_node:
        setting = describe_value(planned.composed, "rollout.engine_options.tensor_parallel")
        yield f"{setting}: one engine spans machines of {placement.devices_per_node} devices, which is slow"
    shared = any(len(names) > 1 for names in placement.groups())
    if shared and not config.placement.colocated and len(placement.devices) > 1:
        setting = describe_value(planned.composed, "placement.colocated")
        yield f"{setting}, yet components share devices and hold their memory side by side; give each its own `devices`"


def _tight(planned: PlannedRun) -> Iterator[str]:
    peak, available = planned.memory.fullest, planned.device_bytes
    if peak is not None and available is not None and TIGHT_FIT * available < peak.total <= available:
        used = f"{format_bytes(peak.total)} of {format_bytes(available)}"
        yield f"{used} leave little memory for CUDA, communication and fragmentation"


def _family(planned: PlannedRun) -> Iterator[str]:
    shape = planned.models.of("actor")
    if shape is not None and not shape.known:
        setting = describe_value(planned.composed, "policy.path")
        yield f"{setting}: models of type {shape.family!r} are estimated as if they were Llama"
