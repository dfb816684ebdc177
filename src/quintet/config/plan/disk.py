"""Size of a run's checkpoints and final weights, and the space on the disk of its directory."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.plan.batch_arithmetic import num_occasions
from quintet.config.plan.component_memory import OPTIMIZER_STATES
from quintet.config.plan.format_sizes import format_bytes
from quintet.config.plan.models import Models, policy_path
from quintet.config.plan.placed_model import PlacedModel, learner_parameters, lora_parameters
from quintet.config.plan.placement import Placement
from quintet.config.problems import ConfigProblem

STORED_BYTES = 4
"""Per weight: learners keep and store weights in float32."""
PRESET_BYTES = 4 << 20
"""Weights of a preset whose shape is unknown."""
LOG_BYTES = 16 << 20
"""Metrics, episodes and report of a run, an estimate."""
UNKNOWN_CHECKPOINTS = 2
"""Checkpoints of a run with an unknown number of steps that keeps all: the first and the last."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes that a run writes to the disk of its directory."""

    first: int
    """Size of the first checkpoint, before the first optimizer step."""
    checkpoint: int
    """Size of every later one."""
    checkpoints: int
    """Maximum number at a time. The oldest one is removed after a new one is complete."""
    with_first: bool
    """Whether the first one is among them."""
    models: int
    """Final weights, and the initial ones of a preset."""

    @property
    def total(self) -> int:
        later = self.checkpoints - self.with_first
        return later * self.checkpoint + self.with_first * self.first + self.models


def plan_disk(config: Experiment, placement: Placement, models: Models, steps: int | None) -> DiskUse:
    """Return the disk use of a run of so many steps, None if their number is unknown."""
    contents = list(_contents(config, placement, models))
    weights, moments = sum(weights for weights, _ in contents), sum(moments for _, moments in contents)
    if config.sft_only is not None and config.sft_only.final_weights == "best":
        weights *= 2
    saved = _num_checkpoints(config, steps)
    count = min(config.checkpoint.keep + 1, saved)
    final = _policy_bytes(config, models) if config.sft_only is not None else 0
    preset = _policy_bytes(config, models) if policy_path(config) is None else 0
    with_first = config.sft_only is None and count == saved
    return DiskUse(weights, weights + moments, count, with_first, final + preset)


def _num_checkpoints(config: Experiment, steps: int | None) -> int:
    """Return how many checkpoints a run saves; if that is unknown, how many it has at a time at least."""
    every, stage = config.checkpoint.every_steps, config.sft_only
    if config.validation.only or config.generation is not None:
        return 1
    if steps is None:
        return min(config.checkpoint.keep + 1, UNKNOWN_CHECKPOINTS)
    # fine-tuning saves none before its first step, and one at the end of each epoch
    return num_occasions(steps, every) if stage is None else num_occasions(steps, every) - 1 + stage.epochs - 1


def _contents(config: Experiment, placement: Placement, models: Models) -> Iterator[tuple[int, int]]:
    """Yield the bytes of weights and of moments of each learner, as a checkpoint has them."""
    contents = config.checkpoint.contents
    for name in ("actor", "critic"):
        component, shape = placement.of(name), models.of(name)
        if component is None:
            continue
        if shape is None:
            yield (weights := _policy_bytes(config, models)), 2 * weights * ("optimizer" in contents)
            continue
        placed = PlacedModel(config, component, shape)
        parameters, trained = learner_parameters(placed)
        states = OPTIMIZER_STATES[placed.optimizer.kind] * ("optimizer" in contents)
        stored = parameters + (_adapted(placed) if trained < parameters else 0)
        yield STORED_BYTES * stored, STORED_BYTES * states * trained
    reference = models.of("reference")
    if placement.of("reference") is not None and reference is not None and config.reference.path is None:
        lora = config.policy.lora if config.reference_has_adapters else None
        yield STORED_BYTES * (reference.parameters if lora is None else lora_parameters(reference, lora)), 0


def _adapted(placed: PlacedModel) -> int:
    """Return the weights of a checkpoint besides the merged ones: adapters in the format of peft, and in reinforcement
    learning those of the learner, frozen ones included."""
    parameters, adapters = learner_parameters(placed)
    learner = placed.config.sft_only is None and "model" in placed.config.checkpoint.contents
    return adapters + (parameters + adapters) * learner


def _policy_bytes(config: Experiment, models: Models) -> int:
    shape, path = models.of("actor"), policy_path(config)
    if shape is not None:
        return STORED_BYTES * shape.parameters
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if path else PRESET_BYTES


def free_bytes(config: Experiment) -> int:
    """Return the free space on the disk of the run's directory, which need not exist."""
    directory = Path(config.output_dir).absolute()
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free


def stored_bytes(config: Experiment) -> int:
    """Return the size of the checkpoints that the run's directory has already."""
    directory = Path(config.output_dir) / config.name
    roots = (directory / "checkpoints", directory / "warm_start")
    files = (file for root in roots for file in root.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def disk_problem(composed: ComposedConfig, use: DiskUse) -> ConfigProblem | None:
    """Return a problem if the run would fill the disk of its directory, with the settings that it needs."""
    config = composed.experiment
    stored, free = stored_bytes(config), free_bytes(config)
    needed = max(0, use.total - stored) + LOG_BYTES
    if needed <= free:
        return None
    sizes = f"{use.checkpoints:,} checkpoints of up to {format_bytes(use.checkpoint)}"
    problem = f"{sizes} at a time and other files need {format_bytes(needed)}, and the disk of {config.output_dir} has"
    fitting = (free + stored - LOG_BYTES - use.models) // max(1, use.checkpoint) - 1
    hints = [f"checkpoint.keep={fitting}"] if 1 <= fitting < config.checkpoint.keep else []
    if "optimizer" in config.checkpoint.contents and not hints:
        hints = ["checkpoint.contents=[model]"]
    hint = ", or ".join([*hints, "output_dir=DIRECTORY"])
    return composed.problem("checkpoint.keep", f"{problem} {format_bytes(free)} free", hint)
