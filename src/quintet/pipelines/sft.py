"""Supervised fine-tuning from start to end; `imitate` is the loop."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config import Composed
from quintet.config.native import DataConfig, Experiment
from quintet.errors import ConfigError, InterruptedRun
from quintet.pipelines.run import Run, Timings, open_run
from quintet.pipelines.sft_data import Lessons, RowsOfSplit, files, open_lessons, texts
from quintet.pipelines.sft_export import Places, copy_away, put, remote
from quintet.pipelines.sft_games import play_held_out, solved_games
from quintet.pipelines.sft_stage import Stage, build_stage, sft_of, sft_tokenizer
from quintet.policies.adapters import ADAPTER_DIRECTORY
from quintet.policies.tiny import make_policy
from quintet.rollout.agent_loop import derive_seed
from quintet.runtime.stop import StopRequest, stop_on_signals
from quintet.tracking.run_directory import RunDirectory, machine_errors
from quintet.training.saving import Write

if TYPE_CHECKING:
    from rich.console import Console

    from quintet.runtime.conducting import Conductor

__all__ = ["fine_tune", "imitate", "start_from_sft"]

VOCABULARY_ROWS = 2000
"""Rows from which a made policy learns its vocabulary."""
BEST = "best"
"""In a checkpoint, the directory with the weights of an earlier step that are better than its own."""


@dataclass(slots=True)
class Progressing:
    """How far a stage is: what was measured, and whose weights are the best."""

    before: float | None = None
    """Held-out loss before the first update, nats."""
    latest: float | None = None
    """The last that was measured."""
    best: float | None = None
    """The lowest after an update …"""
    best_step: int = 0
    """… and the step after which it was measured."""
    best_at: Path | None = field(default=None, compare=False)
    """A checkpoint with those weights; None while there is none."""

    def state(self) -> dict[str, Any]:
        """The same for JSON."""
        return {name: getattr(self, name) for name in ("before", "latest", "best", "best_step")}


def fine_tune(composed: Composed, console: Console, conductor: Conductor | None = None) -> int:
    """Read or solve, learn, merge, store, and play where there is a world; gives the exit status. Through a
    `conductor` other ranks take part.

    Raises:
        UserError: what the user can mend, and `InterruptedRun` after a wish to stop was granted.
    """
    config = composed.experiment
    sft_of(config)
    remote(config)
    check = conductor.check if conductor else None
    with open_run(composed, console, conductor) as run, stop_on_signals(check) as stop:
        if run.checkpoint and _is_finished(run):
            run.wait()
            run.progress.note(f"{run.directory.path} is finished: {run.checkpoint.step} steps. Nothing to do.")
            return 0
        run.reopen()
        stage, lessons = _begin(run)
        reached = imitate(run, stage, lessons, stop)
        _finish(run, stage, lessons, reached)
    return 0


def start_from_sft(composed: Composed, console: Console, conductor: Conductor | None = None) -> Path:
    """The model that reinforcement learning begins with where `sft.then_reinforce` asks for it: that of the
    fine-tuning stage, which is run first, in the directory `sft` of the run's own, unless its model is there.

    Raises:
        UserError: as `fine_tune`; and a `ConfigError` where the stage leaves adapters alone.
    """
    config = composed.experiment
    sft = sft_of(config)
    home, remote_dir = RunDirectory.of(config).path, config.checkpoint.remote_dir
    # its steps have the same names as those of the reinforcement learning
    apart = {"remote_dir": remote_dir and f"{remote_dir.rstrip('/')}/sft"}
    stage = config.model_copy(
        update={
            "sft": sft.model_copy(update={"then_reinforce": False}),
            "name": "sft",
            "output_dir": str(home),
            "checkpoint": config.checkpoint.model_copy(update=apart),
            "resume": "auto",
        }
    )
    model = Places.of(stage).model
    if model is None:
        told = "reinforcement learning needs a whole model to begin with"
        raise ConfigError(told, key="sft.merge", value=False, hint="sft.merge=true")
    if not (model / "config.json").is_file():
        fine_tune(replace(composed, experiment=stage), console, conductor)
    return model


def imitate(run: Run, stage: Stage, lessons: Lessons, stop: StopRequest) -> Progressing:
    """The loop: some rows, one optimizer step, and now and then the held-out loss and a checkpoint."""
    config, sft = run.config, sft_of(run.config)
    first, steps = (run.checkpoint.step if run.checkpoint else 0), _steps(run.config, lessons)
    reached = _reached(run)
    if first == 0 and sft.validate_before:
        reached.before = reached.latest = _held_out_loss(run, stage, lessons)
        run.log(0, {"val/loss": reached.before})
    with run.progress.phase("fine-tuning", steps, done=first) as progress:
        for step in range(first + 1, steps + 1):
            timings = Timings()
            with timings.phase("step"):
                batch = lessons.train.batch(lessons.rows(step))
                metrics = stage.learn(batch, step, steps)
            metrics |= _pace(timings, len(batch.tokens))
            ends = step % lessons.steps_per_epoch == 0 or step == steps
            if _validates(config, step, ends=ends):
                with timings.phase("testing"):
                    metrics["val/loss"] = reached.latest = _held_out_loss(run, stage, lessons)
                run.progress.note(f"after step {step}: val/loss {reached.latest:.4g}")
            metrics |= {"training/global_step": step, "training/epoch": step / lessons.steps_per_epoch}
            run.log(step, {**metrics, **timings.metrics})
            better = "val/loss" in metrics and _is_best(config, reached, step)
            if ends or better or _due(step, config.checkpoint.every_steps) or stop:
                _store(run, stage, reached, step)
            progress.advance(metrics)
            if stop and step < steps:
                run.wait()
                raise _interrupted(run, stop, step)
    run.wait()
    return reached


def _steps(config: Experiment, lessons: Lessons) -> int:
    return lessons.steps(sft_of(config).epochs, config.data.max_steps if config.data else None)


def _validates(config: Experiment, step: int, *, ends: bool) -> bool:
    """After each pass and every so many steps, unless nothing is to be measured after training."""
    every = config.validation.every_steps
    return (ends and (every >= 0 or sft_of(config).choose == "best")) or _due(step, every)


def _held_out_loss(run: Run, stage: Stage, lessons: Lessons) -> float:
    data = run.config.data or DataConfig()
    return stage.loss(lessons.held_out, data.validation_batch or sft_of(run.config).batch)


def _is_best(config: Experiment, reached: Progressing, step: int) -> bool:
    """Whether the weights of this step are to be kept as the best so far; notes it."""
    if sft_of(config).choose == "last" or reached.latest is None:
        return False
    if not math.isfinite(reached.latest) or (reached.best is not None and reached.latest >= reached.best):
        return False
    reached.best, reached.best_step, reached.best_at = reached.latest, step, None
    return True


def _reached(run: Run) -> Progressing:
    """Where the checkpoint was."""
    if run.checkpoint is None:
        return Progressing()
    reached = Progressing(**run.checkpoint.state["reached"])
    if reached.best is not None:
        reached.best_at = run.checkpoint.directory
    return reached


def _store(run: Run, stage: Stage, reached: Progressing, step: int) -> None:
    """A checkpoint, with the best weights so far where they aren't its own."""
    best = reached.best_at if reached.best_step != step else None

    def copy(place: Path) -> Write:
        files = stage.save(place)

        def write(directory: Path) -> None:
            files(directory)
            if best is not None:
                _keep_best(best, directory / BEST)

        return write

    base = {"base": stage.base_digest} if stage.has_lora else {}
    run.store(step, copy, reached=reached.state(), **base, **stage.extra())
    if reached.best is not None:
        reached.best_at = run.directory.checkpoints / f"global_step_{step}"


