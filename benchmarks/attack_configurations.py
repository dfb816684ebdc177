"""Give mutated configurations to `quintet plan` and `quintet translate`: has one an effect, or ends one in a traceback?

    python benchmarks/attack_configurations.py [--count 10000] [--seed 0] [--out FILE]

Each configuration is an example of one of the formats with one to three of the mutations of `hostile_text.py`. The
commands run in forks of a process that has imported them, each with 10 s of CPU time and 1 GiB of memory. An audit hook
records what a configuration must not cause: files that are opened outside of its directory, unless `source` names them,
or anywhere for writing, imports of its modules, processes, connections. Exits with status 1 if there was an effect, a
traceback or an exceeded limit; `failures` has the command and the text of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostile_text import EVIL_MODULE, SECRET, Surroundings, mutate
from quintet.cli.configuration import inspect_config
from quintet.cli.main import main as quintet
from quintet.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SUFFIXES = (".yaml", ".sh", ".txt")
FORMATS = ("native", "ragen", "verl", "vagen", "rlinf", "roll")
TRANSLATED_SHARE = 0.25
CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 10, 300.0, 1 << 30
SHOWN_FAILURES = 20
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EFFECTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill")
EFFECTS += ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod", "os.truncate")
EFFECTS += (
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "urllib.Request",
    "ctypes.dlopen",
    "pickle.find_class",
)


@dataclass(slots=True)
class Recorder:
    """Audit hook that records effects of a command."""

    allowed: tuple[str, ...]
    """Directories in which files may be read."""
    place: str
    """Directory of the configuration, in which no code may be compiled."""
    effects: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._opened(*arguments)
        elif event == "import" and str(arguments[0]).partition(".")[0] == EVIL_MODULE:
            self.effects.append(f"import {arguments[0]}")
        elif event == "compile" and str(arguments[1]).startswith(self.place):
            self.effects.append(f"compile {arguments[1]}")
        elif event in EFFECTS and arguments != (None,):  # ctypes opens the interpreter itself
            self.effects.append(f"{event} {arguments!r:.200}")

    def _opened(self, path: object, _mode: object, flags: int) -> None:
        if not isinstance(path, str | bytes) or path == os.devnull:
            return
        real = os.path.realpath(os.fsdecode(path))
        if flags & WRITES:
            self.effects.append(f"open for writing {real}")
        elif not real.startswith(self.allowed):
            self.effects.append(f"open {real}")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended."""

    kind: str
    """`planned`, `refused`, `traceback`, `timed_out`, `memory`."""
    effects: Sequence[str]
    output: str


def observed(arguments: Sequence[str], place: Path) -> Ending:
    """Run a command in a fork whose directory is `place`, under limits, and watch it."""
    reader, writer = os.pipe()
    if not (process := os.fork()):
        os.close(reader)
        _run(arguments, place, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        status = _ended(process)
        effects = json.loads(pipe.read() or b'["ended without a report"]')
    output = (place / "output").read_text(errors="replace")
    if os.WIFSIGNALED(status):
        effects = []
    return Ending(_kind(status, output), [*effects, *(["shows the secret"] if SECRET in output else [])], output)


def _run(arguments: Sequence[str], place: Path, writer: int) -> None:
    """Run a command in this process, report its effects and end."""
    status = 1
    recorder = Recorder((str(place), *_sourced(place / arguments[1]), *_readable()), str(place))
    try:
        os.chdir(place)
        with open("output", "w", errors="replace") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        _limit()
        sys.argv[:] = ["quintet", *arguments]
        sys.path.insert(0, str(place))
        sys.addaudithook(recorder)
        quintet()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the ending that is looked for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, json.dumps(recorder.effects[:20]).encode())
        os._exit(status & 0xFF)


def _sourced(script: Path) -> Iterator[str]:
    """Yield the files that `source` in the script names. A link is not followed, so that its target is not one."""
    text = script.read_text(errors="replace") if script.is_file() and script.stat().st_size < 1 << 20 else ""
    for name in re.findall(r"^source (\S+)$", text, re.MULTILINE):
        path = os.path.normpath(script.parent / name)
        if os.path.realpath(path) == path:
            yield path


