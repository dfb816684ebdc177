"""Supervised fine-tuning: `fine_tune` runs everything from rows to final weights, `train_sft` is the loop."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.composed import ComposedConfig
from quintet.config.native.data import DataConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.training import SftConfig
from quintet.data.prompt_source import SplitRows, open_split
from quintet.data.row_order import held_out_numbers
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.run import Run, is_due, open_run
from quintet.pipelines.sft.episodes import build_solved_episodes, validate_in_episodes
from quintet.pipelines.sft.final_weights import FinalWeights, copy_to_remote, remote_file_system, write_directory
from quintet.pipelines.sft.rows import SftDataset, build_sft_dataset, iter_texts, row_config
from quintet.pipelines.sft.stage import SftStage, build_stage, sft_config
from quintet.pipelines.timings import Timings, throughput
from quintet.pipelines.training_record import TrainingRecord, training_record, write_record
from quintet.pipelines.training_steps import TrainingStep, run_steps
from quintet.policies.lora import ADAPTER_DIRECTORY
from quintet.policies.model_loading import load_policy_tokenizer
from quintet.policies.tiny_models import create_preset_policy
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.runtime.controller import Controller
from quintet.runtime.signals import StopRequest, stop_on_signals
from quintet.seeds import derive_seed
from quintet.tracking.atomic_files import OUTPUT_KEY, translate_os_errors
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from rich.console import Console

BEST = "best"
"""Directory of a checkpoint with the weights of an earlier step, if its held-out loss was lower."""


@dataclass(slots=True)
class HeldOutLosses:
    """Losses on the held-out rows, in nats, and the checkpoint with the lowest one."""

    before: float | None = None
    """Loss before the first update."""
    latest: float | None = None
    best: float | None = None
    """Lowest loss after an update."""
    best_step: int = 0
    """Step with the lowest loss."""
    best_checkpoint: Path | None = field(default=None, compare=False)
    """Checkpoint with the weights of that step; None before it is saved."""

    @classmethod
    def restored(cls, checkpoint: Checkpoint) -> HeldOutLosses:
        """Return the losses in the state of a checkpoint.

        Raises:
            MachineError: the state is damaged.
        """
        values = checkpoint.entry("reached", dict)
        names = {"before", "latest", "best", "best_step"}
        if values.keys() <= names and all(isinstance(value, int | float | None) for value in values.values()):
            return cls(**values)
        message = f"the state of {checkpoint.directory} has damaged losses: {str(values)[:60]}"
        raise MachineError(message, "use another checkpoint, or start again with resume=never")

    def state(self) -> dict[str, Any]:
        """Return the losses as JSON values."""
        return {name: getattr(self, name) for name in ("before", "latest", "best", "best_step")}


def fine_tune(composed: ComposedConfig, console: Console, controller: Controller | None = None) -> int:
    """Fine-tune a model on the rows of files, or on episodes that an expert has solved, and store its final weights;
    return the exit status. The learner runs on the workers of the controller or, without one, in this process.

    Raises:
        UserError: the configuration or the machine is at fault; `InterruptedRun` after a signal to stop.
    """
    config = composed.experiment
    sft_config(config)
    remote_file_system(config)
    controller = controller or Controller.in_process()
    with open_run(composed, console, controller) as run, stop_on_signals(controller.check_alive) as stop:
        if run.checkpoint and _is_finished(run):
            run.wait()
            run.progress.note(f"{run.directory.path} is finished: {run.checkpoint.step} steps. Nothing to do.")
            return 0
        run.reopen()
        stage, dataset = _set_up(run, controller)
        with closing(dataset):
            losses = train_sft(run, stage, dataset, stop)
        _finish(run, stage, dataset, losses)
    return 0


def with_fine_tuned_policy(composed: ComposedConfig, console: Console, controller: Controller) -> ComposedConfig:
    """Return the configuration with the fine-tuned model as `policy.path`, if `sft.then_reinforce` is set. The model is
    fine-tuned first, in the subdirectory `sft` of the run's directory, unless it is there already and `resume` is not
    `never`.

    Raises:
        UserError: see `fine_tune`.
    """
    config = composed.experiment
    if config.sft is None or not config.sft.then_reinforce:
        return composed
    stage = _sft_stage_config(config, config.sft)
    model = FinalWeights.of(stage).model
    if model is None:
        message = "reinforcement learning needs merged weights to start from"
        raise ConfigError(message, key="sft.merge", value=False, hint="sft.merge=true")
    if config.resume == "never" or not (model / "config.json").is_file():
        fine_tune(replace(composed, experiment=stage), console, controller)
    policy = config.policy.model_copy(update={"path": str(model), "preset": None})
    return replace(composed, experiment=config.model_copy(update={"policy": policy}))


def _sft_stage_config(config: Experiment, sft: SftConfig) -> Experiment:
    """Return the configuration of the fine-tuning before reinforcement learning."""
    remote_dir = config.checkpoint.remote_dir
    # separate from the checkpoints of reinforcement learning, which have the same names
    checkpoint = {"remote_dir": remote_dir and f"{remote_dir.rstrip('/')}/sft"}
    return config.model_copy(
        update={
            "sft": sft.model_copy(update={"then_reinforce": False}),
            "name": "sft",
            "output_dir": str(RunDirectory.from_config(config).path),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
            "tracking": config.tracking.model_copy(update={"profile": None}),
            "resume": "never" if config.resume == "never" else "auto",
        }
    )


def train_sft(run: Run, stage: SftStage, dataset: SftDataset, stop: StopRequest) -> HeldOutLosses:
    """Train step by step, from the run's checkpoint to the last epoch; measure the held-out loss and save checkpoints
    as configured.

    Raises:
        InterruptedRun: a stop was requested; the checkpoint has been written.
    """
    config, steps = run.config, _num_steps(run.config, dataset)
    losses = _restored_losses(run)
    if run.steps_done == 0 and sft_config(config).before_training:
        losses.before = losses.latest = _held_out_loss(run, stage, dataset)
        run.log(0, {"val/loss": losses.before})

    def train(step: TrainingStep) -> dict[str, float]:
        with run.profiled(step.number), step.timings.phase("step"):
            batch = dataset.batch(step.number, steps)
            metrics = stage.update(batch, step.number, steps)
        metrics |= throughput(step.timings, len(batch.tokens))
        ends_epoch = step.is_last or step.number % dataset.steps_per_epoch == 0
        is_best = False
        if _is_validated(config, step.number, ends_epoch=ends_epoch):
            with step.timings.phase("testing"):
                metrics["val/loss"] = losses.latest = _held_out_loss(run, stage, dataset)
            run.progress.note(f"after step {step.number}: val/loss {losses.latest:.4g}")
            is_best = _update_best(config, losses, step.number)
        step.is_saved = ends_epoch or is_best
        return metrics | {"training/epoch": step.number / dataset.steps_per_epoch}

    def save(step: int, _timings: Timings) -> None:
        _save(run, stage, losses, step, steps)

    run_steps(run, stop, train, save, steps=steps, phase="fine-tuning")
    return losses


def _num_steps(config: Experiment, dataset: SftDataset) -> int:
    return dataset.num_steps(sft_config(config).epochs, config.data.max_steps if config.data else None)


def _is_validated(config: Experiment, step: int, *, ends_epoch: bool) -> bool:
    """Return whether the held-out loss is measured after `step`: at the end of each epoch, unless validation is off,
    and every `validation.every_steps`."""
    every = config.validation.every_steps
    return (ends_epoch and (every >= 0 or sft_config(config).final_weights == "best")) or is_due(step, every)


def _held_out_loss(run: Run, stage: SftStage, dataset: SftDataset) -> float:
    data = run.config.data or DataConfig()
    return stage.loss(dataset.held_out, data.validation_batch or sft_config(run.config).batch)


def _update_best(config: Experiment, losses: HeldOutLosses, step: int) -> bool:
    """Record the latest loss if it is the lowest so far, and return whether it is."""
    if sft_config(config).final_weights == "last" or losses.latest is None:
        return False
    if not math.isfinite(losses.latest) or (losses.best is not None and losses.latest >= losses.best):
        return False
    losses.best = losses.latest
    losses.best_step = step
    losses.best_checkpoint = None
    return True


def _restored_losses(run: Run) -> HeldOutLosses:
    if run.checkpoint is None:
        return HeldOutLosses()
    losses = HeldOutLosses.restored(run.checkpoint)
    if losses.best is not None:
        losses.best_checkpoint = run.checkpoint.directory
    return losses


def _save(run: Run, stage: SftStage, losses: HeldOutLosses, step: int, steps: int) -> None:
    """Save a checkpoint, together with the best weights so far if they are those of another step."""
    best = losses.best_checkpoint if losses.best_step != step else None

    def copy(directory: Path) -> WriteFiles:
        write_learner = stage.save(directory)

        def write(checkpoint: Path) -> None:
            write_learner(checkpoint)
            if best is not None:
                _copy_best_weights(best, checkpoint / BEST)

        return write

    base: dict[str, Any] = {"base": stage.base_digest} if stage.has_lora else {}
    run.save(step, copy, reached=losses.state(), steps=steps, **base, **stage.extra_state())
    if losses.best is not None:
        losses.best_checkpoint = run.directory.checkpoints / f"global_step_{step}"


def _copy_best_weights(checkpoint: Path, target: Path) -> None:
    """Copy the best weights of a checkpoint; as hard links, which take no space, if the file system supports them."""
    for name in ("hf", ADAPTER_DIRECTORY):
        source = _best_weights(checkpoint) / name
        if source.is_dir():
            shutil.copytree(source, target / name, copy_function=_link)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _set_up(run: Run, controller: Controller) -> tuple[SftStage, SftDataset]:
    """Build learner and dataset, and restore the run's checkpoint."""
    config = run.config
    solved = build_solved_episodes(config, run.progress) if sft_config(config).episodes else None
    base = _base_model(run, solved)
    tokenizer = load_policy_tokenizer(config.policy, base)
    data = config.data or DataConfig()
    train, held_out = solved or (open_split(data, tokenizer, "train"), open_split(data, tokenizer, "validation"))
    if not solved and not data.validation_files:
        count = len(held_out_numbers(len(held_out.rows), data, config.seed if data.seed is None else data.seed))
        run.progress.note(f"no data.validation_files: val/loss is measured on {count:,} training rows")
    images = ImagePrompts.from_directory(base, config.policy.vision, trust_remote_code=config.policy.trust_remote_code)
    dataset = build_sft_dataset(config, tokenizer, train, held_out, run.progress, images)
    stage = build_stage(config, base, tokenizer, controller)
    if run.checkpoint:
        stage.load(run.checkpoint)
        run.progress.note(f"resuming from {run.checkpoint.directory}")
    return stage, dataset


