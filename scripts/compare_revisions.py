"""Show that two revisions compute the same numbers: `compare_revisions.py BASE [NEW] [--job NAME] [--work DIR]`.

BASE and NEW are git revisions or directories with a checkout (default NEW: this working tree). Each job runs once under
each revision, as a user would start it. Every line of `metrics.jsonl` without timings and every tensor file of the
final weights must be equal, byte for byte. Prints JSON and exits with 1 if something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
SMALL = ("training.steps=5", "validation.every_steps=5")
TIMED = ("timing_", "perf/m", "perf/t", "perf/throughput", "time_seconds")

DATA_COMMAND = (
    *("data", "make", "addition", "data/addition"),
    *("--train", "4000", "--validation", "256", "--style", "worked"),
)


@dataclass(frozen=True)
class Job:
    """Training run: its command line, what it needs first, and where its weights end up."""

    command: tuple[str, ...]
    prepare: tuple[str, ...] = ()
    ranks: bool = False


JOBS = {
    "main": Job(("train",)),
    "sokoban": Job(("train", "examples/native/sokoban.yaml", *SMALL)),
    "addition": Job(
        ("train", "examples/native/addition.yaml", *SMALL),
        prepare=DATA_COMMAND,
    ),
    "ppo_critic": Job(("train", "name=ppo", "algorithm.advantage.name=gae", *SMALL)),
    "fsdp2": Job(("train", "name=fsdp2", *SMALL), ranks=True),
    "sft": Job(("sft", "name=sft", "sft.games={games: 300}")),
}
RENAMED_METRICS = {"rollout/games_played_anew": "rollout/episodes_restarted"}
"""Metric name in BASE to its name in NEW."""


def checkout(revision: str, work: Path) -> Path:
    """Return a directory with the sources of `revision`, extracted below `work` unless it is a directory already."""
    if Path(revision).is_dir():
        return Path(revision).resolve()
    target = work / revision
    if not target.exists():
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(target, filter="data")
    return target


def run_job(job: Job, source: Path, directory: Path) -> Path:
    """Run `job` with the sources in `source`, in `directory`; return the run directory it wrote."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "examples").exists():
        (directory / "examples").symlink_to(source / "examples")
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1" if job.ranks else "2"}
    quintet = (sys.executable, *(TORCHRUN if job.ranks else ()), "-m", "quintet")
    for command in filter(None, (job.prepare, job.command)):
        with (directory / "log.txt").open("a") as log:
            subprocess.run([*quintet, *command], cwd=directory, env=environment, stdout=log, stderr=log, check=True)
    (run,) = (path.parent for path in directory.glob("runs/*/metrics.jsonl"))
    return run


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` without everything that depends on the clock."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{RENAMED_METRICS.get(k, k): v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]


def weight_hashes(run: Path) -> list[str]:
    """Return the SHA-256 of every safetensors file of the newest checkpoint, or of the fine-tuned model."""
    checkpoints = sorted(run.glob("checkpoints/global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    folder = checkpoints[-1] if checkpoints else run
    files = sorted(folder.rglob("*.safetensors"))
    return [f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]


def differences(base: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """Return the metrics that differ, as text: the first difference of each."""
    first: dict[str, str] = {}
    if len(base) != len(new):
        first["lines"] = f"{len(base)} and {len(new)} lines"
    for number, (old, now) in enumerate(zip(base, new, strict=False)):
        for name in sorted(old.keys() | now.keys()):
            if name not in first and repr(old.get(name)) != repr(now.get(name)):
                first[name] = f"{name}, line {number}: {old.get(name)!r} and {now.get(name)!r}"
    return list(first.values())


def main() -> None:
    """Compare the revisions named on the command line, job by job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("new", nargs="?", default=str(ROOT))
    parser.add_argument("--job", action="append", choices=sorted(JOBS))
    parser.add_argument("--work", type=Path, default=Path("/tmp/compare_revisions"))
    options = parser.parse_args()
    report: dict[str, Any] = {}
    for name in options.job or JOBS:
        sides = []
        for side in (options.base, options.new):
            directory = options.work / name / ("base" if side == options.base else "new")
            done = list(directory.glob("runs/*/metrics.jsonl")) if side == options.base else []
            sides.append(done[0].parent if done else run_job(JOBS[name], checkout(side, options.work), directory))
        base, new = sides
        weights = weight_hashes(base), weight_hashes(new)
        report[name] = {
            "steps": len(metric_lines(new)),
            "metrics_that_differ": differences(metric_lines(base), metric_lines(new)),
            "weight_files": len(weights[1]),
            "weights_equal": weights[0] == weights[1] and bool(weights[0]),
        }
        print(json.dumps({name: report[name]}, indent=2), flush=True)
    if any(job["metrics_that_differ"] or not job["weights_equal"] for job in report.values()):
        raise SystemExit(1)


main()
