"""A whole run in numbers and names, for tables and for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quintet.config.faults import Fault, raise_faults
from quintet.config.keys import show
from quintet.config.native.advantages import OutsideAdvantageConfig
from quintet.config.native.losses import (
    CispoLossConfig,
    ClipCovLossConfig,
    DecoupledPpoLossConfig,
    DistillationLossConfig,
    GspoLossConfig,
    OutsideLossConfig,
    PpoLossConfig,
)
from quintet.config.plan.advice import Planned, advice
from quintet.config.plan.arithmetic import plan
from quintet.config.plan.batches import (
    Data,
    Share,
    data_of,
    evaluated_rows,
    losses_of_fine_tuning,
    passes_of_fine_tuning,
    sequences_per_game,
    share,
)
from quintet.config.plan.fit import memory_faults
from quintet.config.plan.loads import Load
from quintet.config.plan.memory import Memory, memory
from quintet.config.plan.models import Models, find_models
from quintet.config.plan.placement import Component, Placement, place, placement_faults
from quintet.config.plan.steps import batch_key, fine_tuning, too_few
from quintet.config.plan.values import source, told

if TYPE_CHECKING:
    from quintet.config.compose import Composed
    from quintet.config.native import Experiment, PlayedWorld, SftConfig

__all__ = ["Survey", "survey"]

Clipped = (
    PpoLossConfig
    | DecoupledPpoLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | ClipCovLossConfig
    | DistillationLossConfig
)
"""Losses that hold a ratio between two bounds."""


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is known of a run before it begins."""

    composed: Composed
    run: Mapping[str, str]
    """Name, kind, world, policy, algorithm, as people read them."""
    numbers: Mapping[str, Any]
    """None where something can't be known yet."""
    shares: Mapping[str, Share]
    """What falls to one data-parallel rank of each learner."""
    data: Data | None
    placement: Placement
    models: Models
    memory: Memory
    device_bytes: int | None
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as one JSON object."""
        return {
            "run": dict(self.run),
            "arithmetic": dict(self.numbers) | {"learners": {k: _share_json(one) for k, one in self.shares.items()}},
            "placement": _placement_json(self.placement),
            "memory": _memory_json(self),
            "warnings": list(self.warnings),
        }


def survey(composed: Composed, device_bytes: int | None = None) -> Survey:
    """Work all of it out.

    Raises:
        ConfigError: something can't work; one message names every such key.
    """
    config = composed.experiment
    data = data_of(config)
    if data is not None:
        raise_faults(_too_few_rows(composed, data))
    steps = data.steps if data and data.decide else config.training.steps
    if (stage := fine_tuning(config)) and stage.games:
        steps = None
    numbers = plan(composed, steps)
    placement, models = place(config), find_models(config)
    raise_faults(placement_faults(composed, placement, models))
    if device_bytes is not None:
        raise_faults(memory_faults(composed, placement, models, device_bytes))
    found = memory(config, placement, models, device_bytes)
    planned = Planned(composed, numbers, steps, placement, models, found, device_bytes, data)
    learners = [name for name in ("actor", "critic") if placement.of(name) and not fine_tuning(config)]
    return Survey(
        composed,
        _run(config, models),
        _numbers(config, asdict(numbers), data, steps),
        {name: share(config, name, _copies(placement, name)) for name in learners},
        data,
        placement,
        models,
        found,
        device_bytes,
        advice(planned),
    )


def _copies(placement: Placement, name: str) -> int:
    component = placement.of(name)
    return component.copies if component else 1


def _numbers(config: Experiment, numbers: dict[str, Any], data: Data | None, steps: int | None) -> dict[str, Any]:
    """The plan's numbers and those that follow; of a run whose steps are unknown, what holds for each step."""
    training, sequences = config.training, sequences_per_game(config)
    if config.evaluation is not None:
        return {"rows": evaluated_rows(config), "samples": list(config.evaluation.samples)}
    if (stage := fine_tuning(config)) is not None:
        return _numbers_of_fine_tuning(config, stage, data, steps)
    if steps is None:
        numbers |= dict.fromkeys(("games", "optimizer_steps", "validations", "checkpoints"))
    return numbers | {
        "groups_per_step": training.groups_per_step,
        "samples_per_group": training.samples_per_group,
        "sequences_per_step": numbers["games_per_step"] * sequences,
        "sequences_per_mini_batch": numbers["games_per_mini_batch"] * sequences,
        "mini_batches": training.mini_batches,
        "epochs": training.epochs,
        "optimizer_steps_per_step": training.mini_batches * training.epochs,
        "steps": steps,
        "validation_games": _validated(config, data),
        **_data_numbers(data),
    }


def _too_few_rows(composed: Composed, data: Data) -> Iterator[Fault]:
    config = composed.experiment
    if data.rows is None or not data.decide or data.rows >= data.batch or config.validation.only:
        return
    key = batch_key(config)
    message, hint = too_few(config, data.rows, told(composed, key))
    yield Fault(key, data.batch, source(composed, key), message, hint)


