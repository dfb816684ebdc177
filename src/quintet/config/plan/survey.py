"""A whole run in numbers and names, for tables and for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quintet.config.faults import raise_faults
from quintet.config.keys import show
from quintet.config.native import PpoLossConfig
from quintet.config.plan.advice import Planned, advice
from quintet.config.plan.arithmetic import plan
from quintet.config.plan.batches import Data, Share, data_of, sequences_per_game, share
from quintet.config.plan.fit import memory_faults
from quintet.config.plan.loads import Load
from quintet.config.plan.memory import Memory, memory
from quintet.config.plan.models import Models, find_models
from quintet.config.plan.placement import Component, Placement, place, placement_faults

if TYPE_CHECKING:
    from quintet.config.compose import Composed
    from quintet.config.native import Experiment

__all__ = ["Survey", "survey"]

KINDS = {"sft": "supervised fine-tuning", "evaluation": "evaluation of stored answers"}


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
    steps = data.steps if data and data.decide else config.training.steps
    numbers = plan(composed, steps)
    placement, models = place(config), find_models(config)
    raise_faults(placement_faults(composed, placement, models))
    if device_bytes is not None:
        raise_faults(memory_faults(composed, placement, models, device_bytes))
    found = memory(config, placement, models, device_bytes)
    planned = Planned(composed, numbers, steps, placement, models, found, device_bytes)
    learners = [name for name in ("actor", "critic") if placement.of(name) and config.sft is None]
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
    if config.sft is not None:
        batch = {"sequences_per_step": config.sft.batch, "epochs": config.sft.epochs}
        return batch | {"steps": steps, "optimizer_steps": steps} | _data_numbers(data)
    if config.evaluation is not None:
        return {}
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
        "validation_games": config.validation.games * config.validation.sampling.samples,
        **_data_numbers(data),
    }


def _data_numbers(data: Data | None) -> dict[str, Any]:
    return {} if data is None else {"rows": data.rows, "rows_dropped_per_pass": data.dropped}


def _run(config: Experiment, models: Models) -> dict[str, str]:
    kind = next((words for name, words in KINDS.items() if getattr(config, name) is not None), None)
    if kind is None:
        kind = "validation alone" if config.validation.only else "reinforcement learning"
    lines = {"name": config.name, "kind": kind}
    if config.evaluation is not None:
        return lines | {"answers": config.evaluation.path}
    lines |= {"policy": _policy(config, models), **_played(config)}
    return lines | ({"algorithm": _algorithm(config)} if kind == "reinforcement learning" else {})


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
    if config.sft is not None and not config.sft.games:
        return lines
    world = config.world.model_dump()
    told = [f"{key} {show(value)}" for key, value in world.items() if key in ("size", "width", "height", "boxes")]
    return lines | {"world": ", ".join([str(world.get("simulator", config.world.name)), *told])}


def _algorithm(config: Experiment) -> str:
    algorithm, kl = config.algorithm, config.algorithm.kl
    rate = f"learning rate {config.actor.optimizer.learning_rate:g}"
    loss = algorithm.loss
    bounds = f" clipped to {1 - loss.clip_low:g} … {1 + loss.clip_high:g}" if isinstance(loss, PpoLossConfig) else ""
    clip = f"{loss.name}{bounds}"
    held = f"KL ({kl.estimator}) × {kl.coefficient:g} in the {kl.place}" if kl else "no KL"
    return ", ".join([algorithm.advantage.name, clip, held, rate])


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
