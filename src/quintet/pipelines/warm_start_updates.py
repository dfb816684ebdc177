"""The loop over updates of a warm start: what warm starts of language models and of action policies do around one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

from quintet.config.native.training import WarmStartConfig
from quintet.pipelines.run import Run, interrupted, is_due
from quintet.runtime.groups import CheckpointedLearners
from quintet.runtime.run_checkpoint import load_learners
from quintet.runtime.signals import StopRequest
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import JsonlLogger
from quintet.training.optim.lr_schedule import learning_rate, weight_decay

Update = Callable[[int, float, float], Mapping[str, float]]
"""`(update, learning rate, weight decay) -> metrics`: makes one optimizer step; metrics have `grad_norm` and the values
under `sft/` to log."""


def restored_updates(run: Run, learners: CheckpointedLearners, config: WarmStartConfig) -> int:
    """Restore the run's checkpoint of its warm start, if there is one; return the number of updates to skip."""
    checkpoint = run.warm_start_checkpoint
    if checkpoint is None:
        return 0
    load_learners(learners, checkpoint, run.config)
    run.progress.note(f"resuming from {checkpoint.directory}")
    return config.updates if checkpoint.entry("completed", bool) else checkpoint.step


def make_updates(
    update: Update,
    config: WarmStartConfig,
    should_stop: Callable[[int, dict[str, float]], bool],
    *,
    done: int = 0,
) -> None:
    """Make up to `config.updates` updates, of which the first `done` have been made before; stop when
    `should_stop(update, metrics)`, which is called after each of them, returns True."""
    for number in range(done + 1, config.updates + 1):
        rate = learning_rate(config.optimizer, number, config.updates)
        decay = weight_decay(config.optimizer, number, config.updates)
        metrics = update(number, rate, decay)
        losses = {name: value for name, value in metrics.items() if name in ("sft/loss", "sft/likely_tokens")}
        if should_stop(number, {**losses, "sft/lr": rate, "sft/grad_norm": metrics["grad_norm"]}):
            return


def run_updates(
    run: Run,
    config: WarmStartConfig,
    stop: StopRequest,
    update: Update,
    save: Callable[[int, bool], None],
    succeeds_enough: Callable[[int, dict[str, float]], bool],
    *,
    done: int,
) -> None:
    """Make the updates of a warm start until the policy succeeds often enough: log metrics, save checkpoints, and obey
    requests to stop.

    Args:
        run: The run.
        config: Number of updates, and their optimizer.
        stop: Whether a stop was requested.
        update: Makes one update.
        save: `save(update, is_last)` saves a checkpoint.
        succeeds_enough: `succeeds_enough(update, metrics)` says whether the warm start ends before its last update.
        done: Number of updates that were made before.

    Raises:
        InterruptedRun: a stop was requested; the checkpoint has been written.
    """
    log = JsonlLogger(LoggerContext(run.directory.path, filename=run.directory.warm_start.name))
    with closing(log), run.progress.phase("warm start", config.updates, done=done, unit="update") as progress:

        def should_stop(number: int, metrics: dict[str, float]) -> bool:
            succeeds = succeeds_enough(number, metrics)
            log.log(number, run.seconds, metrics)
            progress.advance(metrics)
            is_last = succeeds or number == config.updates
            if is_last or is_due(number, run.config.checkpoint.every_steps) or stop:
                save(number, is_last)
            if stop:
                run.wait()
                raise interrupted(run, stop, f"update {number} of the warm start")
            return succeeds

        make_updates(update, config, should_stop, done=done)