def _base_model(run: Run, solved: tuple[SplitRows, SplitRows] | None) -> Path:
    """Return the directory of the initial model; create a preset first, with a tokenizer trained on the rows."""
    config = run.config
    path = sft_config(config).path or config.policy.path
    if path is not None:
        return Path(path)
    data = config.data or DataConfig()
    rows = (solved[0] if solved else open_split(data, None, "train")).rows
    with translate_os_errors(run.directory.policy):
        texts, seed = iter_texts(rows, row_config(config)), derive_seed(config.seed, "policy")
        create_preset_policy(str(config.policy.preset), run.directory.policy, texts, seed)
    return run.directory.policy


def _finish(run: Run, stage: SftStage, dataset: SftDataset, losses: HeldOutLosses) -> None:
    """Write the final weights and their copies, run held-out episodes, and note the results."""
    config, final = run.config, FinalWeights.of(run.config)
    steps = _num_steps(config, dataset)
    key = OUTPUT_KEY if sft_config(config).output_dir is None else "sft.output_dir"
    best = losses.best_checkpoint if losses.best is not None and losses.best_step != steps else None
    state = {**run.training_state(), "reached": losses.state(), "steps": steps}
    record = training_record(state, steps if best is None else losses.best_step, run.directory)
    for directory, name, write in (
        (final.model, "hf", stage.save_model),
        (final.adapters, ADAPTER_DIRECTORY, stage.save_adapters),
    ):
        if directory is not None:
            copy = write if best is None else partial(_copy, _best_weights(best) / name)
            write_directory(directory, partial(_write_with_record, copy, record), key)
    remote = copy_to_remote(config)
    has_episodes = final.model and sft_config(config).episodes
    episode_metrics = validate_in_episodes(run, final.main, steps) if has_episodes else {}
    run.directory.write_state("finished", steps=steps, epochs=sft_config(config).epochs)
    run.progress.note(_summary(losses, dataset, steps, final, remote, episode_metrics))


