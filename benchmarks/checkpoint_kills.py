"""Kill runs while they save checkpoints: is every saved step kept, and are the final results unchanged?

    python benchmarks/checkpoint_kills.py [--count 1000] [--seed 0] [--out benchmarks/results/checkpoint_kills.json]

The default run with a small model, which saves after every step, runs once without interruption. Then the same run is
killed with SIGKILL and started again, up to 20 times, and then finishes; further runs follow until the number of kills
is reached, half of them on one process and half on two ranks. A kill is at a random file operation in the directory of
the checkpoints, at a random time after a checkpoint was begun, or at a random time of the process. Of two ranks, a
random one is killed first, and the other one up to 50 ms later.

After every kill the newest intact checkpoint must not be older than before the kill. The tensors of the last checkpoint
and the metrics of every finished run must be those of the run without interruption, bit for bit. Exits with status 1
otherwise.

Processes are forked from one that has imported everything, and write to memory: SIGKILL loses no data of the kernel.
The file of results is written after each run, so that an interrupted benchmark leaves those so far.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from machine import machine
from quintet.cli.train import run as train
from quintet.policies.tiny_models import Preset, build_model, train_tokenizer
from quintet.tracking.metrics import without_timing
from quintet.training.checkpoint.checkpoint import LATEST_STEP_FILE, STAGING_PREFIX, find_checkpoint

STEPS = 12
RUN = (
    f"training.steps={STEPS}",
    "training.groups_per_step=2",
    "training.samples_per_group=2",
    "training.mini_batches=1",
    "training.threads=1",
    "algorithm.advantage.name=gae",
    "warm_start={episodes: 8, updates: 2, turns_per_update: 8, until_success: null}",
    "rollout.max_turns=2",
    "validation.episodes=2",
    "validation.every_steps=6",
    "checkpoint.every_steps=1",
    "tracking.loggers=[jsonl]",
    "tracking.trajectories_every_steps=0",
)
MODEL = Preset(hidden=16, layers=1, heads=2, kv_heads=1, mlp=16, vocabulary=300, context=2048)
KILLS_PER_RUN = 20
LONGEST_SHARE = 0.4
"""Of the undisturbed run's time: the longest time of a process that is killed at a random time."""
LATER_SECONDS = 0.05
TIMEOUT_SECONDS = 300.0
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
IMPORTED_BY_RUNS = ("quintet.", "torch.distributed.", "transformers.")


@dataclass(frozen=True, slots=True)
class Run:
    """A run on one or more ranks, as often as it is started."""

    place: Path
    name: str
    ranks: int

    @property
    def directory(self) -> Path:
        return self.place / self.name

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def start(self, victim: int = 0, operation: int = 0) -> list[int]:
        """Fork the ranks and return their process ids. The rank `victim` kills itself at the file operation with the
        number `operation` in the directory of the checkpoints; 0 for never."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        return [self._fork(rank, port, operation if rank == victim else 0) for rank in range(self.ranks)]

    def _fork(self, rank: int, port: int, operation: int) -> int:
        def work() -> int:
            if self.ranks > 1:
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
                numbers = {name: str(number) for name, number in names.items()}
                os.environ.update({**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            if operation:
                kill_at_operation(self.checkpoints, operation)
            words = (*RUN, f"policy.path={self.place / 'model'}", "policy.preset=null")
            status = train(None, [*words, f"output_dir={self.place}", f"name={self.name}"], None, "refuse")
            (self.place / "modules").write_text("\n".join(sys.modules))
            return status

        return fork(work, self.place / "output")


def fork(work: Callable[[], int], output: Path) -> int:
    """Call a function in a new process that ends with its result; return the process id."""
    if process := os.fork():
        return process
    status = 1
    try:
        os.setsid()
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = work()
    except BaseException:  # noqa: BLE001 printed here, because the process ends without its caller
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def create_model(directory: Path) -> int:
    """Write a model that computes and saves faster than the presets."""
    tokenizer = train_tokenizer(MODEL.vocabulary, ("P _ O G Up Down Left Right",))
    model = build_model(MODEL, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return 0


def kill_at_operation(directory: Path, operation: int) -> None:
    """Kill this process at a file operation in a directory."""
    prefix, left = str(directory), operation

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and str(arguments[0]).startswith(prefix):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def wait_until(is_reached: Callable[[], bool], processes: Sequence[int]) -> bool | None:
    """Wait until something is reached, and return None; if a process ends before, return whether any was killed.

    All processes are looked at: the other rank may notice that one was killed, and fail, before this process does.

    Raises:
        TimeoutError: neither happens in time.
    """
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        states = [os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) for process in processes]
        if ended := [state for state in states if state]:
            return any(state.si_code == os.CLD_KILLED for state in ended)
        if is_reached():
            return None
        time.sleep(0.001)
    raise TimeoutError(f"the run has not ended after {TIMEOUT_SECONDS:g} s")


def kill(process: int) -> None:
    """Kill a rank, unless it has ended, and its children."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with suppress(ProcessLookupError):  # not yet the leader of its group
        os.killpg(process, signal.SIGKILL)


