"""Kill runs at random moments: is there always a valid checkpoint, and are the final results unchanged?

    python benchmarks/checkpoint_kills.py [--kills 200] [--seed 0] [--out FILE]

A small run that saves after every step runs once without interruption. Then chains of the same run are killed with
SIGKILL at random moments, from process start on, and restarted until they finish; further chains follow until the
requested number of kills is reached. After every kill the newest checkpoint must be valid; the last checkpoint and
metrics of every chain must equal those of the uninterrupted run, bit for bit. Exits with status 1 otherwise.

Processes are forked from one that has imported everything, so that most kills hit during work.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.pipelines.rl import train
from quintet.tracking.metrics import without_timing
from quintet.training.checkpoint.checkpoint import STAGING_PREFIX, find_checkpoint

STEPS = 24
RUN = (
    f"training.steps={STEPS}",
    "training.groups_per_step=4",
    "training.samples_per_group=2",
    "training.mini_batches=2",
    "training.threads=1",
    "algorithm.advantage.name=gae",
    "warm_start={episodes: 20, updates: 4, turns_per_update: 16, until_success: null}",
    "rollout.max_turns=3",
    "validation.episodes=4",
    "validation.every_steps=8",
    "checkpoint.every_steps=1",
    "tracking.loggers=[jsonl]",
    "tracking.trajectories_every_steps=0",
)
LONGEST_SHARE = 0.6
"""Of the undisturbed run's time: the end of a life is drawn evenly from none to this."""


def begin(place: Path, name: str) -> int:
    """Start the run in a new process group; return its process id."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    status = 1
    try:
        said = io.StringIO()
        status = train(load_experiment(None, (*RUN, f"output_dir={place}", f"name={name}")), Console(file=said))
    except BaseException:
        (place / "fault").write_text(traceback.format_exc())
        raise
    finally:
        os._exit(status)


def ended(process: int, seconds: float | None) -> int | None:
    """Return the exit status, or None if it still runs after `seconds`."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        found, status = os.waitpid(process, 0 if end is None else os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(0.002)


def kill(process: int) -> None:
    """Kill the run and all its children."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        # not yet the leader of its group
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def outcome(run: Path) -> dict[str, Any]:
    """Return everything that two runs of one experiment must have in common."""
    last = run / "checkpoints" / f"global_step_{STEPS}"
    files = {str(path.relative_to(last)): path for path in last.rglob("*.safetensors")}
    return {
        "tensors": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())},
        "metrics": [without_timing(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
    }


def chain(place: Path, name: str, draws: random.Random, longest: float, left: int) -> Counter[str]:
    """Kill one run after up to `longest` seconds again and again until it finishes or `left` kills are reached."""
    counts: Counter[str] = Counter()
    checkpoints, steps = place / name / "checkpoints", [-1]
    while True:
        seconds = draws.uniform(0.0, longest) if counts["kills"] < left else None
        process = begin(place, name)
        status = ended(process, seconds)
        if status is not None:
            if status:
                raise RuntimeError((place / "fault").read_text())
            return counts
        kill(process)
        counts["kills"] += 1
        counts["while_writing"] += bool(list(checkpoints.glob(f"{STAGING_PREFIX}*")))
        refused: dict[Path, str] = {}
        found = find_checkpoint(checkpoints, refused.__setitem__)
        steps.append(found.step if found else -1)
        counts["before_the_first_checkpoint"] += found is None
        counts["refused"] += len(refused)
        counts["lost"] += steps[-1] < max(steps)


def measure(kills: int, seed: int, place: Path) -> dict[str, Any]:
    """Run all chains and compare their results."""
    started = time.monotonic()
    if ended(begin(place, "whole"), None):
        raise RuntimeError((place / "fault").read_text())
    alone, expected = time.monotonic() - started, outcome(place / "whole")
    draws, total, equal = random.Random(seed), Counter[str](), []
    while total["kills"] < kills:
        name = f"chain_{len(equal)}"
        total.update(chain(place, name, draws, LONGEST_SHARE * alone, kills - total["kills"]))
        equal.append(outcome(place / name) == expected)
        print(f"{name}: {total['kills']} kills so far, equal: {equal[-1]}", file=sys.stderr)
    return {
        "kills": total["kills"],
        "while_a_checkpoint_was_written": total["while_writing"],
        "before_the_first_checkpoint": total["before_the_first_checkpoint"],
        "checkpoints_refused": total["refused"],
        "kills_that_lost_a_checkpoint": total["lost"],
        "runs": len(equal),
        "runs_that_ended_bit_for_bit_as_the_undisturbed_one": sum(equal),
        "steps_of_a_run": STEPS,
        "seconds_of_the_undisturbed_run": round(alone, 1),
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measure(arguments.kills, arguments.seed, Path(place))
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
    text = json.dumps({"machine": machine, "seed": arguments.seed, **found}, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)
    different = found["runs"] - found["runs_that_ended_bit_for_bit_as_the_undisturbed_one"]
    sys.exit(1 if found["kills_that_lost_a_checkpoint"] or different else 0)


if __name__ == "__main__":
    main()
