"""The complete plan of a run, for `quintet plan` as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quintet.config.config_values import describe_value, value_source
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
from quintet.config.plan.advice import PlannedRun, advice
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.plan.batches import (
    RankWorkload,
    TrainingRows,
    count_evaluated_rows,
    count_training_rows,
    max_sequences_per_episode,
    num_sft_validations,
    rank_workload,
    sft_passes_per_step,
)
from quintet.config.plan.component_memory import MemoryUse
from quintet.config.plan.memory import MemoryPlan, plan_memory
from quintet.config.plan.memory_fit import memory_problems
from quintet.config.plan.models import Models, find_models
from quintet.config.plan.placement import Component, Placement, place_components, placement_problems
from quintet.config.plan.steps import batch_key, sft_only, too_few_rows
from quintet.config.problems import ConfigProblem, raise_problems
from quintet.config.schema import format_value

if TYPE_CHECKING:
    from quintet.config.composed import ComposedConfig
    from quintet.config.native.experiment import Experiment
    from quintet.config.native.mixture import RunEnv
    from quintet.config.native.training import SftConfig

ClippedLossConfig = (
    PpoLossConfig
    | DecoupledPpoLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | ClipCovLossConfig
    | DistillationLossConfig
)
"""Losses that clip a ratio between two bounds."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything known about a run before it starts."""

    composed: ComposedConfig
    run: Mapping[str, str]
    """Name, kind, env, policy and algorithm as text."""
    numbers: Mapping[str, Any]
    """Counts; None if a number is not known yet."""
    workloads: Mapping[str, RankWorkload]
    """Work of one data-parallel rank of each learner."""
    data: TrainingRows | None
    placement: Placement
    models: Models
    memory: MemoryPlan
    device_bytes: int | None
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {
            "run": dict(self.run),
            "arithmetic": dict(self.numbers)
            | {"learners": {k: _workload_json(one) for k, one in self.workloads.items()}},
            "placement": _placement_json(self.placement),
            "memory": _memory_json(self),
            "warnings": list(self.warnings),
        }


def plan_run(composed: ComposedConfig, device_bytes: int | None = None) -> RunPlan:
    """Compute the plan; with `device_bytes`, check that the run fits into devices of that size.

    Raises:
        ConfigError: one message names every key that cannot work.
    """
    config = composed.experiment
    data = count_training_rows(config)
    if data is not None:
        raise_problems(_too_few_rows(composed, data))
    steps = data.steps if data and data.sets_steps else config.training.steps
    if (stage := sft_only(config)) and stage.episodes:
        steps = None
    numbers = compute_batch_arithmetic(composed, steps)
    placement, models = place_components(config), find_models(config)
    raise_problems(placement_problems(composed, placement, models))
    if device_bytes is not None:
        raise_problems(memory_problems(composed, placement, models, device_bytes))
    memory = plan_memory(config, placement, models, device_bytes)
    planned = PlannedRun(composed, numbers, steps, placement, models, memory, device_bytes, data)
    learners = [name for name in ("actor", "critic") if placement.of(name) and not sft_only(config)]
    return RunPlan(
        composed,
        _run(config, models),
        _numbers(config, asdict(numbers), data, steps),
        {name: rank_workload(config, name, _copies(placement, name)) for name in learners},
        data,
        placement,
        models,
        memory,
        device_bytes,
        advice(planned),
    )


def _copies(placement: Placement, name: str) -> int:
    component = placement.of(name)
    return component.copies if component else 1


def _numbers(
    config: Experiment, numbers: dict[str, Any], data: TrainingRows | None, steps: int | None
) -> dict[str, Any]:
    """Return all counts of the plan; totals are None if the number of steps is unknown."""
    training, sequences = config.training, max_sequences_per_episode(config)
    if config.evaluation is not None:
        return {"rows": count_evaluated_rows(config), "samples": list(config.evaluation.samples)}
    if (stage := sft_only(config)) is not None:
        return _numbers_of_fine_tuning(config, stage, data, steps)
    if steps is None:
        numbers |= dict.fromkeys(("episodes", "optimizer_steps", "validations", "checkpoints"))
    return numbers | {
        "groups_per_step": training.groups_per_step,
        "samples_per_group": training.samples_per_group,
        "sequences_per_step": numbers["episodes_per_step"] * sequences,
        "sequences_per_mini_batch": numbers["episodes_per_mini_batch"] * sequences,
        "mini_batches": training.mini_batches,
        "epochs": training.epochs,
        "optimizer_steps_per_step": training.mini_batches * training.epochs,
        "steps": steps,
        "validation_episodes": _validation_episodes(config, data),
        **_data_numbers(data),
    }


def _too_few_rows(composed: ComposedConfig, data: TrainingRows) -> Iterator[ConfigProblem]:
    config = composed.experiment
    if data.rows is None or not data.sets_steps or data.rows >= data.batch or config.validation.only:
        return
    key = batch_key(config)
    message, hint = too_few_rows(config, data.rows, describe_value(composed, key))
    yield ConfigProblem(key, data.batch, value_source(composed, key), message, hint)


