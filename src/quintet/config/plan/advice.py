"""What is legal and looks unwise, each thing in one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.plan.arithmetic import Plan
from quintet.config.plan.batches import Data, budget_of, longest
from quintet.config.plan.fit import gib, remedies
from quintet.config.plan.memory import Memory
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Placement, nearest_batches, ranges
from quintet.config.plan.steps import fine_tuning
from quintet.config.plan.values import told

if TYPE_CHECKING:
    from quintet.config.compose import Composed

__all__ = ["Planned", "advice"]

LARGE_RATE = 1e-4
"""Learning rate above which all weights of a model that was trained before are soon spoilt."""
TIGHT = 0.9
"""Share of a device's memory beyond which what isn't counted may not fit."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is known of a run when advice is given."""

    composed: Composed
    numbers: Plan
    steps: int | None
    placement: Placement
    models: Models
    memory: Memory
    device_bytes: int | None = None
    data: Data | None = None


def advice(planned: Planned) -> tuple[str, ...]:
    """Every warning, those that touch the result first."""
    config = planned.composed.experiment
    if fine_tuning(config) is not None or config.evaluation is not None:
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


def _rate(planned: Planned) -> Iterator[str]:
    config = planned.composed.experiment
    rate = config.actor.optimizer.learning_rate
    if config.policy.path is not None and config.policy.lora is None and rate > LARGE_RATE:
        at = told(planned.composed, "actor.optimizer.learning_rate")
        yield f"{at} suits the small policies made on the spot; a trained model wants about 1e-06"


def _warmup(planned: Planned) -> Iterator[str]:
    learners = ("actor", "critic") if planned.placement.of("critic") else ("actor",)
    for name in learners:
        warmup = getattr(planned.composed.experiment, name).optimizer.warmup_steps
        if planned.steps is not None and 0 < planned.steps <= warmup:
            at = told(planned.composed, f"{name}.optimizer.warmup_steps")
            yield f"{at}: the warm-up outlasts the {planned.steps} steps, the learning rate never reaches its peak"


def _divergence(planned: Planned) -> Iterator[str]:
    kl = planned.composed.experiment.algorithm.kl
    if kl is not None and kl.coefficient == 0 and kl.target is None:
        at = told(planned.composed, "algorithm.kl.coefficient")
        load = planned.memory.working.get("reference")
        cost = f", {gib(load.weights)}" if load else ""
        yield f"{at} has no effect, and a reference is kept for it{cost}: algorithm.kl=null does without"


def _context(planned: Planned) -> Iterator[str]:
    config, shape = planned.composed.experiment, planned.models.of("actor")
    engine = config.rollout.engine_options.max_model_tokens
    limits = {"the model was made for": shape.context if shape else None, "the engine makes room for": engine}
    for words, limit in limits.items():
        if limit is not None and longest(config) > limit:
            at = f"{told(planned.composed, 'rollout.max_prompt_tokens')} and "
            at += told(planned.composed, "rollout.max_response_tokens")
            yield f"{at} are {longest(config):,} tokens, more than the {limit:,} that {words}"


def _history(planned: Planned) -> Iterator[str]:
    """Games whose whole history is kept may outgrow the prompt before their last turn."""
    rollout = planned.composed.experiment.rollout
    start, seen = rollout.max_start_tokens, rollout.max_observation_tokens
    if rollout.window_size is not None or start is None or seen is None:
        return
    last = start + (rollout.max_turns - 1) * (rollout.max_response_tokens + seen)
    if last > rollout.max_prompt_tokens:
        at = told(planned.composed, "rollout.max_prompt_tokens")
        yield f"{at}: the last of {rollout.max_turns} turns may need {last:,}, longer games end early"


def _validation(planned: Planned) -> Iterator[str]:
    config, numbers = planned.composed.experiment, planned.numbers
    starts = config.held_out_starts if planned.data is None else planned.data.held_out or 0
    games = numbers.validations * starts * config.validation.sampling.samples
    if not config.validation.only and planned.steps and games > numbers.games:
        times = f"{numbers.validations} × {starts:,}"
        yield f"validation plays {games:,} games ({times}), more than the {numbers.games:,} of training"


