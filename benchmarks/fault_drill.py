"""Fault drill: inject faults into a run at random moments; is each named or survived, and is every step kept?

    python benchmarks/fault_drill.py --out benchmarks/results/fault_drill.json [--kinds 'kill -9' SIGSTOP …]
    python benchmarks/fault_drill.py --docs     # writes the table of docs/faults.md from the results

Each run is `quintet train --ray local` with two engines on devices of their own and one or two ranks of the actor, with
one of the faults of `fault_cases.py`. It must end with the metrics of the undisturbed run, or with a message that names
the cause; rerunning the command must then end with these metrics. Runs that passed are not repeated; a lost node needs
two nodes of Ray behind loopback addresses. Needs Linux and root: signals, `prlimit`, a memory cgroup, a small tmpfs,
`pidfd_getfd`. Faults inside a process come from `fault_hooks/sitecustomize.py`. Exits with status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from fault_cases import CASES, Case
from fault_run import STEPS, DrillRun, rows, small_disk, wait_until
from machine import machine
from quintet.errors import MachineError
from quintet.tracking.metrics import without_timing
from quintet.tracking.run_status import read_status

HERE = Path(__file__).resolve().parent
RESULT, PAGE = HERE / "results" / "fault_drill.json", HERE.parent / "docs" / "faults.md"
ROUNDING = ("ppo_kl", "rollout_probs_diff", "rollout_corr", "engine/restarts", "engine/requests_reassigned")
"""Parts of names of metrics that are rounding alone, or that count the fault."""
TIMEOUT_SECONDS, DETECTION_SECONDS = 150.0, 10.0
MARKS = ("<!-- fault drill -->\n", "<!-- end of fault drill -->\n")


@dataclass(frozen=True, slots=True)
class Result:
    """What a fault has led to."""

    kind: str
    number: int
    target: str
    moment: str
    passed: bool
    ending: str
    """`continued`: by itself; `message`: it ended with a message, and was continued by the same command."""
    detected_seconds: float | None
    """From the fault to the message that names it; for a broken checkpoint, which nobody reads before, from the moment
    at which the rank that would load it has registered itself."""
    message: str
    equal: bool
    """Whether the final metrics are those of the undisturbed run."""
    steps_before: int
    """Steps that had been logged when the fault occurred."""
    lost_steps: int
    """Of them, those that are not in the final metrics exactly once."""
    left_processes: int
    seconds: float


def comparable(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics without times and without those that are rounding alone."""
    return [
        {name: value for name, value in without_timing(row).items() if not any(part in name for part in ROUNDING)}
        for row in rows(directory)
    ]


def are_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Return whether two runs have the same metrics, up to the rounding of different placements."""

    def is_close(a: Any, b: Any) -> bool:
        if isinstance(a, float | int) and isinstance(b, float | int):
            return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5)
        return bool(a == b)

    return len(ours) == len(theirs) and all(
        a.keys() == b.keys() and all(is_close(a[name], b[name]) for name in a)
        for a, b in zip(ours, theirs, strict=True)
    )


@dataclass(slots=True)
class Detection:
    """Waits for the message that names a fault, or the first step that counts the restart of an engine."""

    run: DrillRun
    injected: float
    """Seconds of the clock."""
    offset: int
    """Length of the output before the fault."""
    steps: int
    """Steps before the fault."""
    controller: int
    """Process of rank 0 before the fault."""
    _is_resumed: bool = False
    seconds: float | None = None
    message: str = ""

    def look(self) -> bool:
        """Return whether the fault is detected."""
        if self.seconds is None and (message := self._message()):
            self.seconds, self.message = time.time() - self.injected, message
        return self.seconds is not None

    def _message(self) -> str:
        case = self.run.case
        if case.is_at_resume and not self._is_resumed and self.run.pid(0) != self.controller:
            self._is_resumed, self.injected = True, time.time()
        if case.target == "launcher":
            with suppress(MachineError):
                return "quintet status: died" if read_status(self.run.directory).state == "died" else ""
        for line in self.run.output[self.offset :].split("\n")[:-1]:
            if re.search(case.cause, line):
                return line.replace(str(self.run.place), "").strip()
        return ""


def inject(run: DrillRun) -> tuple[Detection, str]:
    """Wait for the moment, and let the fault occur."""
    case, draws, process = run.case, run.draws, run.process
    assert process is not None

    def is_due() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before the fault:\n{run.output}")
        if case.at_start:
            return case.hook is not None or (run.directory / "processes/rank_2.json").exists()
        return len(run.steps()) >= step

    step, delay = draws.randint(2, STEPS - 8), draws.uniform(0, 0.4)
    moment = "start" if case.at_start else f"step {step} + {delay:.2f} s"
    if not wait_until(is_due, TIMEOUT_SECONDS):
        raise RuntimeError(f"the run did not reach its fault:\n{run.output}")
    time.sleep(4 * delay if case.at_start else delay)
    steps, offset, controller = len(run.steps()), len(run.output), 0 if case.at_start else run.pid(0)
    injected = time.time()
    if case.inject is not None:
        case.inject(run)
    if case.hook is not None:
        Path(f"{run.marker}.go").touch()
        if not wait_until(run.marker.exists, 60):
            raise RuntimeError(f"the fault did not occur:\n{run.output}")
        injected = float(run.marker.read_text() or time.time())
    return Detection(run, injected, offset, steps, controller), moment


def write_log(run: DrillRun, path: Path) -> None:
    """Keep the output of a run, and that of its ranks."""
    logs = sorted((run.directory / "logs").glob("*.log"))
    path.write_text(run.output + "".join(f"\n== {log.name}\n{log.read_text()}" for log in logs))


def drill(kind: str, number: int, seed: int, place: Path, expected: list[dict[str, Any]], logs: Path | None) -> Result:
    """Run once with a fault, and once more if it ended."""
    case, started = CASES[kind][number], time.monotonic()
    run = DrillRun(place, case, random.Random(f"{seed} {kind} {number}"))
    try:
        if case.nodes == 2:
            run.add_node("127.0.0.2")
            run.add_node("127.0.0.3")
        run.start()
        assert run.process is not None
        detection, moment = inject(run)
        status = watch(run, detection)
        left = len(run.ranks()) if not wait_until(lambda: not run.ranks(), 20) else 0
        ending = "hangs" if status is None else "continued" if status == 0 else "message"
        if status and detection.seconds is None:
            ending = f"status {status} without the cause"
        if status:
            continue_run(run)
        final = run.steps()
        lost = sum(final.count(step) != 1 for step in range(1, detection.steps + 1))
        equal = are_equal(comparable(run.directory), expected)
    finally:
        run.close()
        if logs is not None:
            write_log(run, logs / f"{kind.replace(' ', '_')}_{number}.log")
    in_time = detection.seconds is None if case.is_silent else (detection.seconds or math.inf) <= DETECTION_SECONDS
    passed = bool(ending in ("continued", "message") and in_time and equal and not lost and not left)
    seconds = None if detection.seconds is None else round(detection.seconds, 1)
    return Result(
        kind, number, case.target, moment, passed, ending, seconds, detection.message, equal, detection.steps, lost,
        left, round(time.monotonic() - started, 1),
    )  # fmt: skip


def watch(run: DrillRun, detection: Detection) -> int | None:
    """Wait for the end; return the exit status, None if there is none in time."""
    assert run.process is not None
    is_replaced = False
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        status = run.process.poll()
        is_detected = detection.look()
        if is_detected and run.case.nodes == run.case.actors == 2 and not is_replaced:
            is_replaced = True
            run.add_node("127.0.0.4")
        if status is not None and (is_detected or run.case.target != "launcher"):
            return status
        time.sleep(0.03)
    return None


def continue_run(run: DrillRun) -> None:
    """Remove the cause, and rerun the command."""
    (run.place / "runs/filler").unlink(missing_ok=True)
    if run.case.nodes == 2:
        run.add_node("127.0.0.4")
    for copied in run.copied_checkpoints.glob("*"):
        shutil.rmtree(run.directory / "checkpoints" / copied.name)
        copied.rename(run.directory / "checkpoints" / copied.name)
    run.start()
    assert run.process is not None
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(TIMEOUT_SECONDS)


def undisturbed(place: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without a fault."""
    run = DrillRun(place, Case("", ""), random.Random(0))
    run.start()
    assert run.process is not None
    if run.process.wait(TIMEOUT_SECONDS):
        raise RuntimeError(run.output)
    return comparable(run.directory)