def _keep_best(checkpoint: Path, target: Path) -> None:
    """The same files under a second name, so that they take no room twice where the file system can do that."""
    source = checkpoint / BEST
    names = ("hf", ADAPTER_DIRECTORY)
    for name in names:
        place = (source if source.is_dir() else checkpoint) / name
        if place.is_dir():
            shutil.copytree(place, target / name, copy_function=_link)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _begin(run: Run) -> tuple[Stage, Lessons]:
    """What learns and what it learns from, at the checkpoint or at the beginning."""
    config = run.config
    if run.checkpoint is None:
        _forget(config)
    made = solved_games(config, run.progress) if sft_of(config).games else None
    base = _base(run, made)
    tokenizer = sft_tokenizer(config, base)
    data = config.data or DataConfig()
    train, held_out = made or (files(data, tokenizer, "train"), files(data, tokenizer, "validation"))
    if not made and not data.validation_files:
        run.progress.note("no data.validation_files: val/loss is measured on the rows that are learnt")
    lessons = open_lessons(config, tokenizer, train, held_out, run.progress)
    stage = build_stage(config, base, tokenizer, run.conductor)
    if run.checkpoint:
        stage.load(run.checkpoint)
        run.progress.note(f"going on from {run.checkpoint.directory}")
    return stage, lessons


