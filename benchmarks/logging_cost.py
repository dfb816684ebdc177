"""Measure what loggers, stored episodes and traces cost a step of the FrozenLake training command.

    python benchmarks/logging_cost.py [--steps 31] [--loggers NAMES] [--out FILE] [KEY=VALUE ...]

One run alternates between three kinds of steps, so that all meet the same load of the machine: with nothing recorded
(`off`); with loggers and stored episodes (`logging`); with these and a trace (`tracing`). A step is timed from the
end of the one before. Without a warm start all episodes have the same length, so all steps are equally long. Step times
on a shared machine vary by more than 1 %; the file therefore also has the time of the processor, with that of threads,
and the time within the calls that record.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine
from profiling import SETTINGS
from quintet.cli.main import main as run_command
from quintet.pipelines import rl
from quintet.pipelines.run import Run

KINDS = ("off", "logging", "tracing")
DEFAULT_LOGGERS = "[console, jsonl]"


class StepTimes:
    """Seconds of each step, and of the calls in it that record something."""

    def __init__(self) -> None:
        self.steps: dict[int, float] = {}
        self.processor: dict[int, float] = {}
        self.calls: dict[int, float] = {}
        self._ended, self._processor_ended = time.perf_counter(), time.process_time()

    def recorded(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function of a run, a step and others that is timed, and does nothing in steps of the kind `off`."""

        @functools.wraps(function)
        def call(run: Run, step: int, *arguments: Any) -> None:
            if kind(step) != "off":
                started = time.perf_counter()
                function(run, step, *arguments)
                self.calls[step] = self.calls.get(step, 0.0) + time.perf_counter() - started

        return call

    def end(self, step: int) -> None:
        """Record the end of a step."""
        now, processor = time.perf_counter(), time.process_time()
        self.steps[step], self.processor[step] = now - self._ended, processor - self._processor_ended
        self._ended, self._processor_ended = now, processor


def kind(step: int) -> str:
    return KINDS[step % len(KINDS)]


def measure(steps: int, loggers: str, overrides: list[str]) -> StepTimes:
    """Run the training command in this process with `steps` steps."""
    times = StepTimes()
    log = times.recorded(Run.log)

    def log_and_end(run: Run, step: int, metrics: dict[str, float]) -> None:
        log(run, step, metrics)
        times.end(step)

    Run.log = log_and_end  # type: ignore[assignment, method-assign]
    rl.show_rollout = times.recorded(rl.show_rollout)
    traced = [step for step in range(1, steps + 1) if kind(step) == "tracing"]
    with tempfile.TemporaryDirectory() as directory:
        settings = [*SETTINGS, f"training.steps={steps}", f"output_dir={directory}", "name=run"]
        settings += [f"tracking.loggers={loggers}", f"tracking.profile={{steps: {traced}}}"]
        settings.append("tracking.trajectories_every_steps=1")
        sys.argv = ["quintet", "train", *settings, *overrides]
        try:
            run_command()
        except SystemExit as end:
            if end.code:
                raise
    return times


def changes(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the change of the median of each kind relative to `off`."""
    return {
        name: round(statistics.median(values) / statistics.median(seconds["off"]) - 1, 4)
        for name, values in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--loggers", default=DEFAULT_LOGGERS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/logging_cost.json")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    times = measure(options.steps, options.loggers, options.overrides)
    steps = {name: [step for step in times.steps if step > len(KINDS) and kind(step) == name] for name in KINDS}
    seconds, processor, calls = (
        {name: [values.get(step, 0.0) for step in steps[name]] for name in KINDS}
        for values in (times.steps, times.processor, times.calls)
    )
    result = {
        "machine": machine(),
        "loggers": options.loggers,
        "step_seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "processor_seconds": {name: [round(value, 3) for value in values] for name, values in processor.items()},
        "change_of_median_step": changes(seconds),
        "change_of_median_processor_time": changes(processor),
        "recording_share_of_step": {
            name: round(statistics.median(values) / statistics.median(seconds["off"]), 5)
            for name, values in calls.items()
        },
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}, indent=2))


if __name__ == "__main__":
    main()
