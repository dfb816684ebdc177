"""Processes of a run: records in its directory, by which other commands see, from any machine, whether it runs.

runs/<name>/processes/
  launcher.json   of a run that Ray or torchrun started
  rank_0.json …   one per rank
  stop.json       request of `quintet stop`; obeyed by the launcher or, without Ray, by rank 0

A process updates the time of its record every few seconds, so that a lost machine is noticed as well.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from quintet.contained_files import read_contained
from quintet.errors import MachineError
from quintet.tracking.atomic_files import translate_os_errors, write_atomic

HEARTBEAT_SECONDS = 5.0
"""Interval at which a process updates the time of its record."""
LOST_SECONDS = 60.0
"""A process of another machine whose record is older is lost."""
LAUNCHED_BY_RAY = "QUINTET_LAUNCHED_BY_RAY"
"""Environment variable of ranks whose launcher obeys requests to stop."""

MAX_PID = 1 << 22
"""Largest process ID of Linux."""
_own_records: dict[Path, BinaryIO] = {}
"""Records of this process, which it keeps open; see `ProcessRecord.kill`."""

ProcessState = Literal["running", "suspended", "ended"]
"""Suspended is for example by SIGSTOP."""
Outcome = Literal["ended", "stopped", "failed"]


@cache
def process_namespace() -> str:
    """Return an identifier of the PID namespace: host, boot and container."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # a system without /proc has no containers either
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """State of a process of this machine."""

    letter: str
    """State as in `ps`; `Z` has ended, `T` is suspended."""
    start_ticks: int
    """Start time in clock ticks since the machine booted: it differs for a later process with the same number."""

    @classmethod
    def of(cls, pid: int) -> ProcessStat | None:
        """Return the state; None if there is no such process, or on a system without /proc."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return cls(fields[0].decode(), int(fields[19]))
        except (OSError, IndexError):
            return None


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A process of a run, and how it ended."""

    role: str
    """`rank N`, with its components if they differ; `Ray launcher` or `torchrun`."""
    host: str
    pid: int
    namespace: str
    """PID namespace, see `process_namespace`."""
    start_ticks: int | None
    """Start time, see `ProcessStat`; None on a system without /proc."""
    size: int = 1
    """Number of ranks of the run."""
    outcome: Outcome | None = None
    """How it ended; None while it runs, and if it was killed."""
    message: str = ""
    """First line of its error message."""

    @classmethod
    def of(cls, pid: int, role: str, size: int) -> RunProcess:
        """Describe a process of this machine."""
        stat = ProcessStat.of(pid)
        return cls(role, socket.gethostname(), pid, process_namespace(), stat.start_ticks if stat else None, size)

    @property
    def is_local(self) -> bool:
        """Whether the process is in this PID namespace, so that its number has a meaning here."""
        return self.namespace == process_namespace()

    def local_state(self) -> ProcessState:
        """Return the state of a local process."""
        stat = ProcessStat.of(self.pid)
        if stat is None or stat.letter == "Z" or stat.start_ticks != self.start_ticks:
            return "running" if self.start_ticks is None and _exists(self.pid) else "ended"
        return "suspended" if stat.letter in ("T", "t") else "running"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """File that describes a process of a run."""

    path: Path
    process: RunProcess
    age_seconds: float
    """Time since the process has updated its record."""

    @property
    def state(self) -> ProcessState:
        """State of the process; of one on another machine, after its record."""
        if self.process.outcome is not None:
            return "ended"
        if self.process.is_local:
            return self.process.local_state()
        return "running" if self.age_seconds < LOST_SECONDS else "ended"

    def kill(self) -> None:
        """Kill a local process, if it is the one that has written this record.

        The record may come from somebody else and name any process. So the process must have the owner of the record,
        must have started at that time, and must have the record open.
        """
        if not self.process.is_local or self.process.start_ticks is None:
            return
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.process.pid)
            try:
                if self.process.local_state() != "ended" and self._is_open_in(Path(f"/proc/{self.process.pid}")):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)

    def _is_open_in(self, process: Path) -> bool:
        """Return whether a process has the record open, and the same owner as it."""
        with suppress(OSError):  # a process of another owner, or one that has ended
            record = self.path.lstat()
            return process.stat().st_uid == record.st_uid and any(
                os.path.samestat(record, opened.stat()) for opened in (process / "fd").iterdir()
            )
        return False