def _budgets(planned: Planned) -> Iterator[str]:
    config = planned.composed.experiment
    budget = budget_of(config, "actor")
    if budget.tokens is not None and budget.tokens < longest(config):
        at = told(planned.composed, budget.key)
        yield f"{at} is less than the longest sequence, {longest(config):,} tokens, which then is a pass by itself"


def _uneven(planned: Planned) -> Iterator[str]:
    """Losses are means over all tokens of a mini-batch, whoever has them: what is uneven costs time alone."""
    training = planned.composed.experiment.training
    games, parts = planned.numbers.games_per_step, training.mini_batches
    for component in filter(None, map(planned.placement.of, ("actor", "critic"))):
        if planned.numbers.games_per_mini_batch % component.copies:
            yield (
                f"{told(planned.composed, 'training.mini_batches')}: its {games // parts} games can't be shared out "
                f"evenly among the {component.copies} data-parallel ranks of {component.name}, so that some wait for "
                f"others; {nearest_batches(training.groups_per_step, games, parts, component.copies)}"
            )
            return


def _recompute(planned: Planned) -> Iterator[str]:
    """Only where it would halve what the fullest device needs, and that is much."""
    config, load, peak = planned.composed.experiment, planned.memory.working.get("actor"), planned.memory.fullest
    if load is None or peak is None or config.actor.gradient_checkpointing or load.activations < 8 << 30:
        return
    known = remedies(config, planned.placement, planned.models, planned.device_bytes)
    best = next((one for one in known if one.key == "actor.gradient_checkpointing"), None)
    if best is not None and best.total < peak.total / 2:
        yield (
            f"activations take {gib(load.activations)}: actor.gradient_checkpointing=true brings the fullest device "
            f"from {gib(peak.total)} to {gib(best.total)}"
        )


def _cache(planned: Planned) -> Iterator[str]:
    """The `hf` engine allocates a slot for each request that might come."""
    config, load = planned.composed.experiment, planned.memory.working.get("rollout")
    held_out = config.held_out_starts if planned.data is None else planned.data.held_out or 0
    most = max(planned.numbers.games_per_step, held_out)
    if load and config.rollout.engine == "hf" and config.rollout.max_concurrent > most and load.cache > 1 << 30:
        at = told(planned.composed, "rollout.max_concurrent")
        yield f"{at}: never more than {most:,} games are played at once, and the cache takes {gib(load.cache)}"


def _devices(planned: Planned) -> Iterator[str]:
    placement, config = planned.placement, planned.composed.experiment
    if placement.idle and placement.components:
        yield f"devices {ranges(placement.idle)} stand idle"
    engine = placement.of("rollout")
    if engine and engine.split.tensor > placement.devices_per_node:
        at = told(planned.composed, "rollout.engine_options.tensor_parallel")
        yield f"{at}: one engine spans machines of {placement.devices_per_node} devices, which is slow"
    shared = any(len(names) > 1 for names in placement.groups())
    if shared and not config.placement.colocated and len(placement.devices) > 1:
        at = told(planned.composed, "placement.colocated")
        yield f"{at}, yet components share devices and hold their memory side by side; give each its own `devices`"


def _tight(planned: Planned) -> Iterator[str]:
    peak, there = planned.memory.fullest, planned.device_bytes
    if peak is not None and there is not None and TIGHT * there < peak.total <= there:
        yield f"{gib(peak.total)} of {gib(there)} leave little for CUDA, communication and fragmentation"


def _family(planned: Planned) -> Iterator[str]:
    shape = planned.models.of("actor")
    if shape is not None and not shape.known:
        at = told(planned.composed, "policy.path")
        yield f"{at}: models of type {shape.family!r} are counted as if they were Llama"
