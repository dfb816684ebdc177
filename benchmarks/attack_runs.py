"""Open damaged and hostile run directories with every command: is a file outside of one read, changed or shown?

    python benchmarks/attack_runs.py [--count 500] [--seed 0] [--out FILE]

Each directory is a copy of that of a small run with one or two damages of `damaged_runs.py`. The viewer (all routes),
the report, `status`, `diagnose` and `stop` read it, and one of `serve`, `eval`, `generate`, `export` and `train`
continues with it, each in a fork. Counts effects (files outside that are opened, changed or shown, code of the run,
processes of others that are ended), tracebacks and server errors, exceeded limits, and undamaged parts that are hidden.
Exits with status 1 if there are any; `failures` has the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from checkpoint_kills import IMPORTED_BY_RUNS, create_model
from damaged_runs import DAMAGES, Outside
from hostile_text import EVIL_MODULE, SECRET
from quintet.cli import serve as serve_command
from quintet.cli import stop as stop_command
from quintet.cli.main import main as quintet
from quintet.errors import UserError
from quintet.runtime.http_service.address import Address
from quintet.tracking.report import write_report
from quintet.viewer.app import build_app
from quintet.viewer.run_catalog import RunCatalog

TRAIN = ("training.steps=2", "training.groups_per_step=2", "training.samples_per_group=2", "training.mini_batches=1")
TRAIN += ("training.threads=1", "warm_start=null", "rollout.max_turns=2", "validation.episodes=2", "name=r")
TRAIN += ("checkpoint.every_steps=1", "tracking.loggers=[jsonl]", "policy.preset=null", "policy.path=model")
SMALL = ("--max-tokens", "2", "--data", "prompts.jsonl")
COMMANDS: dict[str, list[str]] = {
    "serve": ["serve", "runs/r", "--port", "0"],
    "eval": ["eval", "runs/r", *SMALL],
    "generate": ["generate", "runs/r", *SMALL, "--output", "out.parquet"],
    "export": ["export", "runs/r", "exported"],
    "export of a checkpoint": ["export", "runs/r/checkpoints/global_step_2", "exported"],
    "train": ["train", *TRAIN, "training.steps=3"],
}
READERS = ("view", "report", "status", "diagnose", "stop")
CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 60, 600.0, 4 << 30
SHOWN_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Case:
    """A run directory in a working directory of its own."""

    place: Path
    outside: Path

    @property
    def run(self) -> Path:
        return self.place / "runs/r"

    def watch(self) -> list[str]:
        """Record opened files outside and imports of the run's code; return the list that gets them."""
        effects: list[str] = []
        outside = str(self.outside)

        def record(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str | bytes):
                if os.path.realpath(os.fsdecode(arguments[0])).startswith(outside):
                    effects.append(f"open {os.fsdecode(arguments[0])}")
            elif event == "import" and EVIL_MODULE in str(arguments[0]):
                effects.append(f"import {arguments[0]}")

        sys.addaudithook(record)
        return effects

    def shown_secrets(self) -> list[str]:
        """Return the files below the working directory that have the secret."""
        files = (path for path in self.place.rglob("*") if path.is_file() and not path.is_symlink())
        small = (path for path in files if path.stat().st_size < 1 << 26 and self.outside not in path.parents)
        return [str(path.relative_to(self.place)) for path in small if SECRET.encode() in path.read_bytes()]


def read_all(case: Case, damaged: Sequence[Path], complete: Shown) -> list[str]:
    """Show a run in the viewer, and return what is wrong with the responses."""
    with TestClient(
        build_app(RunCatalog([case.run]), Address("127.0.0.1", 8080, None)), "http://127.0.0.1:8080"
    ) as viewer:
        shown = Shown.by(viewer)
    hidden = complete.hidden_in(shown, [path.relative_to(case.run) for path in damaged if path != case.run])
    return [*shown.errors, *hidden, *(["shows the secret"] if SECRET in shown.text else [])]


