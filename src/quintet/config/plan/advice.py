"""Warnings about settings that are valid and probably unwise, one line each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from quintet.config.composed import ComposedConfig, config_value
from quintet.config.native.experiment import Experiment
from quintet.config.plan.batch_arithmetic import BatchArithmetic
from quintet.config.plan.batches import max_sequence_tokens, micro_batch_limits
from quintet.config.plan.disk import DiskUse, disk_problem, plan_disk
from quintet.config.plan.format_sizes import format_bytes
from quintet.config.plan.images import has_unknown_images, largest_images
from quintet.config.plan.machine import Machine
from quintet.config.plan.memory import MemoryPlan, machine_warning, memory_savings, plan_memory
from quintet.config.plan.models import Models
from quintet.config.plan.overlap import overlaps_training
from quintet.config.plan.placement import Placement, format_ranges, nearest_batches
from quintet.config.plan.row_counts import TrainingRows
from quintet.config.plan.suitable_defaults import RATE, is_new_policy, suitable_rate, trains_adapters

LARGE_RATE, LARGE_LORA_RATE = 1e-4, 1e-3
"""Learning rates above which training of all weights of a pretrained model, or of its adapters, usually diverges."""
TIGHT_FIT = 0.9
"""Share of device memory above which memory that is not estimated may not fit."""


@dataclass(frozen=True)
class PlannedRun:
    """Everything known about a run before it starts."""

    composed: ComposedConfig
    counts: BatchArithmetic
    steps: int | None
    """None if the number of steps is not known yet."""
    data: TrainingRows | None
    """None if the run does not learn from files."""
    placement: Placement
    models: Models
    device_bytes: int | None
    machine: Machine | None
    """This machine, None if the run is for other devices."""

    @property
    def config(self) -> Experiment:
        return self.composed.experiment

    @cached_property
    def memory(self) -> MemoryPlan:
        return self.estimate_memory(self.config)

    def estimate_memory(self, config: Experiment) -> MemoryPlan:
        """Return the memory of the run with changed settings."""
        machine = self.machine
        return plan_memory(
            config,
            self.placement,
            self.models,
            machine.device_bytes if machine and not machine.on_cpu else self.device_bytes,
            on_cpu=machine is not None and machine.on_cpu,
            steps=self.steps,
            validation_starts=self.validation_starts,
        )

    @property
    def disk(self) -> DiskUse | None:
        """Disk space of the run's checkpoints and final weights; None if it saves no checkpoint."""
        if self.config.evaluation is not None or self.config.generation is not None:
            return None
        return plan_disk(self.config, self.placement, self.models, self.steps)

    @property
    def validation_starts(self) -> int | None:
        """Start states or rows of one validation, None if the number of held-out rows is unknown."""
        return self.config.validation_start_states if self.data is None else self.data.held_out

    def setting(self, key: str) -> str:
        """Return key, value and source of a setting."""
        return self.composed.describe(key)


Check = Callable[[PlannedRun], Iterator[str]]


def advice(planned: PlannedRun) -> tuple[str, ...]:
    """Return all warnings, those that affect results first."""
    checks: tuple[Check, ...] = (_disk, _devices, _tight, _family)
    if _reinforces(planned.config):
        checks = (_validation, _budgets, _uneven, _recompute, *checks)
    return (*result_warnings(planned), *(line for check in checks for line in check(planned)))


def result_warnings(planned: PlannedRun) -> tuple[str, ...]:
    """Return the warnings about what the run learns, and about more memory than this machine has."""
    checks: tuple[Check, ...] = (_machine, _rates, _fine_tuning_rate)
    if _reinforces(planned.config):
        checks = (*checks, _warmup, _divergence, _overlap, _context, _history, _images)
    return tuple(line for check in checks for line in check(planned))


def _reinforces(config: Experiment) -> bool:
    return config.sft_only is None and config.evaluation is None and config.generation is None


def _rates(planned: PlannedRun) -> Iterator[str]:
    """Warn of learning rates that suit new policies in runs of a pretrained one."""
    config = planned.config
    for section in ("actor", "warm_start") if _reinforces(config) and not config.validation.only else ():
        suitable, is_used = suitable_rate(config, section), config_value(config, section) is not None
        limit = LARGE_LORA_RATE if trains_adapters(config, section) else LARGE_RATE
        key = f"{section}.{RATE}"
        if suitable is not None and is_used and config_value(config, key) > limit:
            problem = f"suits the small preset policies; for a pretrained model use about {suitable:g}"
            yield f"{planned.setting(key)} {problem}"