def statuses(processes: Sequence[int]) -> list[int]:
    """Wait for the end of processes and return their exit statuses."""
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def is_writing(run: Run) -> bool:
    return any(run.checkpoints.glob(f"{STAGING_PREFIX}*"))


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What the run without interruption was like."""

    seconds: float
    seconds_of_save: float
    operations_of_save: float
    outcome: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> Undisturbed:
        """Run it.

        Raises:
            RuntimeError: it failed.
        """
        import_modules_of(run)
        started, saving, last = time.monotonic(), 0.0, time.monotonic()
        processes = run.start()

        def look() -> bool:
            nonlocal saving, last
            now = time.monotonic()
            saving += (now - last) * is_writing(run)
            last = now
            return False

        wait_until(look, processes)
        finish(run, processes)
        files = sum(path.is_file() for path in last_checkpoint(run).rglob("*"))
        # each is opened to be written, to be flushed and to be hashed, and deleted when it is outdated
        return cls(time.monotonic() - started, saving / STEPS, 4.0 * files, outcome(run))


def import_modules_of(run: Run) -> None:
    """Import what such a run imports, so that its forks do not have to."""
    first = Run(run.place, "first", run.ranks)
    finish(first, first.start())
    for name in (run.place / "modules").read_text().split():
        if name.startswith(IMPORTED_BY_RUNS):
            with suppress(ImportError):  # an alias that is no module of its own
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def finish(run: Run, processes: Sequence[int]) -> None:
    """Wait for the end of a run.

    Raises:
        RuntimeError: it failed.
    """
    if any(statuses(processes)):
        raise RuntimeError((run.place / "output").read_text()[-4000:])


def last_checkpoint(run: Run) -> Path:
    return run.checkpoints / f"global_step_{STEPS}"


def outcome(run: Run) -> dict[str, Any]:
    """Return everything that two runs of one experiment must have in common."""
    last = last_checkpoint(run)
    files = {str(path.relative_to(last)): path for path in last.rglob("*.safetensors")}
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return {
        "tensors": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())},
        "metrics": [without_timing(json.loads(line)) for line in lines],
    }


@dataclass(slots=True)
class Killer:
    """Kills a run again and again."""

    run: Run
    undisturbed: Undisturbed
    draws: random.Random
    counts: Counter[str]

    def kill_until_finished(self, kills: int) -> None:
        """Kill the run so many times, unless it finishes before, and then let it finish.

        Raises:
            RuntimeError: it failed by itself.
        """
        newest = -1
        for _ in range(kills):
            if not self._kill_once():
                return
            newest = self._inspect(newest)
        finish(self.run, self.run.start())

    def _kill_once(self) -> bool:
        """Start the run and kill it; return whether it was killed before it ended."""
        draws, victim = self.draws, self.draws.randrange(self.run.ranks)
        kind = draws.choice(("operation", "operation", "save", "save", "time"))
        operation = draws.randint(1, round(2 * self.undisturbed.operations_of_save)) if kind == "operation" else 0
        processes = self.run.start(victim, operation)
        is_killed = self._wait(kind, processes)
        if is_killed is None:
            kill(processes[victim])
        elif not is_killed:
            finish(self.run, processes)
            return False
        if len(processes) > 1:
            time.sleep(draws.uniform(0.0, LATER_SECONDS))
        for process in processes:
            kill(process)
        statuses(processes)
        self.counts[f"at_a_random_{kind}"] += 1
        return True

    def _wait(self, kind: str, processes: Sequence[int]) -> bool | None:
        """Wait for the moment of the kill; see `wait_until`."""
        if kind == "operation":
            return wait_until(lambda: False, processes)
        seconds = self.undisturbed.seconds * LONGEST_SHARE
        if kind == "save":
            seconds = 2 * self.undisturbed.seconds_of_save
            if (is_killed := wait_until(lambda: is_writing(self.run), processes)) is not None:
                return is_killed
        end = time.monotonic() + self.draws.uniform(0.0, seconds)
        return wait_until(lambda: time.monotonic() >= end, processes)

    def _inspect(self, newest: int) -> int:
        """Count what the kill has left behind; return the step of the newest intact checkpoint."""
        run, refused = self.run, dict[Path, str]()
        latest = run.checkpoints / LATEST_STEP_FILE
        announced = int(latest.read_text()) if latest.exists() else -1
        checkpoint = find_checkpoint(run.checkpoints, refused.__setitem__)
        step = checkpoint.step if checkpoint else -1
        self.counts["kills"] += 1
        self.counts["while_a_checkpoint_was_written"] += is_writing(run)
        self.counts["before_the_first_checkpoint"] += checkpoint is None
        self.counts["checkpoints_refused"] += len(refused)
        self.counts["kills_that_lost_a_step"] += step < max(newest, announced)
        return max(newest, step)


@dataclass(slots=True)
class Campaign:
    """Kills of runs on so many ranks, whose results are compared with those of one without interruption."""

    place: Path
    ranks: int
    count: int
    draws: random.Random
    undisturbed: Undisturbed
    counts: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    equal: int = 0
    seconds: float = 0.0

    @classmethod
    def begin(cls, place: Path, ranks: int, count: int, draws: random.Random) -> Campaign:
        """Run the job without interruption."""
        place.mkdir()
        statuses([fork(partial(create_model, place / "model"), place / "output")])
        return cls(place, ranks, count, draws, Undisturbed.of(Run(place, "undisturbed", ranks)))

    def next_run(self) -> None:
        """Kill a run up to `KILLS_PER_RUN` times, let it finish and compare it."""
        started, run = time.monotonic(), Run(self.place, f"run_{self.runs}", self.ranks)
        kills = min(KILLS_PER_RUN, self.count - self.counts["kills"])
        Killer(run, self.undisturbed, self.draws, self.counts).kill_until_finished(kills)
        self.runs += 1
        self.equal += outcome(run) == self.undisturbed.outcome
        self.seconds += time.monotonic() - started
        shutil.rmtree(run.directory)

    def results(self) -> dict[str, Any]:
        return {
            **dict(sorted(self.counts.items())),
            "runs": self.runs,
            "runs_equal_to_the_undisturbed_one_bit_for_bit": self.equal,
            "steps_of_a_run": STEPS,
            "seconds": round(self.seconds, 1),
        }


def run(count: int, seed: int, save: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Return the results of `count` kills, half of them of runs on two ranks; `save` gets those so far after each
    run."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    names, parts = ("one_process", "two_ranks"), (count - count // 2, count // 2)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=memory) as place, ended_children():
        campaigns = {
            name: Campaign.begin(Path(place, name), ranks, part, random.Random(seed * 2 + ranks))
            for ranks, name, part in zip((1, 2), names, parts, strict=True)
        }
        while left := [name for name in names if campaigns[name].counts["kills"] < campaigns[name].count]:
            for name in left:
                campaigns[name].next_run()
                results[name] = campaigns[name].results()
                save(results)
    return results


@contextmanager
def ended_children() -> Iterator[None]:
    """Kill the processes of the current run if this process is asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        yield
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()


def failures(results: dict[str, Any]) -> int:
    """Return how many kills lost a step, and how many runs ended with other results."""
    return sum(
        part["kills_that_lost_a_step"] + part["runs"] - part["runs_equal_to_the_undisturbed_one_bit_for_bit"]
        for part in results.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    description = machine()

    def save(results: dict[str, Any]) -> None:
        text = json.dumps({"machine": description, "seed": arguments.seed, **results}, indent=1) + "\n"
        (arguments.out.write_text if arguments.out else sys.stderr.write)(text)

    sys.exit(1 if failures(run(arguments.count, arguments.seed, save)) else 0)


if __name__ == "__main__":
    main()
