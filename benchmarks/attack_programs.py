"""Run hostile programs through the judge, and count effects outside of their processes.

    python benchmarks/attack_programs.py [--count 1000] [--seed 0] [--user 65534] [--out FILE]

Half of the programs are responses that a reward scorer judges, the others calls of the tool `python`. Beside them runs
a process that they try to reach; files, sockets, locks and the memory of this process are checked as well, and between
the programs right and wrong answers are judged. `--user` runs everything as another user than root.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from hostile_programs import HostileProgram, hostile_programs
from quintet.config.native.data import RewardConfig
from quintet.records import PromptRow, Response
from quintet.rewards.factory import RewardScorer, build_verifier_scorer
from quintet.sandbox import landlock, seccomp
from quintet.sandbox.program_runner import program_runner
from quintet.tools.python_program import PythonProgram

VICTIM: Final = """
import ctypes, os, signal, struct, sys
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, lambda *_: os._exit(3))
secret = os.environ["SECRET"]
libc = ctypes.CDLL(None)
libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
libc.prctl(4, int(sys.argv[1]), 0, 0, 0)
print(id(secret), flush=True)
sys.stdin.read()
"""
"""Process that ends at any signal. Its first argument tells whether it is dumpable."""
WATCHED: Final = ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~"), ".", sys.prefix, "/etc")
PROGRAMS_PER_ROUND: Final = 20
SCORER_SECONDS: Final = 20.0
MAX_GROWTH_BYTES: Final = 256 << 20
WORKER: Final = b"quintet.sandbox.program_worker:work"
KEY: Final = 0x51AB0000
RIGHT, WRONG = "def f(n):\n    return n * n", "def f(n):\n    return n + 3"


class Surroundings:
    """What programs must not change or read, and what they did to it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="quintet-attack-"))
        self._folder.chmod(0o755)
        self.secret = f"SECRET-{secrets.token_hex(16)}"
        self._file = self._folder / "secret"
        self._file.write_text(self.secret)
        self._victim = self._start_victim()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._abstract = b"\0quintet-attack-" + os.urandom(8).hex().encode()
        self._datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._datagrams.bind(self._abstract)
        for each in (self._server, self._datagrams):
            each.setblocking(False)
        self._marker = f"quintet-attack-{secrets.token_hex(4)}-made"
        self._key = KEY + secrets.randbelow(1 << 15)
        self._state, self._rss = self._read_state(), _resident_bytes()

    def _start_victim(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "SECRET": self.secret}
        command = [sys.executable, "-c", VICTIM, str(int(landlock.kernel_version() >= 1))]
        victim = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=self._folder
        )
        assert victim.stdout is not None
        self._address = int(victim.stdout.readline())
        return victim

    @property
    def targets(self) -> dict[str, Any]:
        """Values of the names that the programs use."""
        names = {"PID": self._victim.pid, "JUDGE": os.getpid(), "PATH": str(self._file), "FOLDER": str(self._folder)}
        names |= {"PORT": self._server.getsockname()[1], "ABSTRACT": self._abstract, "MARKER": self._marker}
        return {**names, "KEY": self._key, "ADDRESS": self._address}

    def effects(self) -> Iterator[str]:
        """Yield what has changed since the start."""
        if self._victim.poll() is not None:
            yield f"the other process ended with {self._victim.returncode}"
        else:
            state = self._read_state()
            yield from (f"{name} changed" for name, value in self._state.items() if state[name] != value)
        if _resident_bytes() - self._rss > MAX_GROWTH_BYTES:
            yield "memory of this process"
        yield from self._new_files()
        yield from self._contacts()
        with open(self._file) as file, contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        yield "a lock"

    def _read_state(self) -> dict[str, Any]:
        pid, status = self._victim.pid, os.stat(self._file)
        proc = Path(f"/proc/{pid}")
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        state = {"state": fields[0] in "TtZ", "group": fields[2:4], "priority": fields[15:17], "threads": fields[17]}
        state |= {"affinity": os.sched_getaffinity(pid), "policy": os.sched_getscheduler(pid)}
        state |= {"own affinity": os.sched_getaffinity(0), "own priority": os.getpriority(os.PRIO_PROCESS, 0)}
        state |= {name: (proc / name).read_text() for name in ("oom_score_adj", "comm", "cgroup", "limits")}
        state["file"] = (self._file.read_text(), status.st_mode, status.st_uid, status.st_mtime_ns, status.st_nlink)
        state["extended attributes"] = os.listxattr(self._file)
        state["folder"] = sorted(os.listdir(self._folder))
        return state

    def _new_files(self) -> Iterator[str]:
        for folder in WATCHED:
            with contextlib.suppress(OSError):
                yield from (f"file {name}" for name in os.listdir(folder) if self._marker in name)
        for name in ("shm", "msg", "sem"):
            lines = Path(f"/proc/sysvipc/{name}").read_text().splitlines()[1:]
            yield from (f"System V {name}" for line in lines if int(line.split()[0]) & 0xFFFFFFFF == self._key)

    def _contacts(self) -> Iterator[str]:
        with contextlib.suppress(BlockingIOError):
            self._server.accept()
            yield "a connection"
        with contextlib.suppress(BlockingIOError):
            self._datagrams.recv(1)
            yield "a datagram"
        if self._marker in Path("/proc/net/unix").read_text():
            yield "a socket"

    def close(self) -> None:
        """End the other process and remove its files."""
        self._victim.kill()
        self._victim.communicate()
        self._server.close()
        self._datagrams.close()
        shutil.rmtree(self._folder)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _parents() -> dict[int, int]:
    """Return the parents of all processes that serve or run programs, by process."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if WORKER in (entry / "cmdline").read_bytes().split(b"\0"):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def _descends(pid: int) -> bool:
    """Return whether a process is a descendant of this one."""
    with contextlib.suppress(OSError):
        while pid > 1 and pid != os.getpid():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def _left_over(seconds: float = 5.0) -> int:
    """Return the number of processes of programs that are still there, after waiting for their end."""
    deadline, servers = time.monotonic() + seconds, {program_runner()._server._process.pid}
    while True:
        parents = _parents()
        # those that lost their parent are children of this process
        left = [pid for pid, parent in parents.items() if parent in parents or parent == os.getpid()]
        left = [pid for pid in left if pid not in servers and _descends(pid)]
        if not left or time.monotonic() > deadline:
            return len(left)
        time.sleep(0.05)


@contextlib.contextmanager
def _adoption() -> Iterator[None]:
    """Become the parent of descendants that lose theirs."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def _response(number: int, program: str, form: int) -> Response:
    """Return a response whose tests call a function, run assertions, or compare output."""
    forms: Sequence[Any] = (
        {"inputs": [[2], [3]], "outputs": [4, 9], "fn_name": "f"},
        ["assert f(2) == 4", "assert f(3) == 9"],
        {"inputs": [""], "outputs": [secrets.token_hex(8)]},
    )
    return Response(number, PromptRow(number, "codeforces", (), forms[form % 3]), f"```python\n{program}\n```", 5)