def _fine_tuning_rate(planned: PlannedRun) -> Iterator[str]:
    sft = planned.config.sft
    if sft is not None and is_new_policy(planned.config) and sft.optimizer.learning_rate < LARGE_RATE:
        setting = planned.setting("sft.optimizer.learning_rate")
        yield f"{setting} suits pretrained models; a new policy learns almost nothing with it, use about 0.001"


def _warmup(planned: PlannedRun) -> Iterator[str]:
    for name in ("actor", "critic") if planned.placement.of("critic") else ("actor",):
        key = f"{name}.optimizer.warmup_steps"
        if planned.steps is not None and 0 < planned.steps <= config_value(planned.config, key):
            outlasts = f"the warm-up outlasts the {planned.steps} steps, the learning rate never reaches its peak"
            yield f"{planned.setting(key)}: {outlasts}"


def _divergence(planned: PlannedRun) -> Iterator[str]:
    algorithm, kl = planned.config.algorithm, planned.config.algorithm.kl
    terms = [term for term in (algorithm.kl_in_loss, algorithm.kl_in_reward) if term is not None]
    if kl is not None and all(term.coefficient == 0 and term.target is None for term in terms):
        setting, use = planned.setting("algorithm.kl.coefficient"), planned.memory.active.get("reference")
        cost = f", {format_bytes(use.weights)}" if use else ""
        remedy = " and ".join(f"algorithm.{key}=null" for key in ("kl", "reward_kl") if getattr(algorithm, key))
        yield f"{setting} has no effect, and a reference model is loaded for it{cost}: set {remedy}"


def _overlap(planned: PlannedRun) -> Iterator[str]:
    if overlaps_training(planned.config):
        setting = planned.setting("rollout.async_ratio" if planned.config.rollout.async_ratio else "training.pipelined")
        yield f"{setting}: episodes are generated during updates, so results depend on timing and are not reproducible"


def _context(planned: PlannedRun) -> Iterator[str]:
    config = planned.config
    shape = planned.models.of("actor")
    length = max_sequence_tokens(planned.config)
    engine = config.rollout.engine_options.max_model_tokens
    limits = {"the model supports": shape.context if shape else None, "the engine allows": engine}
    settings = " and ".join(planned.setting(f"rollout.max_{part}_tokens") for part in ("prompt", "response"))
    for supporter, limit in limits.items():
        if limit is not None and length > limit:
            yield f"{settings} are {length:,} tokens, more than the {limit:,} that {supporter}"


def _history(planned: PlannedRun) -> Iterator[str]:
    """Warn if episodes without a window may exceed the prompt before their last turn."""
    rollout = planned.config.rollout
    start, observation = rollout.max_start_tokens, rollout.max_observation_tokens
    if rollout.window_size is not None or start is None or observation is None:
        return
    last = start + (rollout.max_turns - 1) * (rollout.max_response_tokens + observation)
    if last > rollout.max_prompt_tokens:
        setting = planned.setting("rollout.max_prompt_tokens")
        yield f"{setting}: the last of {rollout.max_turns} turns may need {last:,} tokens; longer episodes end early"


def _images(planned: PlannedRun) -> Iterator[str]:
    """Warn about episodes that images end early, and about images of unknown size."""
    config, shape = planned.config, planned.models.of("actor")
    images = largest_images(config, shape)
    if images is not None and config.rollout.window_size is None:
        limit, tokens = config.rollout.max_prompt_tokens, images.sequence_tokens
        if tokens > limit:
            setting, turns = planned.setting("rollout.max_prompt_tokens"), config.rollout.max_turns
            yield f"{setting}: the images of {turns} turns take {tokens:,} tokens; longer episodes end early"
    if shape is not None and shape.encoder is not None and images is None and has_unknown_images(config):
        setting = planned.setting("policy.vision.max_pixels")
        yield f"{setting}: images are of unknown size, so that memory and times are those without images"