def run_all(kinds: list[str], seed: int, out: Path, logs: Path | None) -> list[dict[str, Any]]:
    """Run what is missing in the file of results."""
    results = json.loads(out.read_text())["runs"] if out.exists() else []
    done = {(row["kind"], row["number"]) for row in results if row["passed"]}
    runs = [(kind, number) for number in range(5) for kind in kinds]
    missing = [run for run in runs if run not in done]
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "undisturbed").mkdir()
        expected = undisturbed(Path(root) / "undisturbed") if missing else []
        for kind, number in missing:
            place = Path(root) / f"{kind.replace(' ', '_')}_{number}"
            place.mkdir()
            with small_disk(place) if kind == "full disk" else nullcontext():
                result = asdict(drill(kind, number, seed, place, expected, logs))
            print(json.dumps(result), file=sys.stderr, flush=True)
            results = [row for row in results if (row["kind"], row["number"]) != (kind, number)] + [result]
            out.write_text(json.dumps(summary(results, seed), indent=1) + "\n")
    return results


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout.strip()


def summary(results: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return the content of the file of results."""
    order = list(CASES)
    results = sorted(results, key=lambda row: (order.index(row["kind"]), row["number"]))
    return {
        "machine": machine(),
        "date": date.today().isoformat(),
        "commit": _commit(),
        "seed": seed,
        "steps": STEPS,
        "runs_planned": sum(map(len, CASES.values())),
        "runs_made": len(results),
        "runs_passed": sum(row["passed"] for row in results),
        "lost_steps": sum(row["lost_steps"] for row in results),
        "runs": results,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the section of the documentation."""
    head = "| fault | runs | continued by itself | ended with a message | slowest detection | passed |"
    lines = [head, "| --- " * 6 + "|"]
    for kind in CASES:
        runs = [row for row in results["runs"] if row["kind"] == kind]
        endings = [row["ending"] for row in runs]
        seconds = [row["detected_seconds"] for row in runs if row["detected_seconds"] is not None]
        slowest = f"{max(seconds):.1f} s" if seconds else "–"
        counts = f"{len(runs)} | {endings.count('continued')} | {endings.count('message')}"
        lines.append(f"| {kind} | {counts} | {slowest} | {sum(row['passed'] for row in runs)} |")
    return "\n".join(lines) + "\n"


def write_docs() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}{table(json.loads(RESULT.read_text()))}{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--logs", type=Path, help="directory for the output of each run")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    if options.docs:
        write_docs()
        return
    results = run_all(options.kinds, options.seed, options.out, options.logs)
    sys.exit(0 if all(row["passed"] for row in results) else 1)


if __name__ == "__main__":
    main()
