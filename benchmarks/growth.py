"""Measure how the cost of data, runs, plans and servers grows with the work: three sizes of each.

    python benchmarks/growth.py [WORK ...] [--out benchmarks/results/growth.json]

Works, each of whose measurements is a process of its own:

    clients    open connections of a server that send three requests each: failures, time and memory
    parquet    rows of a Parquet file with repeated texts of 4 kB: memory and time to open it and read 5,000 of them
    sft        conversations of a file: time and processor time until fine-tuning's first step, and its next one after
               it was resumed
    diagnose   steps of a run: processor time and memory of `quintet diagnose`
    viewer     runs of 3,000 steps in the list of `quintet view`: memory
    ranks      rows of an update of fine-tuning: processor time with two ranks, of one process with one thread
    fit        devices of `quintet plan --fit`: processor time

The exponent is the slope of the logarithm of the cost over that of the size; 1 is linear. Results of other works stay
in the file. Times say little on a loaded machine, which `load_before` shows; processor times are of all processes of
the work. `growth_pictures.py` draws the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from machine import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "growth.json"
QUINTET = (sys.executable, "-m", "quintet")
FINISHED_RUN = ROOT / "examples" / "native" / "stuck_run" / "metrics.jsonl"
STEPS_PER_RUN = 3000
STEPS = (2, 12)
"""Steps of the runs whose difference is the cost of updates."""
ROUNDS = 1
REQUESTS_PER_CLIENT = 3
READ_ROWS = """
import random, sys
from quintet.data.prompt_source import open_rows
rows, _ = open_rows([sys.argv[1]], "data.train_files", sys.argv[2])
chance = random.Random(0)
assert all(len(rows[chance.randrange(len(rows))]["prompt"]) == 4000 for _ in range(5000))
"""
Cost = dict[str, float]
Measure = Callable[[Path, int], Cost]


def run(command: Sequence[str], **variables: str) -> Cost:
    """Run a process; return its seconds, seconds of CPUs, and the memory that it had at most, in MB."""
    began = time.perf_counter()
    environment = {**os.environ, **variables}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=ROOT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {errors.read().decode()[-2000:]}")
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss / 1000,
    }


def write_metrics(path: Path, steps: int) -> None:
    """Write the metrics of a run with the names and about the values of a real one."""
    lines = [json.loads(line) for line in FINISHED_RUN.read_text().splitlines()][1:]
    chance = random.Random(0)
    path.parent.mkdir(parents=True)
    (path.parent / "run.json").write_text('{"status": "finished"}\n')
    with path.open("w") as file:
        for step in range(1, steps + 1):
            line = lines[step % len(lines)]
            factor = 1 + 1e-3 * chance.random()
            values = {name: value * factor if isinstance(value, float) else value for name, value in line.items()}
            file.write(json.dumps(values | {"step": step, "time_seconds": 3.0 * step}) + "\n")


def measure_parquet(directory: Path, rows: int) -> Cost:
    """Open a file of rows that repeat ten texts of 4 kB, and read 5,000 of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.array([chr(97 + number) * 4000 for number in range(10)])
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(directory / "rows.parquet", schema) as writer:
        for first in range(0, rows, 10_000):
            indices = pa.array([number % 10 for number in range(first, min(first + 10_000, rows))])
            writer.write_table(pa.table({"prompt": texts.take(indices)}))
    return run([sys.executable, "-c", READ_ROWS, str(directory / "rows.parquet"), str(directory / "cache")])


def measure_diagnose(directory: Path, steps: int) -> Cost:
    """Diagnose a run of so many steps."""
    write_metrics(directory / "run" / "metrics.jsonl", steps)
    return run([*QUINTET, "diagnose", str(directory / "run")])


def measure_fit(_: Path, devices: int) -> Cost:
    """Propose settings for so many devices."""
    fit = ("--fit", "--device", "h100", "--devices", str(devices))
    return run([*QUINTET, "plan", "examples/native/sokoban.yaml", *fit])


