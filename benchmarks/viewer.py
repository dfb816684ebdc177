"""Measure how fast `quintet view` opens a run with 100,000 stored episodes and a trace.

    python benchmarks/viewer.py [--episodes 100000] [--rows 5000] [--out benchmarks/results/viewer.json]

Writes a run directory with synthetic metrics, a trace, and FrozenLake episodes of 256 per step, starts the viewer, and
opens it in headless Chromium (`--chromium`), each view in a fresh server so that nothing is cached. Writes one JSON
file: seconds from navigation to the first paint, to the first chart or row, and until all episodes are listed; the
share of frames within 1/30 s while the list scrolls; milliseconds from a turn of the wheel to the trace that is drawn
again; bytes of scripts. Needs `pip install playwright` and Debian's `chromium`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from machine import machine
from quintet.diagnosis.diagnose import diagnose_run

PER_STEP = 256
CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
)
GRIDS = (" _ _ _ _\n _ G _ _\n _ _ _ O\n P _ _ _", " _ O G _\n _ O _ _\n O O _ _\n O P _ O")
SCROLL = """async () => {
  const list = document.querySelector(".virtual");
  const frames = [];
  let last = performance.now();
  for (let frame = 0; frame < 120; frame += 1) {
    list.scrollTop += list.scrollHeight / 1000;
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - last);
    last = performance.now();
  }
  return frames;
}"""
ZOOM = """async () => {
  const canvas = document.querySelector(".trace canvas");
  const frames = [];
  for (let frame = 0; frame < 20; frame += 1) {
    const started = performance.now();
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -100, cancelable: true }));
    await new Promise(requestAnimationFrame);
    await new Promise((resolve) => { setTimeout(resolve, 0); });
    frames.push(performance.now() - started);
  }
  return frames;
}"""
SPANS, REQUESTS, CONCURRENT = 2500, 4096, 512
"""Size of the trace, that of a step of the FrozenLake command."""


def write_run(directory: Path, episodes: int, rows: int) -> None:
    """Write a finished run with synthetic metrics and episodes."""
    chance = random.Random(0)
    directory.mkdir(parents=True)
    (directory / "run.json").write_text('{"status": "finished"}\n')
    names = [f"timing_s/{name}" for name in ("step", "gen", "engine", "env", "update_actor", "adv")]
    names += ["trajectory/success_rate", "critic/score/mean", "actor/entropy", "actor/ppo_kl", "response_length/mean"]
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, rows + 1):
            metrics = {name: 1 - math.exp(-step / rows) + 0.1 * chance.random() for name in names}
            file.write(json.dumps({"step": step, "time_seconds": 3.0 * step} | metrics) + "\n")
    for step in range(1, math.ceil(episodes / PER_STEP) + 1):
        path = directory / "trajectories/train" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        count = min(PER_STEP, episodes - (step - 1) * PER_STEP)
        path.write_text("".join(json.dumps(episode(step, line, chance)) + "\n" for line in range(count)))


def write_trace(path: Path) -> None:
    """Write a trace of a step of 7 s as `TraceRecorder` does: spans of two tracks, requests, memory."""
    end = 7_000_000
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "MainThread"), (2, "engine 0"))
    ]
    events.append({"ph": "X", "name": "step", "ts": 0, "dur": end, "tid": 1, "args": {}})
    for number in range(1, SPANS):
        span = {"ph": "X", "name": "agent_loop", "ts": number * end // SPANS, "dur": end // SPANS - 100}
        events.append({**span, "tid": 1 + number % 2, "args": {"running": number % 512}})
    track = "requests of engine 0"
    for number in range(REQUESTS):
        begin = number // CONCURRENT * end * CONCURRENT // REQUESTS + number % CONCURRENT
        lasts = end * CONCURRENT // REQUESTS - 2 * CONCURRENT
        for phase, at in (("b", begin), ("e", begin + lasts)):
            events.append({"ph": phase, "cat": track, "id": number, "name": track, "ts": at, "tid": 0, "args": {}})
    for at in range(0, end, 20_000):
        events.append({"ph": "C", "name": "memory, MiB", "ts": at, "args": {"resident": 900 + at % 7}})
    path.parent.mkdir()
    path.write_text(json.dumps({"traceEvents": events}))


def episode(step: int, line: int, chance: random.Random) -> dict[str, Any]:
    """Return an episode as `write_trajectories` writes it."""
    success = chance.random() < 0.5
    turns = [
        {
            "observation": chance.choice(GRIDS),
            "text": f"<think> safe Right Up, number {chance.random()} </think><answer> Up </answer>",
            "actions": ["Up"],
            "valid_format": True,
            "reward": 0.0,
            "finish_reason": "stop",
            "prompt_tokens": 92,
            "response_tokens": 11,
            "images": 0,
            "frames": [chance.choice(GRIDS)],
        }
        for _ in range(chance.randint(1, 6))
    ]
    return {
        "step": step, "split": "train", "env": "frozenlake", "seed": chance.randrange(10_000), "group": line // 16,
        "sample": line % 16, "outcome": "success" if success else "terminated", "success": success,
        "reward": float(success), "failure": None, "turns": turns,
    }  # fmt: skip


@contextmanager
def viewer(run: Path) -> Iterator[str]:
    """Yield the address of a viewer of the run."""
    command = (sys.executable, "-m", "quintet", "view", str(run), "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rsplit(" ", 1)[-1].strip()
        finally:
            process.terminate()


def measure(page: Any, run: Path, view: str, ready: str) -> dict[str, float]:
    """Return the seconds to the first paint of a view and until the selector `ready` matches."""
    with viewer(run) as address:
        started = time.perf_counter()
        page.goto(f"{address}#{view}?run={run.name}", wait_until="commit")
        page.wait_for_selector(ready, timeout=60_000)
        seconds = time.perf_counter() - started
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
        result = {"first_paint_seconds": paint / 1000, "ready_seconds": seconds}
        if view == "episodes":
            page.wait_for_function("() => !document.querySelector('[role=status]').textContent.includes('reading')")
            result["complete_seconds"] = time.perf_counter() - started
            frames = page.evaluate(SCROLL)
            result |= {"frame_ms_median": statistics.median(frames), "frames_within_33_ms": share_within(frames, 33.4)}
        if view == "timeline":
            result["trace_redraw_ms_median"] = statistics.median(page.evaluate(ZOOM))
        return {name: round(value, 3) for name, value in result.items()}


def share_within(values: list[float], bound: float) -> float:
    """Return the share of values up to a bound."""
    return sum(value <= bound for value in values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/viewer.json"))
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    views = {
        "charts": ".chart .line",
        "episodes": ".virtual-row",
        "timeline": ".longest tbody tr",
        "runs": ".runs tbody tr",
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in views}
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        run = Path(scratch) / "large"
        write_run(run, options.episodes, options.rows)
        write_trace(run / "profile/step_000003_rank_0.json")
        browser = playwright.chromium.launch(executable_path=options.chromium, args=list(CHROMIUM_OPTIONS))
        for _ in range(options.repeats):
            for view, ready in views.items():
                page = browser.new_page(viewport={"width": 1360, "height": 900})
                results[view].append(measure(page, run, view, ready))
                page.close()
        started = time.process_time()
        diagnose_run(run)
        diagnosis_seconds = time.process_time() - started
        size = sum(path.stat().st_size for path in (run / "trajectories/train").iterdir())
        browser.close()
    scripts = [file for file in (resources.files("quintet.viewer") / "static").iterdir() if file.name.endswith(".js")]
    medians = {
        view: {name: statistics.median(each[name] for each in measured) for name in measured[0]}
        for view, measured in results.items()
    }
    report = {
        "machine": machine(),
        "episodes": options.episodes,
        "trajectory_bytes": size,
        "metric_rows": options.rows,
        "script_bytes": sum(len(file.read_bytes()) for file in scripts),
        "diagnosis_processor_seconds": round(diagnosis_seconds, 3),
        "medians": medians,
        "runs": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