def _readable() -> Iterator[str]:
    """Yield directories of Python, of this repository and of the kernel's information about the machine."""
    yield from {str(ROOT / "src"), sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), "/proc/", "/sys/"}
    yield from {os.path.dirname(os.path.realpath(module.__file__)) for module in (os, json) if module.__file__}
    yield from (os.path.realpath(path) for path in sys.path if path)
    yield from ("/etc/localtime", "/usr/share/zoneinfo", "/usr/share/terminfo", "/lib/terminfo", "/etc/terminfo")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def _ended(process: int) -> int:
    """Wait for a process, which is killed after a time, and return its wait status."""
    end = time.monotonic() + WALL_SECONDS
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            return os.waitpid(process, 0)[1]
        time.sleep(0.002)


def _kind(status: int, output: str) -> str:
    if os.WIFSIGNALED(status):
        return "timed_out" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "traceback"
    if "MemoryError" in output:
        return "memory"
    if "Traceback (most recent call last)" in output:
        return "traceback"
    return {0: "planned", 2: "refused"}.get(os.WEXITSTATUS(status), "traceback")


def warm_up(examples: Sequence[Path]) -> None:
    """Fill the caches of this process, so that forks do not compute them."""
    for example in {path.parent: path for path in examples}.values():
        with suppress(UserError):
            inspect_config(str(example), [], None, "refuse")
    gc.collect()
    gc.freeze()


@dataclass(slots=True)
class Attack:
    """Mutated examples in a directory of their own."""

    place: Path
    draws: random.Random
    examples: Sequence[Path]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def attempt(self, number: int, around: Surroundings) -> None:
        """Mutate an example, give it to a command, and count how that ends."""
        draws, example = self.draws, self.draws.choice(self.examples)
        directory = self.place / "cases" / str(number)
        shutil.copytree(example.parent, directory)
        target = directory / example.name
        around.prepare(directory)
        names = [mutate(target, draws) for _ in range(draws.choice((1, 1, 2, 3)))]
        if draws.random() < TRANSLATED_SHARE:
            arguments = ["translate", target.name, "--to", draws.choice(FORMATS)]
        else:
            arguments = ["plan", target.name, *(["--json"] if draws.random() < 0.5 else [])]
        ending = observed(arguments, directory)
        self.counts[ending.kind] += 1
        self.counts["translated"] += arguments[0] == "translate"
        self.counts["effects"] += bool(ending.effects)
        if ending.effects or ending.kind not in ("planned", "refused"):
            self._keep(arguments, example, names, ending, target)
        shutil.rmtree(directory)

    def _keep(self, arguments: list[str], example: Path, names: list[str], ending: Ending, target: Path) -> None:
        text = target.read_text(errors="replace") if target.is_file() and target.stat().st_size < 1 << 20 else ""
        found = {"command": arguments, "example": str(example.relative_to(EXAMPLES)), "mutations": names}
        found |= {"ending": ending.kind, "effects": list(ending.effects), "output": ending.output[-2000:]}
        self.failures.append({**found, "text": text[:20_000]})


def examples() -> list[Path]:
    """Return the configurations in `examples/`."""
    found = [path for path in EXAMPLES.rglob("*") if path.suffix in SUFFIXES and path.parent.name != "cluster"]
    return sorted(path for path in found if path.name != "env_config.yaml" and path.parent.name != "stuck_run")


def run(count: int, seed: int, progress: Callable[[int], None] = lambda _: None) -> dict[str, object]:
    """Return how `count` commands with mutated configurations ended, and the first that failed."""
    sys.dont_write_bytecode = True
    paths = examples()
    warm_up(paths)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory).resolve()
        around = Surroundings.create(place / "outside")
        before = around.contents()
        attack = Attack(place, random.Random(seed), paths)
        for number in range(count):
            attack.attempt(number, around)
            progress(number + 1)
        attack.counts["effects"] += around.contents() != before
    kinds = ("planned", "refused", "traceback", "timed_out", "memory", "effects", "translated")
    return {"configurations": count, **{kind: attack.counts[kind] for kind in kinds}} | {
        "failures": attack.failures[:SHOWN_FAILURES]
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.count, arguments.seed, lambda n: print(n, file=sys.stderr) if n % 100 == 0 else None)
    text = json.dumps({"seed": arguments.seed, **result}, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)
    sys.exit(1 if result["failures"] or result["effects"] else 0)


if __name__ == "__main__":
    main()