def _validation(planned: PlannedRun) -> Iterator[str]:
    config = planned.config
    counts = planned.counts
    starts = planned.validation_starts or 0
    episodes = counts.validations * starts * config.validation.sampling.samples
    if not config.validation.only and planned.steps and episodes > counts.episodes:
        times = f"{counts.validations} × {starts:,}"
        yield f"validation runs {episodes:,} episodes ({times}), more than the {counts.episodes:,} of training"


def _budgets(planned: PlannedRun) -> Iterator[str]:
    budget, length = micro_batch_limits(planned.config, "actor"), max_sequence_tokens(planned.config)
    if budget.tokens is not None and budget.tokens < length:
        alone = f"less than the longest sequence, {length:,} tokens, which then is a micro-batch alone"
        yield f"{planned.setting(budget.key)} is {alone}"


def _uneven(planned: PlannedRun) -> Iterator[str]:
    """Warn about idle ranks; results are not affected, since losses average over all tokens of a mini-batch."""
    training, counts = planned.config.training, planned.counts
    if planned.config.env.is_simulator:
        return  # mini-batches have chunk steps of all robots, not episodes
    for component in filter(None, map(planned.placement.of, ("actor", "critic"))):
        episodes, ranks = counts.episodes_per_mini_batch, component.copies
        if episodes % ranks:
            hint = nearest_batches(training.groups_per_step, counts.episodes_per_step, training.mini_batches, ranks)
            yield (
                f"{planned.setting('training.mini_batches')}: its {episodes} episodes cannot be divided evenly over "
                f"the {ranks} data-parallel ranks of {component.name}, so some ranks wait for others; {hint}"
            )
            return


def _recompute(planned: PlannedRun) -> Iterator[str]:
    """Suggest gradient checkpointing if it halves a large peak."""
    config = planned.config
    use = planned.memory.active.get("actor")
    peak = planned.memory.fullest
    if use is None or peak is None or config.actor.gradient_checkpointing or use.activations < 8 << 30:
        return
    savings = memory_savings(config, planned.estimate_memory, planned.device_bytes)
    best = next((saving for saving in savings if saving.key == "actor.gradient_checkpointing"), None)
    if best is not None and best.total < peak.total / 2:
        yield (
            f"activations take {format_bytes(use.activations)}: actor.gradient_checkpointing=true lowers the peak "
            f"from {format_bytes(peak.total)} to {format_bytes(best.total)}"
        )


def _devices(planned: PlannedRun) -> Iterator[str]:
    placement = planned.placement
    judged = planned.config.reward.judge_devices if planned.config.reward else ()
    idle = tuple(device for device in placement.idle if device not in judged)
    if idle and placement.components:
        yield f"devices {format_ranges(idle)} are unused"
    engine = placement.of("rollout")
    if engine and engine.parallelism.tensor > placement.devices_per_node:
        setting = planned.setting("rollout.engine_options.tensor_parallel")
        yield f"{setting}: one engine spans machines of {placement.devices_per_node} devices, which is slow"
    shared = any(len(names) > 1 for names in placement.groups())
    if shared and not placement.colocated and len(placement.devices) > 1:
        setting = planned.setting("placement.colocated")
        yield f"{setting}, yet components share devices and hold their memory side by side; give each its own `devices`"


def _machine(planned: PlannedRun) -> Iterator[str]:
    """Warn of a run that exceeds the memory of this machine."""
    warning = planned.machine and machine_warning(planned.composed, planned.estimate_memory, planned.machine)
    if warning:
        yield warning


def _disk(planned: PlannedRun) -> Iterator[str]:
    """Warn of checkpoints that would fill the disk, with which a run does not start."""
    problem = planned.machine and planned.disk and disk_problem(planned.composed, planned.disk)
    if problem:
        yield f"{problem.message}; a run does not start with them: {problem.hint}"


def _tight(planned: PlannedRun) -> Iterator[str]:
    peak, available = planned.memory.fullest, planned.device_bytes
    if peak is not None and available is not None and TIGHT_FIT * available < peak.total <= available:
        used = f"{format_bytes(peak.total)} of {format_bytes(available)}"
        yield f"{used} leave little memory for CUDA, communication and fragmentation"


def _family(planned: PlannedRun) -> Iterator[str]:
    shape = planned.models.of("actor")
    if shape is not None and not shape.known:
        setting = planned.setting("policy.path")
        yield f"{setting}: models of type {shape.family!r} are estimated as if they were Llama"