def _forget(config: Experiment) -> None:
    """Remove final weights that an earlier run of this name left in its directory."""
    if sft_of(config).output_dir is None:
        for place in Places.of(config).all:
            shutil.rmtree(place, ignore_errors=True)


def _base(run: Run, made: tuple[RowsOfSplit, RowsOfSplit] | None) -> Path:
    """The model to start from; a preset is made first, its tokenizer from the rows."""
    config = run.config
    given = sft_of(config).path or config.policy.path
    if given is not None:
        return Path(given)
    data = config.data or DataConfig()
    rows = (made[0] if made else files(data, None, "train")).rows
    with machine_errors(run.directory.policy):
        make_policy(
            str(config.policy.preset),
            run.directory.policy,
            texts(rows, data, VOCABULARY_ROWS),
            derive_seed(config.seed, "policy"),
        )
    return run.directory.policy


def _finish(run: Run, stage: Stage, lessons: Lessons, reached: Progressing) -> None:
    """Final weights, their copies, games, state and a last line."""
    config, places = run.config, Places.of(run.config)
    steps = _steps(config, lessons)
    chosen = reached.best_at if reached.best is not None and reached.best_step != steps else None
    for place, name, write in (
        (places.model, "hf", stage.save_model),
        (places.adapters, ADAPTER_DIRECTORY, stage.save_adapters),
    ):
        if place is not None:
            put(place, write if chosen is None else partial(_copy, _best_of(chosen) / name))
    copied = copy_away(config)
    played = play_held_out(run, places.main, steps) if places.model and sft_of(config).games else {}
    run.directory.write_state("finished", steps=steps, epochs=sft_of(config).epochs)
    run.progress.note(_summary(reached, lessons, steps, places, copied, played))


def _best_of(checkpoint: Path) -> Path:
    return checkpoint / BEST if (checkpoint / BEST).is_dir() else checkpoint


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def _summary(
    reached: Progressing, lessons: Lessons, steps: int, places: Places, copied: str | None, played: dict[str, float]
) -> str:
    """What came of it, in a line."""
    measured = [value for value in (reached.before, reached.best or reached.latest) if value is not None]
    parts = [f"fine-tuned in {steps:,} steps of {lessons.batch} rows"]
    if measured:
        parts.append("val/loss " + " → ".join(f"{value:.4g}" for value in measured))
    if reached.best is not None:
        parts.append(f"best after step {reached.best_step}")
    parts += [f"{name} {value:.3f}" for name, value in played.items() if name.endswith("/success_rate")]
    parts.append(f"model: {places.main}" + (f", copied to {copied}" if copied else ""))
    return "; ".join(parts)


def _pace(timings: Timings, tokens: int) -> dict[str, float]:
    seconds = timings.metrics["timing_s/step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds,
    }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_finished(run: Run) -> bool:
    """Finished as it is configured now, with its weights where they are wanted."""
    state, places = run.directory.read_state(), Places.of(run.config)
    same = state.get("status") == "finished" and state.get("epochs") == sft_of(run.config).epochs
    return same and all(place.is_dir() for place in places.all)


def _interrupted(run: Run, stop: StopRequest, step: int) -> InterruptedRun:
    return InterruptedRun(
        f"stopped by {stop.signal} after step {step}; {run.directory.path} is ready to go on",
        "the same command goes on from there",
    )