def _best_weights(checkpoint: Path) -> Path:
    return checkpoint / BEST if (checkpoint / BEST).is_dir() else checkpoint


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def _write_with_record(write: Callable[[Path], object], record: TrainingRecord, directory: Path) -> None:
    write(directory)
    write_record(directory, record)


def _summary(
    losses: HeldOutLosses,
    dataset: SftDataset,
    steps: int,
    final: FinalWeights,
    remote: str | None,
    episode_metrics: dict[str, float],
) -> str:
    measured = [value for value in (losses.before, losses.best or losses.latest) if value is not None]
    parts = [f"fine-tuned in {steps:,} steps of {dataset.batch_size} rows"]
    if measured:
        parts.append("val/loss " + " → ".join(f"{value:.4g}" for value in measured))
    if losses.best is not None:
        parts.append(f"best after step {losses.best_step}")
    parts += [f"{name} {value:.3f}" for name, value in episode_metrics.items() if name.endswith("/success_rate")]
    parts.append(f"model: {final.main}" + (f", copied to {remote}" if remote else ""))
    return "; ".join(parts)


def _is_finished(run: Run) -> bool:
    """Return whether the run is finished with the current number of epochs and has its final weights."""
    state, final = run.directory.read_state(), FinalWeights.of(run.config)
    is_done = state.get("status") == "finished" and state.get("epochs") == sft_config(run.config).epochs
    return is_done and all(directory.is_dir() for directory in final.all)
