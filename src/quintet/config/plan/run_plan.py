"""The complete plan of a run, for `quintet plan` as a table and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from quintet.config.composed import ComposedConfig
from quintet.config.native.data import GenerationConfig, JudgeConfig
from quintet.config.native.envs import SvgConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.losses import DistillationLossConfig, LossSection
from quintet.config.native.mixed_envs import RunEnv
from quintet.config.native.training import SftConfig
from quintet.config.plan.advice import PlannedRun, advice
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.plan.batches import (
    RankWorkload,
    max_mini_batches,
    max_sequences_per_episode,
    num_sft_validations,
    rank_workload,
)
from quintet.config.plan.component_memory import encoder_activations
from quintet.config.plan.devices import DeviceFigures
from quintet.config.plan.disk import DiskUse, plan_disk
from quintet.config.plan.images import image_problems, largest_images, trains_encoder
from quintet.config.plan.machine import machine_of
from quintet.config.plan.memory import memory_problems
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.models import Models, find_models, policy_path
from quintet.config.plan.placed_model import PlacedModel
from quintet.config.plan.placement import Placement, format_ranges, place_components, placement_problems
from quintet.config.plan.robot_batches import robot_arithmetic
from quintet.config.plan.row_counts import TrainingRows, batch_key, count_rows, count_training_rows, too_few_rows
from quintet.config.plan.step_time import encoder_share, step_seconds, total_seconds
from quintet.config.plan.weight_transfer import weight_transfers
from quintet.config.problems import raise_problems
from quintet.config.schema import format_value

CLIPPED_RATIO = ("ppo", "decoupled_ppo", "gspo", "cispo", "clip_cov", "distillation")
"""Losses that clip a ratio between `1 - clip_low` and `1 + clip_high`."""


@dataclass(frozen=True)
class RunPlan(PlannedRun):
    """A planned run as the user sees it."""

    @cached_property
    def numbers(self) -> Mapping[str, Any]:
        """Counts by name; None if a number is not known yet."""
        if (evaluation := self.config.evaluation) is not None:
            return {"rows": count_rows([evaluation.path]), "samples": list(evaluation.samples)}
        if self.config.generation is not None:
            return _numbers_of_generation(self, self.config.generation)
        stage = self.config.sft_only
        return _numbers(self) if stage is None else _numbers_of_fine_tuning(self, stage)

    @property
    def workloads(self) -> Mapping[str, RankWorkload]:
        """Work of one data-parallel rank of each learner in reinforcement learning."""
        trains = self.config.sft_only is None and self.config.generation is None
        names = ("actor", "critic") if trains else ()
        learners = filter(None, map(self.placement.of, names))
        return {learner.name: rank_workload(self.config, learner.name, learner.copies) for learner in learners}

    @cached_property
    def images(self) -> Mapping[str, Any] | None:
        """Images of a vision-language policy: tokens of each, their maximum per sequence, parameters and activations of
        the vision encoder, and its share of the FLOPs of an update; None without images or if their size is unknown."""
        shape, actor = self.models.of("actor"), self.placement.of("actor")
        images = largest_images(self.config, shape)
        if shape is None or shape.encoder is None or actor is None or images is None or not self.workloads:
            return None
        placed, work = PlacedModel(self.config, actor, shape), self.workloads["actor"]
        trained = trains_encoder(self.config, "actor")
        return {
            "key": images.key,
            "tokens_per_image": images.tokens,
            "is_exact": images.is_exact,
            "images_per_sequence": images.per_sequence,
            "encoder_parameters": shape.encoder.parameters,
            "encoder_activations": encoder_activations(placed, work, backward=trained),
            "encoder_share_of_update": encoder_share(placed, work),
        }

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        return advice(self)

    @property
    def timed_shape(self) -> ModelShape | None:
        """Shape of the policy if the run computes on the CPU of this machine, whose rate tells the time of a step."""
        is_timed = self.machine is not None and self.machine.on_cpu and not self.config.env.is_simulator
        is_trained = self.config.evaluation is None and self.config.generation is None
        return self.models.of("actor") if is_timed and is_trained and not self.config.validation.only else None

    def step_seconds(self, figures: DeviceFigures) -> float:
        """Return the estimated seconds of a step on devices with these figures."""
        seconds = step_seconds(self.config, self.placement, self.models, self.memory, figures)
        return total_seconds(self.config, seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        learners = {
            name: asdict(workload) | {"gradient_accumulation": workload.micro_batches}
            for name, workload in self.workloads.items()
        }
        return {
            "run": describe_run(self.config, self.models),
            "arithmetic": {**self.numbers, "learners": learners},
            "images": self.images,
            "placement": _placement_json(self.placement)
            | {"weight_transfers": [asdict(each) for each in weight_transfers(self.config)]},
            "memory": _memory_json(self),
            "disk": None if self.disk is None else asdict(self.disk) | {"total": self.disk.total},
            "warnings": list(self.warnings),
        }


def plan_run(composed: ComposedConfig, device_bytes: int | None = None) -> RunPlan:
    """Compute the plan; with `device_bytes`, check that the run fits into devices of that size.

    Raises:
        ConfigError: one message names every key that cannot work.
    """
    config = composed.experiment
    data = count_training_rows(config)
    is_trained = not config.validation.only and config.generation is None
    if data and data.sets_steps and data.rows is not None and data.rows < data.batch and is_trained:
        raise_problems([composed.problem(batch_key(config), *too_few_rows(config, data.rows))])
    steps = _num_steps(config, data)
    counts = compute_batch_arithmetic(composed, steps)
    placement, models = place_components(config), find_models(config)
    if config.generation is not None:  # the weights are those of the engines
        engines = tuple(component for component in placement.components if component.name != "actor")
        placement = replace(placement, components=engines)
    raise_problems([*placement_problems(composed, placement, models), *image_problems(composed, models)])
    if device_bytes is not None:
        raise_problems(memory_problems(composed, placement, models, device_bytes))
    machine = machine_of(config) if device_bytes is None else None
    return RunPlan(composed, counts, steps, data, placement, models, device_bytes, machine)


def _num_steps(config: Experiment, data: TrainingRows | None) -> int | None:
    """Return the number of steps, None if it is unknown."""
    if config.sft_only is not None and config.sft_only.episodes:
        return None
    return data.steps if data and data.sets_steps else config.training.steps


def planned_disk(composed: ComposedConfig) -> DiskUse:
    """Return the disk use of a run."""
    config = composed.experiment
    steps = _num_steps(config, count_training_rows(config))
    return plan_disk(config, place_components(config), find_models(config), steps)


def _numbers(plan: RunPlan) -> dict[str, Any]:
    """Return the counts of reinforcement learning; totals are None if the number of steps is unknown."""
    training = plan.config.training
    sequences = max_sequences_per_episode(plan.config)
    starts = plan.validation_starts
    counts = asdict(plan.counts)
    if plan.steps is None:
        counts |= dict.fromkeys(("episodes", "optimizer_steps", "validations", "checkpoints"))
    return counts | {
        "groups_per_step": training.groups_per_step,
        "samples_per_group": training.samples_per_group,
        "sequences_per_step": counts["episodes_per_step"] * sequences,
        "sequences_per_mini_batch": counts["episodes_per_mini_batch"] * sequences,
        "mini_batches": training.mini_batches,
        "epochs": training.epochs,
        "optimizer_steps_per_step": max_mini_batches(plan.config) * training.epochs,
        "steps": plan.steps,
        **({"robots": asdict(robot_arithmetic(plan.config))} if plan.config.env.is_simulator else {}),
        "validation_episodes": None if starts is None else starts * plan.config.validation.sampling.samples,
        **_data_numbers(plan.data),
    }


def _numbers_of_fine_tuning(plan: RunPlan, stage: SftConfig) -> dict[str, Any]:
    validations = None
    if plan.steps is not None and plan.data is not None and plan.data.rows is not None:
        validations = num_sft_validations(plan.config, stage, plan.steps, max(1, plan.data.rows // stage.batch))
    return {
        "sequences_per_step": stage.batch,
        "passes_per_step": rank_workload(plan.config, "actor", 1).micro_batches,
        "epochs": stage.epochs,
        "steps": plan.steps,
        "optimizer_steps": plan.steps,
        "validations": validations,
        **({"episodes": stage.episodes.episodes} if stage.episodes else {}),
        **_data_numbers(plan.data),
    }


def _numbers_of_generation(plan: RunPlan, generation: GenerationConfig) -> dict[str, Any]:
    """Return the counts of a run that only generates; None if the number of rows is unknown."""
    rows = plan.data.rows if plan.data is not None else None
    return {
        "prompts": rows,
        "samples": generation.samples,
        "responses": None if rows is None else rows * generation.samples,
        "batches": None if rows is None else -(-rows // generation.batch_size),
    }


def _data_numbers(data: TrainingRows | None) -> dict[str, Any]:
    if data is None:
        return {}
    counts = {"rows": data.rows, "rows_dropped_per_pass": data.dropped, "held_out_rows": data.held_out}
    return counts | ({"rows_may_be_left_out": True} if data.may_be_filtered else {})


def describe_run(config: Experiment, models: Models) -> dict[str, str]:
    """Return name, kind, env, policy and algorithm as text."""
    lines = {"name": config.name, "kind": describe_kind(config)}
    if config.evaluation is not None:
        scorer = config.evaluation.function or "the verifier of each row's source"
        return lines | {"responses": config.evaluation.path, "scored by": scorer}
    lines |= {"policy": _policy(config, models), **_env_lines(config)}
    if config.generation is not None:
        return lines | {"responses": config.generation.output_path}
    if config.sft_only or config.validation.only:
        return lines
    return lines | _judge_lines(config) | {"algorithm": _algorithm(config)}


def _judge_lines(config: Experiment) -> dict[str, str]:
    """Return the line about models that judge responses."""
    judges = config.reward.judges if config.reward is not None else {}
    lines = [
        _judge(section.removeprefix("verifiers.").removesuffix(".judge"), judge) for section, judge in judges.items()
    ]
    return {"judge": "; ".join(lines)} if lines else {}


def _judge(domain: str, judge: JudgeConfig) -> str:
    """Describe a judge with the domain that it judges, if it is not the only one."""
    name = "" if domain == "judge" else f"{domain}: "
    if judge.server is None:
        return f"{name}{judge.model} at {judge.url}"
    devices = judge.server.devices
    where = f" on devices {format_ranges(devices)}, not counted under memory" if devices else ""
    return f"{name}{judge.server.path}, served by {judge.server.engine}{where}"


def describe_kind(config: Experiment) -> str:
    """Return the kind of a run in words, such as `reinforcement learning`."""
    if config.evaluation is not None:
        return "evaluation of stored answers"
    if config.generation is not None:
        return "generation of responses"
    if config.sft_only is not None:
        return "supervised fine-tuning"
    if config.validation.only:
        return "validation only"
    return "supervised fine-tuning, then reinforcement learning" if config.sft else "reinforcement learning"


def _policy(config: Experiment, models: Models) -> str:
    shape, lora = models.of("actor"), config.policy.lora
    size = f"{_count(shape.parameters)} parameters" if shape else "of unknown size"
    adapted = f", LoRA of rank {lora.rank}" if lora else ""
    return f"{policy_path(config) or config.policy.preset}, {size}, {config.policy.dtype}{adapted}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _env_lines(config: Experiment) -> dict[str, str]:
    """Return the lines about env and data files."""
    lines = {}
    if config.data is not None and config.data.train_files:
        lines["data"] = ", ".join(config.data.train_files)
    stage = config.sft_only
    if stage is not None and not stage.episodes:
        return lines
    envs = "; ".join(_env(env, config) for env in config.run_envs)
    return lines | {"envs" if config.envs else "env": envs}


def _env(env: RunEnv, config: Experiment) -> str:
    """Describe an env, and its share of the groups if there are several."""
    values = env.config.model_dump()
    sizes = [f"{key} {format_value(values[key])}" for key in ("size", "width", "height", "boxes") if key in values]
    if isinstance(env.config, SvgConfig):
        scores = (f"{name} × {weight:g}" for name, weight in env.config.weights.items())
        sizes = [env.config.dataset or "icons", " + ".join(scores) or "no score"]
    kind = ", ".join([str(values.get("simulator", env.config.name)), *sizes])
    if not config.envs:
        return kind
    share = env.share / sum(other.share for other in config.run_envs)
    return f"{env.name} ({kind}): {share:.3g} of the groups, {env.validation_episodes} held-out episodes"


def _algorithm(config: Experiment) -> str:
    advantage, clip = config.algorithm.advantage, _loss(config.algorithm.loss)
    estimator = getattr(advantage, "function", advantage.name)
    terms = [term for term in (config.algorithm.kl_in_loss, config.algorithm.kl_in_reward) if term is not None]
    kl = [f"KL ({term.estimator}) × {term.coefficient:g} in the {term.apply_to}" for term in terms]
    kl_term = ", ".join(kl or ["no KL"])
    entropy = f"entropy × {config.algorithm.entropy_coefficient:g}"
    return f"{estimator}, {clip}, {kl_term}, {entropy}, learning rate {config.actor.optimizer.learning_rate:g}"


def _loss(section: LossSection) -> str:
    """Describe the policy loss, with the bounds of its ratio."""
    if isinstance(section, DistillationLossConfig) and section.gradient == "direct":
        text = f"distillation ({section.estimator})"
    else:
        loss = section.model_dump()
        text = str(loss.get("function", loss["name"]))
        text += f" ({section.estimator})" if isinstance(section, DistillationLossConfig) else ""
        if loss["name"] in CLIPPED_RATIO:
            text += f" clipped to {1 - loss['clip_low']:g} … {1 + loss['clip_high']:g}"
    if isinstance(section, DistillationLossConfig) and section.task is not None:
        return f"{_loss(section.task)} + {section.weight:g} × {text}"
    return text


def _placement_json(placement: Placement) -> dict[str, Any]:
    components = {
        component.name: {
            "devices": list(component.devices),
            "devices_by_node": {str(node): devices for node, devices in placement.by_node(component).items()},
            "copies": component.copies,
            "split": asdict(component.parallelism),
        }
        for component in placement.components
    }
    sizes = {"nodes": placement.nodes, "devices_per_node": placement.devices_per_node}
    return sizes | {"colocated": placement.colocated, "components": components, "idle_devices": placement.idle}


def _memory_json(plan: RunPlan) -> dict[str, Any]:
    """Return memory in bytes on one device."""
    return {
        "unknown": {key: asdict(model) for key, model in plan.models.unknown.items()},
        "device_bytes": plan.device_bytes,
        "machine": None if plan.machine is None else asdict(plan.machine),
        "components": {name: use.to_json() for name, use in plan.memory.active.items()},
        "idle": {name: use.to_json() for name, use in plan.memory.idle.items()},
        "peaks": [
            asdict(peak)
            | {"devices": list(peak.devices), "total": peak.total}
            | {"parts": {name: use.total for name, use in peak.parts.items()}}
            for peak in plan.memory.peaks
        ],
    }