@contextmanager
def server(command: Sequence[str], url: str) -> Iterator[tuple[int, str]]:
    """Start a process that prints its URL; yield its id and the URL, and end it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        matches = (re.search(url, line) for line in process.stdout or ())
        yield process.pid, next(match[0] for match in matches if match)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def peak_mb(process: int) -> float:
    """Return the memory that a process has had at most."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1000


def measure_viewer(directory: Path, runs: int) -> Cost:
    """List runs of `STEPS_PER_RUN` steps."""
    write_metrics(directory / "first" / "run" / "metrics.jsonl", STEPS_PER_RUN)
    for number in range(runs):
        target = directory / "runs" / f"run{number:04}"
        target.mkdir(parents=True)
        for name in ("run.json", "metrics.jsonl"):
            os.link(directory / "first" / "run" / name, target / name)
    command = [*QUINTET, "view", str(directory / "runs"), "--port", "0"]
    with server(command, r"http://[\d.:]+") as (process, url):
        began = time.perf_counter()
        with urlopen(f"{url}/api/runs") as response:
            listed = json.load(response)
        seconds = time.perf_counter() - began
        if len(listed) != runs or listed[0]["step"] != STEPS_PER_RUN:
            raise RuntimeError(f"the viewer lists {len(listed)} runs")
        return {"seconds": seconds, "peak_mb": peak_mb(process)}


def measure_clients(directory: Path, clients: int) -> Cost:
    """Send requests over so many connections that are open at the same time."""
    model = directory / "model"
    create_model(model)
    with server([*QUINTET, "serve", str(model), "--port", "0"], r"http://[\d.:]+") as (process, url):
        began = time.perf_counter()
        failed = asyncio.run(_send_all(int(url.rpartition(":")[2]), clients))
        return {"seconds": time.perf_counter() - began, "failed": failed, "peak_mb": peak_mb(process)}


def create_model(directory: Path) -> None:
    """Write a tiny model."""
    from quintet.policies.tiny_models import create_preset_policy

    texts = [f"user\n{number} + {number} = ?" for number in range(100)]
    create_preset_policy("numbers-1m", directory, texts, 0)


async def _send_all(port: int, clients: int) -> int:
    """Return how many requests fail."""
    results = await asyncio.gather(*(_client(port) for _ in range(clients)), return_exceptions=True)
    return sum(REQUESTS_PER_CLIENT if isinstance(failed, BaseException) else failed for failed in results)


async def _client(port: int) -> int:
    body = json.dumps({"model": "model", "prompt": "1 + 1 =", "max_tokens": 1}).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    failed = 0
    for _ in range(REQUESTS_PER_CLIENT):
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
        await reader.readexactly(int(length[1]) if length else 0)
        failed += not answer.startswith(b"HTTP/1.1 200")
    writer.close()
    return failed


def measure_sft(directory: Path, rows: int) -> Cost:
    """Fine-tune on conversations of one to four turns until the first step is logged, then resume until the next."""
    command = fine_tuning(directory, rows, 32)
    costs = [until_step(command, directory / "run" / "metrics.jsonl") for _ in range(2)]
    return {
        f"{prefix}{name}": value
        for prefix, cost in zip(("", "resumed_"), costs, strict=True)
        for name, value in cost.items()
    }


def fine_tuning(directory: Path, rows: int, batch: int, *options: str) -> list[str]:
    """Write conversations and a model; return the arguments of `quintet` that fine-tune it."""
    if not (directory / "model").exists():
        write_conversations(directory / "talks.jsonl", rows)
        create_model(directory / "model")
    files = (f"data.train_files=[{directory}/talks.jsonl]", f"data.cache_dir={directory}/cache")
    run_options = (f"output_dir={directory}", "tracking.loggers=[jsonl]", "sft.before_training=false")
    words = (f"sft.path={directory}/model", "name=run", f"sft.batch={batch}", *files, *run_options)
    return ["quintet", "sft", *words, *options]