def _numbers_of_fine_tuning(
    config: Experiment, stage: SftConfig, data: Data | None, steps: int | None
) -> dict[str, Any]:
    rows = data.rows if data else None
    losses = None
    if steps is not None and rows is not None:
        losses = losses_of_fine_tuning(config, stage, steps, max(1, rows // stage.batch))
    return {
        "sequences_per_step": stage.batch,
        "passes_per_step": passes_of_fine_tuning(config, stage),
        "epochs": stage.epochs,
        "steps": steps,
        "optimizer_steps": steps,
        "validations": losses,
        **({"games": stage.games.games} if stage.games else {}),
        **_data_numbers(data),
    }


def _validated(config: Experiment, data: Data | None) -> int | None:
    """Games of one validation; None where nobody knows how many held-out rows there are."""
    starts = config.held_out_starts if data is None else data.held_out
    return None if starts is None else starts * config.validation.sampling.samples


def _data_numbers(data: Data | None) -> dict[str, Any]:
    if data is None:
        return {}
    known = {"rows": data.rows, "rows_dropped_per_pass": data.dropped, "held_out_rows": data.held_out}
    return known | ({"rows_may_be_left_out": True} if data.at_most else {})


def _run(config: Experiment, models: Models) -> dict[str, str]:
    kind = _kind(config)
    lines = {"name": config.name, "kind": kind}
    if config.evaluation is not None:
        judge = config.evaluation.function or "the rules of each row's source"
        return lines | {"answers": config.evaluation.path, "judged by": judge}
    lines |= {"policy": _policy(config, models), **_played(config)}
    if fine_tuning(config) or config.validation.only:
        return lines
    return lines | {"algorithm": _algorithm(config)}


def _kind(config: Experiment) -> str:
    if config.evaluation is not None:
        return "evaluation of stored answers"
    if fine_tuning(config) is not None:
        return "supervised fine-tuning"
    if config.validation.only:
        return "validation alone"
    return "supervised fine-tuning, then reinforcement learning" if config.sft else "reinforcement learning"


def _policy(config: Experiment, models: Models) -> str:
    path = config.sft.path if config.sft and config.sft.path else config.policy.path
    shape, lora = models.of("actor"), config.policy.lora
    size = f"{_count(shape.parameters)} parameters" if shape else "of unknown size"
    adapted = f", LoRA of rank {lora.rank}" if lora else ""
    return f"{path or config.policy.preset}, {size}, {config.policy.dtype}{adapted}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _played(config: Experiment) -> dict[str, str]:
    """The world, or the files in its place."""
    lines = {}
    if config.data is not None and config.data.train_files:
        lines["data"] = ", ".join(config.data.train_files)
    stage = fine_tuning(config)
    if stage is not None and not stage.games:
        return lines
    told = "; ".join(_world(one, config) for one in config.played)
    return lines | {"worlds" if config.worlds else "world": told}


def _world(one: PlayedWorld, config: Experiment) -> str:
    """What a world is, and of several its part of the games."""
    world = one.config.model_dump()
    told = [f"{key} {show(value)}" for key, value in world.items() if key in ("size", "width", "height", "boxes")]
    kind = ", ".join([str(world.get("simulator", one.config.name)), *told])
    if not config.worlds:
        return kind
    part = one.share / sum(other.share for other in config.played)
    return f"{one.name} ({kind}): {part:.3g} of the groups, {one.validation_games} held-out games"


def _algorithm(config: Experiment) -> str:
    algorithm, kl = config.algorithm, config.algorithm.kl
    rate = f"learning rate {config.actor.optimizer.learning_rate:g}"
    loss, advantage = algorithm.loss, algorithm.advantage
    bounds = f" clipped to {1 - loss.clip_low:g} … {1 + loss.clip_high:g}" if isinstance(loss, Clipped) else ""
    clip = f"{loss.function if isinstance(loss, OutsideLossConfig) else loss.name}{bounds}"
    held = f"KL ({kl.estimator}) × {kl.coefficient:g} in the {kl.place}" if kl else "no KL"
    estimator = advantage.function if isinstance(advantage, OutsideAdvantageConfig) else advantage.name
    return ", ".join([estimator, clip, held, rate])


def _share_json(one: Share) -> dict[str, Any]:
    return {
        "data_parallel_ranks": one.ranks,
        "games_per_rank": one.games,
        "sequences_per_rank": one.sequences,
        "micro_batches": one.passes,
        "gradient_accumulation": one.passes,
        "tokens_per_micro_batch": one.tokens,
        "predicted_tokens_per_micro_batch": one.places,
        "budget": asdict(one.budget),
    }


def _placement_json(placement: Placement) -> dict[str, Any]:
    return {
        "nodes": placement.nodes,
        "devices_per_node": placement.devices_per_node,
        "colocated": placement.colocated,
        "components": {one.name: _component_json(placement, one) for one in placement.components},
        "idle_devices": list(placement.idle),
    }


def _component_json(placement: Placement, component: Component) -> dict[str, Any]:
    nodes = placement.by_node(component)
    return {
        "devices": list(component.devices),
        "devices_by_node": {str(node): list(devices) for node, devices in nodes.items()},
        "copies": component.copies,
        "split": asdict(component.split),
    }


def _memory_json(found: Survey) -> dict[str, Any]:
    """Bytes on one device."""
    return {
        "unknown": {key: {"reason": one.reason, "hint": one.hint} for key, one in found.models.unknown.items()},
        "device_bytes": found.device_bytes,
        "components": {name: _load_json(load) for name, load in found.memory.working.items()},
        "idle": {name: _load_json(load) for name, load in found.memory.idle.items()},
        "peaks": [
            {
                "devices": list(peak.devices),
                "components": list(peak.components),
                "phase": peak.phase,
                "total": peak.total,
                "parts": {name: load.total for name, load in peak.parts.items()},
            }
            for peak in found.memory.peaks
        ],
    }


def _load_json(load: Load) -> dict[str, int]:
    return asdict(load) | {"total": load.total}