def _judge(scorer: RewardScorer, programs: Sequence[HostileProgram]) -> Iterator[tuple[str, str]]:
    """Yield the kinds of programs that get a reward, or whose judgement fails; and wrong verdicts of other programs."""
    for number, program in enumerate(programs):
        scorer.submit(_response(number, program.source, number))
    scorer.submit(_response(-1, RIGHT, 0))
    scorer.submit(_response(-2, WRONG, 1))
    for result in scorer.drain():
        kind = programs[result.id].kind if result.id >= 0 else "no attack"
        if result.failure is not None:
            yield kind, f"judgement failed: {result.failure.error_type}"
        elif result.score != float(result.id == -1):
            yield kind, f"score {result.score}"


def _call_tool(programs: Sequence[HostileProgram], secret: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds of programs that read the secret or return too much, or prove nothing because they do not run."""
    tool = PythonProgram()
    for program in programs:
        output = tool.execute({"code": program.source})
        if secret in output.replace("\\x00", ""):
            yield program.kind, "the secret was read"
        if program.kind != "forgeries" and "BEGUN" not in output and "Traceback" in output:
            yield program.kind, f"did not run: {output[-200:]}"
        if len(output) > seccomp.MAX_FILE_BYTES + 1000:
            yield program.kind, "long output"
    if tool.execute({"code": "print(6 * 7)"}) != "42":
        yield "no attack", "wrong output"


def _split(
    programs: Sequence[HostileProgram], kinds: Counter[str]
) -> tuple[list[HostileProgram], list[HostileProgram]]:
    """Return the programs for the judge and those for the tool, of each kind in turn, and count them."""
    parts: tuple[list[HostileProgram], list[HostileProgram]] = ([], [])
    for program in programs:
        kinds[program.kind] += 1
        parts[kinds[program.kind] % 2].append(program)
    return parts


def run(count: int, seed: int) -> dict[str, Any]:
    """Run `count` programs; return their number by kind, and what happened outside by kind."""
    surroundings = Surroundings()
    config = RewardConfig(manager="prime", workers=2, timeout_seconds=SCORER_SECONDS)
    kinds: Counter[str] = Counter()
    effects: list[tuple[str, str]] = []
    started = time.monotonic()
    with _adoption(), closing(surroundings), closing(build_verifier_scorer(config, 100, ["codeforces"])) as scorer:
        programs = list(hostile_programs(count, seed, surroundings.targets))
        for start in range(0, count, PROGRAMS_PER_ROUND):
            group = programs[start : start + PROGRAMS_PER_ROUND]
            judged, called = _split(group, kinds)
            effects += _judge(scorer, judged)
            effects += _call_tool(called, surroundings.secret)
            around = [*surroundings.effects(), *["a process"] * _left_over()]
            effects += [(", ".join(sorted({program.kind for program in group})), each) for each in around]
            if any("ended" in each for each in around):
                break
    return {
        "programs": sum(kinds.values()),
        "kinds": dict(kinds),
        "effects": [list(each) for each in effects],
        "user": os.getuid(),
        "landlock": landlock.kernel_version(),
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
    }


def become(user: int) -> None:
    """Change this process to a user who can read the files of root, because Python may be among them."""
    libc = ctypes.CDLL(None)
    libc.prctl(8, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    read = seccomp.DAC_READ_SEARCH
    libc.capset(seccomp.CAPABILITY_HEADER, struct.pack("6I", read, read, read, 0, 0, 0))
    libc.prctl(47, 2, 2, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--user", type=int, help="run as this user; needs root")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.user is not None and os.getuid() != options.user:
        become(options.user)
        os.environ["HOME"] = "/tmp"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    seccomp.hide_memory()
    result = {**run(options.count, options.seed), "system": platform.platform(), "python": platform.python_version()}
    text = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(f"{text}\n")
    print(text)
    sys.exit(bool(result["effects"]))


if __name__ == "__main__":
    main()