def write_conversations(path: Path, rows: int) -> None:
    """Write conversations of one to four turns."""
    chance = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(chance.randint(1, 4)):
                a, b = chance.randrange(100), chance.randrange(100)
                messages += [
                    {"role": "user", "content": f"{a} + {b} = ?"},
                    {"role": "assistant", "content": f"{a + b}"},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")


def until_step(command: Sequence[str], metrics: Path) -> Cost:
    """Start a run, return its seconds and those of its CPUs until another step is logged, and stop it."""
    before = logged_steps(metrics)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    while logged_steps(metrics) <= before:
        if process.poll() is not None:
            raise RuntimeError(f"{' '.join(command)} has ended")
        time.sleep(0.05)
    cost = {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds(process.pid)}
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    return cost


def cpu_seconds(process: int) -> float:
    """Return the seconds of CPUs of a process and those that it has started."""
    import psutil

    processes = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    return sum(sum(each.cpu_times()[:4]) for each in processes)


def logged_steps(metrics: Path) -> int:
    """Return the number of optimizer steps in a file of metrics."""
    return metrics.read_text().count('"train/loss"') if metrics.exists() else 0


def measure_ranks(directory: Path, rows: int) -> Cost:
    """Measure an update of so many rows, from the difference of runs of 2 and of 12 steps, with one process of one
    thread and with two ranks, the model replicated by default."""
    two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    launchers = {"one": (("-m",), "1"), "two": (two, "2")}
    costs = {
        name: statistics.median(update_cpu_seconds(directory, rows, *launcher) for _ in range(ROUNDS))
        for name, launcher in launchers.items()
    }
    return {"cpu_seconds": costs["two"], "one_process": costs["one"], "ratio": costs["two"] / costs["one"]}


def update_cpu_seconds(directory: Path, rows: int, launcher: Sequence[str], devices: str) -> float:
    """Return the seconds of CPUs of an update."""
    seconds = []
    for steps in STEPS:
        options = (f"data.max_steps={steps}", f"sft.devices={devices}", "resume=never", "checkpoint.every_steps=0")
        further = ("data.check=all", "validation.every_steps=-1", "data.validation_rows=8", "sft.max_tokens=2048")
        command = fine_tuning(directory, 16 * rows, rows, *options, *further)
        seconds.append(run([sys.executable, *launcher, *command], OMP_NUM_THREADS="1")["cpu_seconds"])
    return (seconds[1] - seconds[0]) / (STEPS[1] - STEPS[0])


WORKS: Mapping[str, tuple[Measure, tuple[int, ...], str]] = {
    "clients": (measure_clients, (250, 1000, 4000), "seconds"),
    "parquet": (measure_parquet, (100_000, 300_000, 1_000_000), "peak_mb"),
    "sft": (measure_sft, (20_000, 60_000, 200_000), "cpu_seconds"),
    "diagnose": (measure_diagnose, (10_000, 30_000, 100_000), "cpu_seconds"),
    "viewer": (measure_viewer, (50, 150, 500), "peak_mb"),
    "ranks": (measure_ranks, (32, 64, 128), "cpu_seconds"),
    "fit": (measure_fit, (128, 1024, 8192), "cpu_seconds"),
}
"""How each work is measured, at which sizes, and the cost whose growth is stated."""


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope of the logarithms of costs over those of sizes, by least squares.

    >>> round(exponent([1, 10, 100], [2, 20, 200]), 6)
    1.0
    """
    x, y = ([math.log(value) for value in values] for values in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def measure(work: str) -> dict[str, Any]:
    """Measure a work at its sizes."""
    function, sizes, cost = WORKS[work]
    results = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="growth-") as directory:
            results.append(
                {"size": size} | {key: round(value, 2) for key, value in function(Path(directory), size).items()}
            )
        print(work, results[-1], flush=True)
    growth = exponent(sizes, [result[cost] for result in results])
    return {"cost": cost, "exponent": round(growth, 2), "results": results, "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", choices=[*WORKS, []], help="works to measure; none measures all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stored = json.loads(options.out.read_text()) if options.out.exists() else {}
    for work in options.works or WORKS:
        stored[work] = measure(work)
        ordered = {name: stored[name] for name in WORKS if name in stored}
        options.out.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