def _numbers_of_fine_tuning(
    config: Experiment, stage: SftConfig, data: TrainingRows | None, steps: int | None
) -> dict[str, Any]:
    rows = data.rows if data else None
    losses = None
    if steps is not None and rows is not None:
        losses = num_sft_validations(config, stage, steps, max(1, rows // stage.batch))
    return {
        "sequences_per_step": stage.batch,
        "passes_per_step": sft_passes_per_step(config, stage),
        "epochs": stage.epochs,
        "steps": steps,
        "optimizer_steps": steps,
        "validations": losses,
        **({"episodes": stage.episodes.episodes} if stage.episodes else {}),
        **_data_numbers(data),
    }


def _validation_episodes(config: Experiment, data: TrainingRows | None) -> int | None:
    """Return the episodes of one validation, None if the number of held-out rows is unknown."""
    starts = config.validation_start_states if data is None else data.held_out
    return None if starts is None else starts * config.validation.sampling.samples


def _data_numbers(data: TrainingRows | None) -> dict[str, Any]:
    if data is None:
        return {}
    known = {"rows": data.rows, "rows_dropped_per_pass": data.dropped, "held_out_rows": data.held_out}
    return known | ({"rows_may_be_left_out": True} if data.may_be_filtered else {})


def _run(config: Experiment, models: Models) -> dict[str, str]:
    kind = _kind(config)
    lines = {"name": config.name, "kind": kind}
    if config.evaluation is not None:
        scorer = config.evaluation.function or "the verifier of each row's source"
        return lines | {"responses": config.evaluation.path, "scored by": scorer}
    lines |= {"policy": _policy(config, models), **_env_lines(config)}
    if sft_only(config) or config.validation.only:
        return lines
    return lines | {"algorithm": _algorithm(config)}


def _kind(config: Experiment) -> str:
    if config.evaluation is not None:
        return "evaluation of stored answers"
    if sft_only(config) is not None:
        return "supervised fine-tuning"
    if config.validation.only:
        return "validation only"
    return "supervised fine-tuning, then reinforcement learning" if config.sft else "reinforcement learning"


def _policy(config: Experiment, models: Models) -> str:
    path = config.sft.path if config.sft and config.sft.path else config.policy.path
    shape, lora = models.of("actor"), config.policy.lora
    size = f"{_count(shape.parameters)} parameters" if shape else "of unknown size"
    adapted = f", LoRA of rank {lora.rank}" if lora else ""
    return f"{path or config.policy.preset}, {size}, {config.policy.dtype}{adapted}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _env_lines(config: Experiment) -> dict[str, str]:
    """Return the lines about env and data files."""
    lines = {}
    if config.data is not None and config.data.train_files:
        lines["data"] = ", ".join(config.data.train_files)
    stage = sft_only(config)
    if stage is not None and not stage.episodes:
        return lines
    envs = "; ".join(_env(env, config) for env in config.played)
    return lines | {"envs" if config.envs else "env": envs}


def _env(one: RunEnv, config: Experiment) -> str:
    """Describe an env, and its share of the groups if there are several."""
    env = one.config.model_dump()
    options = [
        f"{key} {format_value(value)}" for key, value in env.items() if key in ("size", "width", "height", "boxes")
    ]
    kind = ", ".join([str(env.get("simulator", one.config.name)), *options])
    if not config.envs:
        return kind
    share = one.share / sum(other.share for other in config.played)
    return f"{one.name} ({kind}): {share:.3g} of the groups, {one.validation_episodes} held-out episodes"


def _algorithm(config: Experiment) -> str:
    algorithm, kl = config.algorithm, config.algorithm.kl
    rate = f"learning rate {config.actor.optimizer.learning_rate:g}"
    loss, advantage = algorithm.loss, algorithm.advantage
    bounds = (
        f" clipped to {1 - loss.clip_low:g} … {1 + loss.clip_high:g}" if isinstance(loss, ClippedLossConfig) else ""
    )
    clip = f"{loss.function if isinstance(loss, OutsideLossConfig) else loss.name}{bounds}"
    kl_term = f"KL ({kl.estimator}) × {kl.coefficient:g} in the {kl.apply_to}" if kl else "no KL"
    estimator = advantage.function if isinstance(advantage, OutsideAdvantageConfig) else advantage.name
    return ", ".join([estimator, clip, kl_term, rate])


def _workload_json(one: RankWorkload) -> dict[str, Any]:
    return {
        "data_parallel_ranks": one.ranks,
        "episodes_per_rank": one.episodes,
        "sequences_per_rank": one.sequences,
        "micro_batches": one.micro_batches,
        "gradient_accumulation": one.micro_batches,
        "tokens_per_micro_batch": one.tokens,
        "predicted_tokens_per_micro_batch": one.predicted_tokens,
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
        "split": asdict(component.parallelism),
    }


def _memory_json(found: RunPlan) -> dict[str, Any]:
    """Return memory in bytes on one device."""
    return {
        "unknown": {key: {"reason": one.reason, "hint": one.hint} for key, one in found.models.unknown.items()},
        "device_bytes": found.device_bytes,
        "components": {name: _load_json(load) for name, load in found.memory.active.items()},
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


def _load_json(load: MemoryUse) -> dict[str, int]:
    return asdict(load) | {"total": load.total}