@dataclass(slots=True)
class Shown:
    """What the viewer shows of a run."""

    errors: list[str] = field(default_factory=list)
    text: str = ""
    metrics: set[str] = field(default_factory=set)
    settings: set[str] = field(default_factory=set)
    episodes: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of episodes by split and step."""

    @classmethod
    def by(cls, viewer: TestClient) -> Shown:
        """Request all routes."""
        shown = cls()
        runs = shown.get(viewer, "runs") or [{}]
        name = runs[0].get("name", "r")
        metrics = shown.get(viewer, "metrics", run=name) or []
        shown.metrics = {row["name"] for row in metrics}
        shown.settings = set((shown.get(viewer, "config", run=name) or {}).get("values", {}))
        episodes: dict[str, Any] = {"complete": False}
        end = time.monotonic() + 30
        while not episodes["complete"] and time.monotonic() < end:
            episodes = shown.get(viewer, "episodes", run=name, count=500) or {"complete": True, "rows": []}
        shown.episodes = Counter((row["split"], row["step"]) for row in episodes["rows"])
        for row in episodes["rows"][:4]:
            shown.get(viewer, "group", run=name, split=row["split"], step=row["step"], line=row["line"])
        shown.get(viewer, "curves", run=name, metric=sorted(shown.metrics)[:5] or ["x"])
        shown.get(viewer, "changes", run=name, before=0, after=2)
        shown.get(viewer, "trace", run=name, step=1, rank=0)
        for route in ("facets", "findings", "timeline", "videos", "traces"):
            shown.get(viewer, route, run=name)
        return shown

    def get(self, viewer: TestClient, route: str, **parameters: Any) -> Any:
        try:
            response = viewer.get(f"/api/{route}", params=parameters)
        except Exception:  # noqa: BLE001 - an error of the server, which the client raises here
            self.errors.append(f"{route}: {traceback.format_exc()[-1500:]}")
            return None
        self.text += response.text
        return response.json() if response.status_code == 200 else None

    def hidden_in(self, other: Shown, damaged: Sequence[Path]) -> list[str]:
        """Return which parts the other does not show, although their files are not damaged."""

        def is_intact(path: str) -> bool:
            return not any(Path(path).is_relative_to(item) or item.is_relative_to(path) for item in damaged)

        hidden = []
        if is_intact("metrics.jsonl") and other.metrics != self.metrics:
            hidden.append("hidden: metrics")
        if is_intact("config.yaml") and other.settings != self.settings:
            hidden.append("hidden: settings")
        for (split, step), number in self.episodes.items():
            if is_intact(f"trajectories/{split}/step_{step:06d}.jsonl") and other.episodes[split, step] != number:
                hidden.append(f"hidden: episodes of {split} step {step}")
        return hidden


def stopped(arguments: list[str]) -> Callable[[], object]:
    def work() -> object:
        sys.argv[:] = ["quintet", *arguments]
        return quintet()

    return work


def in_fork(work: Callable[[], object], case: Case) -> tuple[str, list[str], str]:
    """Call a function in a fork whose directory is that of the case; return how it ended, effects, and its output."""
    reader, writer = os.pipe()
    if not (process := os.fork()):
        status, report = 1, []
        try:
            os.setsid()
            os.chdir(case.place)
            with open("output", "w", errors="replace") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
            sys.path.insert(0, str(case.place))
            report = case.watch()
            found = work()
            report += found if isinstance(found, list) else []
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except UserError as error:
            print(f"quintet: {error}", file=sys.stderr)
            status = error.exit_status
        except BaseException:  # noqa: BLE001 - the ending that is looked for
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(writer, json.dumps(report).encode()[:60_000])
            os._exit(status & 0xFF)
    os.close(writer)
    with open(reader, "rb") as pipe:
        status = _ended(process)
        effects = json.loads(pipe.read() or b"[]")
    output = (case.place / "output").read_text(errors="replace")
    return _kind(status, output), effects, output


def _ended(process: int) -> int:
    end = time.monotonic() + WALL_SECONDS
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            status = os.waitpid(process, 0)[1]
            break
        time.sleep(0.002)
    with suppress(ProcessLookupError):  # its children
        os.killpg(process, signal.SIGKILL)
    return status


def _kind(status: int, output: str) -> str:
    if os.WIFSIGNALED(status):
        return "timed_out" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "traceback"
    if "MemoryError" in output:
        return "memory"
    is_user_error = os.WEXITSTATUS(status) in (0, 1, 2) and "Traceback (most recent call last)" not in output
    return "ended" if is_user_error else "traceback"


@dataclass(slots=True)
class Attack:
    """Copies of a run, damaged and opened."""

    place: Path
    draws: random.Random
    outside: Outside
    complete: Shown
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def attempt(self, number: int) -> None:
        """Damage a copy, and open it with all readers and one other command."""
        case = Case(self.place / f"case_{number}", self.outside.path)
        shutil.copytree(self.place / "template", case.place, symlinks=True)
        names = self.draws.sample(sorted(DAMAGES), self.draws.choice((1, 1, 2)))
        damaged = []
        for name in names:
            with suppress(OSError, ValueError, IndexError):  # the first damage may have removed what the second needs
                damaged.append(DAMAGES[name](case.run, self.draws, self.outside))
        works: dict[str, Callable[[], object]] = {
            "view": lambda: read_all(case, damaged, self.complete),
            "report": lambda: write_report(case.run, "r", {}, []),
            "status": stopped(["status", "runs/r", "--json"]),
            "diagnose": stopped(["diagnose", "runs/r"]),
            "stop": stopped(["stop", "runs/r", "--now", "--timeout", "0.3"]),
        }
        command = self.draws.choice(sorted(COMMANDS))
        for name, work in {**works, command: stopped(COMMANDS[command])}.items():
            self._open(name, work, case, names, damaged)
        shutil.rmtree(case.place)

    def _open(
        self, command: str, work: Callable[[], object], case: Case, damages: list[str], damaged: Sequence[Path]
    ) -> None:
        before = self.outside.contents()
        kind, found, output = in_fork(work, case)
        effects = [text for text in found if text.startswith(("open", "import", "shows"))]
        hidden = [text for text in found if text.startswith("hidden")]
        errors = [text for text in found if text not in effects and text not in hidden]
        effects += ["changes files outside"] if self.outside.contents() != before else []
        effects += [f"the secret is in {name}" for name in case.shown_secrets()]
        effects += ["ends a process of somebody else"] if not Path(f"/proc/{self.outside.decoy}/fd").exists() else []
        effects += ["runs code"] if any(case.place.rglob("code-was-executed")) else []
        if errors and kind == "ended":
            kind = "traceback"
        self.counts["opened"] += 1
        self.counts.update({kind: 1, "effects": bool(effects), "hidden": bool(hidden)})
        if effects or hidden or kind != "ended":
            place = [str(path.relative_to(case.place)) for path in damaged]
            found = {"command": command, "damages": damages, "damaged": place, "ending": kind}
            self.failures.append(
                found | {"effects": effects, "hidden": hidden, "output": ("\n".join(errors) + output)[-3000:]}
            )


def create_template(place: Path) -> None:
    """Train a small run in a fork, in whose directory the commands find what they need."""
    place.mkdir()
    (place / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    (place / f"{EVIL_MODULE}.py").write_text("open('code-was-executed', 'w')\n")

    def train() -> object:
        create_model(Path("model"))
        sys.argv[:] = ["quintet", "train", *TRAIN]
        try:
            return quintet()
        finally:
            Path("modules").write_text("\n".join(sys.modules))

    kind, _, output = in_fork(train, Case(place, place / "nothing"))
    if kind != "ended" or not (place / "runs/r/report.html").exists():
        raise RuntimeError(output[-4000:])


def import_modules(names: Sequence[str]) -> None:
    """Import what the commands import, so that forks do not have to."""
    import importlib

    for name in names:
        if name.startswith(IMPORTED_BY_RUNS):
            with suppress(ImportError):  # an alias that is no module of its own
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def prepare(place: Path, decoy: int, draws: random.Random) -> Attack:
    """Create the run, the files outside, and commands that end by themselves."""
    template = place / "template"
    create_template(template)
    import_modules((template / "modules").read_text().split())
    stop_command.KILL_SECONDS = 0.0
    serve_command._serve = _build_and_close
    outside = Outside.create(place / "outside", template / "runs/r", decoy)
    results: list[Shown] = []
    case = Case(template, outside.path)

    def show() -> list[str]:
        with TestClient(
            build_app(RunCatalog([case.run]), Address("127.0.0.1", 8080, None)), "http://127.0.0.1:8080"
        ) as viewer:
            shown = Shown.by(viewer)
        episodes = [[*key, number] for key, number in shown.episodes.items()]
        return [json.dumps([sorted(shown.metrics), sorted(shown.settings), episodes])]

    _, (text,), _ = in_fork(show, case)
    metrics, values, episodes = json.loads(text)
    results.append(Shown(metrics=set(metrics), settings=set(values)))
    results[0].episodes = Counter({(split, step): number for split, step, number in episodes})
    return Attack(place, draws, outside, results[0])


def _build_and_close(composed: Any, policy: Path, name: str, context: int | None, _: Address) -> int:
    """Load the model as `quintet serve` does, and end."""
    from quintet.runtime.serving.build import build_request_handler

    build_request_handler(composed.experiment, policy, name=name, context=context).handler.close()
    return 0


def run(count: int, seed: int, progress: Callable[[int], None] = lambda _: None) -> dict[str, object]:
    """Return how commands with `count` damaged run directories ended, and the first that failed."""
    sys.dont_write_bytecode = True
    decoy = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1e6)"])
    try:
        with tempfile.TemporaryDirectory() as directory:
            attack = prepare(Path(directory).resolve(), decoy.pid, random.Random(seed))
            for number in range(count):
                attack.attempt(number)
                progress(number + 1)
    finally:
        decoy.kill()
        decoy.wait()
    kinds = ("opened", "ended", "traceback", "timed_out", "memory", "effects", "hidden")
    return {"directories": count, **{kind: attack.counts[kind] for kind in kinds}} | {
        "failures": attack.failures[:SHOWN_FAILURES]
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.count, arguments.seed, lambda n: print(n, file=sys.stderr) if n % 10 == 0 else None)
    text = json.dumps({"seed": arguments.seed, **result}, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
