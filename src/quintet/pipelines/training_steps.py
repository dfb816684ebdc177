"""The loop over training steps: what all kinds of training do around a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quintet.config.native.experiment import Experiment
from quintet.pipelines.run import Run, interrupted, is_due
from quintet.pipelines.timings import Timings
from quintet.runtime.signals import StopRequest


@dataclass(slots=True)
class TrainingStep:
    """A step that runs: its number, and what the loop does after it."""

    number: int
    is_last: bool
    """Whether training ends after this step; a loop may set it earlier than after `training.steps`."""
    is_saved: bool = False
    """Whether a checkpoint follows, besides those of `checkpoint.every_steps` and the last one."""
    end_note: str | None = None
    """Why training ends before its last step."""
    timings: Timings = field(default_factory=Timings)

    def is_validated(self, config: Experiment) -> bool:
        """Return whether a validation follows: every `validation.every_steps`, and after the last step unless the
        number is negative."""
        every = config.validation.every_steps
        return is_due(self.number, every) or (self.is_last and every >= 0)


def run_steps(
    run: Run,
    stop: StopRequest,
    train: Callable[[TrainingStep], dict[str, float]],
    save: Callable[[int, Timings], None],
    *,
    steps: int,
    phase: str = "learning",
    saves_on_stop: bool = True,
) -> None:
    """Train step by step, from the run's checkpoint to `steps`: log metrics, save checkpoints, and obey requests to
    stop.

    Args:
        run: The run.
        stop: Whether a stop was requested.
        train: Runs a step and returns its metrics; it may change the `TrainingStep`.
        save: Saves a checkpoint of a step; what it measures is logged with the step after.
        steps: Number of the last step.
        phase: Name of the progress bar.
        saves_on_stop: Whether a request to stop adds a checkpoint.

    Raises:
        InterruptedRun: a stop was requested; the checkpoint has been written.
    """
    saving = Timings()
    with run.progress.phase(phase, steps, done=run.steps_done) as progress:
        for number in range(run.steps_done + 1, steps + 1):
            step = TrainingStep(number, is_last=number == steps)
            metrics = train(step)
            run.log(number, {**metrics, **step.timings.metrics, **saving.metrics, "training/global_step": number})
            saving = Timings()
            is_stopped = saves_on_stop and bool(stop)
            if step.is_saved or step.is_last or is_stopped or is_due(number, run.config.checkpoint.every_steps):
                save(number, saving)
            progress.advance(metrics)
            if step.end_note is not None:
                run.progress.note(step.end_note)
                break
            if stop and number < steps:
                run.wait()
                raise interrupted(run, stop, f"step {number}")
    run.wait()
