"""Runs that are killed again and again: is a good checkpoint always there, and do they end as if nothing had been?

    python benchmarks/checkpoint_kills.py [--kills 200] [--seed 0] [--out FILE]

A tiny run that saves after every step is made once without disturbance, and then in chains: each is killed with
SIGKILL at random instants, from the first moment of its process on, and started again, until it is finished; and so on
with further chains until as many kills were made as were asked for. After every kill the newest checkpoint must be
whole; every chain's last checkpoint and metrics must be the undisturbed run's, bit for bit. Exit status 1 says that one
wasn't.

Processes are forked from one that has imported everything, so that lives are short and most kills strike while
something is done.
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

from quintet.config import load_experiment
from quintet.pipelines.rl import train
from quintet.tracking.metrics import reproducible
from quintet.training.checkpoint import STAGING, find_checkpoint

STEPS = 24
RUN = (
    f"training.steps={STEPS}",
    "training.groups_per_step=4",
    "training.samples_per_group=2",
    "training.mini_batches=2",
    "training.threads=1",
    "algorithm.advantage.name=gae",
    "warm_start={games: 20, updates: 4, turns_per_update: 16, until_success: null}",
    "rollout.max_turns=3",
    "validation.games=4",
    "validation.every_steps=8",
    "checkpoint.every_steps=1",
    "tracking.loggers=[jsonl]",
    "tracking.trajectories_every_steps=0",
)
LONGEST_SHARE = 0.6
"""Of the undisturbed run's time: the end of a life is drawn evenly from none to this."""


def begin(place: Path, name: str) -> int:
    """The run in a process of its own, which becomes the leader of a group; gives its number."""
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
    """Its exit status; None where it still runs after so many seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        found, status = os.waitpid(process, 0 if end is None else os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(0.002)


def kill(process: int) -> None:
    """Kill the run and all that it started."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        # not yet the leader of its group
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def outcome(run: Path) -> dict[str, Any]:
    """What two runs of one experiment must have alike."""
    last = run / "checkpoints" / f"global_step_{STEPS}"
    files = {str(path.relative_to(last)): path for path in last.rglob("*.safetensors")}
    return {
        "tensors": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())},
        "metrics": [reproducible(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
    }


def chain(place: Path, name: str, draws: random.Random, longest: float, left: int) -> Counter[str]:
    """One run, killed after up to `longest` seconds until it is finished, or `left` kills were made, after which it is
    let go on."""
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
        counts["while_writing"] += bool(list(checkpoints.glob(f"{STAGING}*")))
        refused: dict[Path, str] = {}
        found = find_checkpoint(checkpoints, refused.__setitem__)
        steps.append(found.step if found else -1)
        counts["before_the_first_checkpoint"] += found is None
        counts["refused"] += len(refused)
        counts["lost"] += steps[-1] < max(steps)


def measure(kills: int, seed: int, place: Path) -> dict[str, Any]:
    """All chains, and whether they ended as they should."""
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