@dataclass(frozen=True, slots=True)
class RunProcesses:
    """Directory with the records of a run's processes."""

    path: Path

    @property
    def stop_request(self) -> Path:
        return self.path / "stop.json"

    @property
    def launcher(self) -> Path:
        return self.path / "launcher.json"

    def rank(self, number: int) -> Path:
        """Return the record of a rank."""
        return self.path / f"rank_{number}.json"

    def process_of(self, rank: int) -> RunProcess | None:
        """Return the record of a rank's process; None if there is no record, or if it is damaged."""
        record = read_record(self.rank(rank))
        return None if record is None else record.process

    def write(self, path: Path, process: RunProcess) -> None:
        """Write the record of a process.

        Raises:
            MachineError: it cannot be written.
        """
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(process), indent=1).encode())
        if process.pid == os.getpid():
            self._keep_open(path)

    @staticmethod
    def _keep_open(path: Path) -> None:
        """Keep the record of this process open: it proves that the process is the one of the record."""
        with translate_os_errors(path):
            file = path.open("rb")
        if former := _own_records.pop(path, None):
            former.close()
        _own_records[path] = file

    def end(self, path: Path, outcome: Outcome, message: str = "") -> None:
        """Record how a process ended, unless another one has taken its place."""
        record = read_record(path)
        if record is not None and record.process.pid == os.getpid():
            self.write(path, replace(record.process, outcome=outcome, message=message.partition("\n")[0]))
            _own_records.pop(path).close()

    def records(self) -> tuple[ProcessRecord | None, list[ProcessRecord]]:
        """Return the records of the launcher, if there is one, and of the ranks."""
        ranks = [record for path in self.path.glob("rank_*.json") if (record := read_record(path))]
        size = next((record.process.size for record in ranks if record.path == self.rank(0)), 0)
        current = {record.path: number for record in ranks if (number := _rank_of(record.path)) < size}
        ranks = [record for record in ranks if record.path in current]  # others are of an earlier start
        return read_record(self.launcher), sorted(ranks, key=lambda record: current[record.path])

    def request_stop(self, *, now: bool) -> None:
        """Ask the run to end: after its current step, or now.

        Raises:
            MachineError: the request cannot be written.
        """
        write_atomic(self.stop_request, json.dumps({"now": now}).encode())

    def read_stop_request(self) -> Literal["after step", "now"] | None:
        """Return the request, None if there is none."""
        try:
            return "now" if json.loads(_read(self.stop_request))["now"] else "after step"
        except (OSError, ValueError, KeyError, TypeError, RecursionError, MachineError):
            return None

    def clear(self) -> None:
        """Remove everything of an earlier start."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        yield from (self.stop_request, self.launcher)
        yield from self.path.glob("rank_*.json")


def read_record(path: Path) -> ProcessRecord | None:
    """Return the record in a file; None if there is none, or if it is damaged."""
    from pydantic import TypeAdapter

    try:
        age = time.time() - path.stat().st_mtime
        process = TypeAdapter(RunProcess).validate_json(_read(path))
        return ProcessRecord(path, process, age) if 0 < process.pid <= MAX_PID else None
    except (OSError, ValueError, MachineError):
        return None


def _read(path: Path) -> bytes:
    """Return a file of the directory of processes, unless it leaves the run's directory."""
    run = path.parent.parent
    return read_contained(run, path.relative_to(run))


def _rank_of(path: Path) -> int | float:
    """Return the rank in the name of a record; infinite for other names."""
    number = path.stem.removeprefix("rank_")
    return int(number) if re.fullmatch("[0-9]{1,9}", number) else math.inf
