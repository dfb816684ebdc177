"""Measure what profiles cost a step of the FrozenLake training command.

    python benchmarks/profiling.py [--steps 20] [--out FILE] [KEY=VALUE ...]

One run profiles every other step, so that both kinds of steps meet the same load of the machine. Without a warm start
all episodes have the same length, so all steps are equally long. Step times on a shared machine vary by more than a
profile costs; the file therefore also has the cost that follows from the number of events in a step and the time that
one takes, with and without a recorder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine
from quintet import trace
from quintet.runtime.profiler import SAMPLE_SECONDS, resident_bytes
from quintet.trace import TraceRecorder

REPEATS = 100_000
SETTINGS = [
    "warm_start=null",
    "validation.before_training=false",
    "validation.every_steps=-1",
    "checkpoint.every_steps=0",
]


def measure_steps(steps: int, overrides: list[str]) -> dict[str, Any]:
    """Run the training command with every other step profiled; return step times and numbers of events."""
    profiled = list(range(2, steps + 1, 2))
    with tempfile.TemporaryDirectory() as directory:
        settings = [*SETTINGS, f"training.steps={steps}", f"output_dir={directory}", "name=run"]
        settings.append(f"tracking.profile={{steps: {profiled}}}")
        command = [sys.executable, "-m", "quintet", "train", *settings, *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        run = Path(directory) / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        traces = [json.loads(path.read_text())["traceEvents"] for path in sorted((run / "profile").iterdir())]
        sizes = [path.stat().st_size for path in (run / "profile").iterdir()]
    seconds = {line["step"]: line["timing_s/step"] for line in lines if line["step"] > 1}
    off, on = ([seconds[step] for step in seconds if (step in profiled) == is_on] for is_on in (False, True))
    phases = [[event["ph"] for event in events] for events in traces]
    return {
        "steps": len(seconds),
        "median_step_seconds_off": statistics.median(off),
        "median_step_seconds_on": statistics.median(on),
        "step_seconds_off": [round(value, 4) for value in off],
        "step_seconds_on": [round(value, 4) for value in on],
        "spans_per_step": statistics.median(each.count("X") for each in phases),
        "request_events_per_step": statistics.median(each.count("b") + each.count("e") for each in phases),
        "trace_bytes": statistics.median(sizes),
    }


def measure_calls() -> dict[str, float]:
    """Return the microseconds that a span takes without and with a recorder, and a value of the memory."""
    off, recorder = _microseconds_per_span(), TraceRecorder(0, "benchmark")
    recorder.start()
    try:
        on = _microseconds_per_span()
    finally:
        recorder.stop()
    started = time.perf_counter()
    for _ in range(REPEATS // 100):
        resident_bytes()
    sample = (time.perf_counter() - started) / (REPEATS // 100) * 1e6
    return {"span_off": round(off, 3), "span_on": round(on, 3), "memory_sample": round(sample, 3)}


def _microseconds_per_span() -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for number in range(REPEATS // 5):
            with trace.span("step", "engine 0", running=number):
                pass
        times.append((time.perf_counter() - started) / (REPEATS // 5) * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/profiling.json")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    steps, calls = measure_steps(options.steps, options.overrides), measure_calls()
    events = steps["spans_per_step"] + steps["request_events_per_step"]
    seconds = steps["median_step_seconds_off"]
    samples = seconds / SAMPLE_SECONDS * calls["memory_sample"]
    result = {
        "machine": machine(),
        "run": steps,
        "microseconds_per_call": calls,
        "share_of_step_off": round(events * calls["span_off"] / 1e6 / seconds, 7),
        "share_of_step_on": round((events * calls["span_on"] + samples) / 1e6 / seconds, 7),
        "change_of_median_step": round(steps["median_step_seconds_on"] / seconds - 1, 4),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}, indent=2))


if __name__ == "__main__":
    main()
