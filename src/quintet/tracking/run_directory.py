"""A run's directory: what lies where, whole files or none, one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from quintet.config.compose import Composed
from quintet.config.native import Experiment
from quintet.config.plan.values import told
from quintet.errors import MachineError

__all__ = ["RunDirectory", "machine_errors", "write_atomic"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NOT_A_DIRECTORY = frozenset({errno.ENOTDIR, errno.EEXIST})
_ELSEWHERE = "set `output_dir` to a directory that you can write"


@contextmanager
def machine_errors(path: Path | str) -> Iterator[None]:
    """Turn the operating system's refusals inside the block into one message about `path`.

    Raises:
        MachineError: full disk, no permission, a file where a directory should be, a missing file.
    """
    try:
        yield
    except OSError as error:
        raise _machine_error(Path(path), error) from error
    except SafetensorError as error:
        # its writer tells the system's errors in words alone: "… (os error 28)"
        if number := re.search(r"os error (\d+)", str(error)):
            refused = OSError(int(number[1]), os.strerror(int(number[1])))
            raise _machine_error(Path(path), refused) from error
        raise


def _machine_error(path: Path, error: OSError) -> MachineError:
    if error.errno in _FULL:
        return MachineError(
            f"disk full: can't write {path}",
            hint="free some space there, or set `output_dir` to another disk; the same command then goes on from "
            "the last checkpoint",
        )
    if error.errno in _FORBIDDEN:
        return MachineError(f"no permission to write {path} ({error.strerror})", hint=_ELSEWHERE)
    if error.errno in _NOT_A_DIRECTORY:
        return MachineError(f"{path} can't be a directory: there is a file in its way", hint=_ELSEWHERE)
    if error.errno == errno.ENOENT:
        return MachineError(f"no such file: {error.filename or path}", hint="check the path")
    return MachineError(f"{path}: {error.strerror or error}")


def write_atomic(path: Path, data: bytes) -> None:
    """Write the whole file or leave the old one: a temporary neighbour, flushed to disk, renamed in.

    Raises:
        MachineError: the machine refuses; no temporary file stays behind.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with machine_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """A rename survives a power cut only once the directory itself is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run, `runs/<name>/`."""

    path: Path

    @classmethod
    def of(cls, experiment: Experiment) -> RunDirectory:
        """The directory of an experiment: `output_dir/name`."""
        return cls(Path(experiment.output_dir) / experiment.name)

    @classmethod
    def made(cls, composed: Composed) -> RunDirectory:
        """The same, made and proven to be writable; what is in the way is told by the key that names the place.

        Raises:
            MachineError: it can't be made or written, or its disk is full.
        """
        directory = cls.of(composed.experiment)
        try:
            directory.create()
        except MachineError as error:
            raise MachineError(f"{told(composed, 'output_dir')}: {error.message}", error.hint) from error
        return directory

    @property
    def config(self) -> Path:
        """The resolved configuration, with where each value came from."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def warm_start(self) -> Path:
        """Metrics of the supervised start, one line an update."""
        return self.path / "warm_start.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policy(self) -> Path:
        """The policy as a Hugging Face directory."""
        return self.path / "policy"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def state(self) -> Path:
        return self.path / "run.json"

    def trajectories(self, split: Literal["train", "validation"], step: int) -> Path:
        """Where the games of that step lie."""
        return self.path / "trajectories" / split / f"step_{step:06d}.jsonl"

    def create(self, needed_bytes: int = 1 << 20) -> None:
        """Make the directory and prove that it can be written.

        Raises:
            MachineError: it can't be made or written, or fewer than `needed_bytes` are free on its disk.
        """
        with machine_errors(self.path):
            _make(self.path)
            free = shutil.disk_usage(self.path).free
            if free < needed_bytes:
                raise OSError(errno.ENOSPC, f"{free} bytes free")
        probe = self.path / ".writable"
        write_atomic(probe, b"\0" * 4096)
        probe.unlink()

    def forget(self) -> None:
        """Remove everything that an earlier run of this name left.

        Raises:
            MachineError: the machine refuses.
        """
        with machine_errors(self.path):
            for path in (self.tensorboard, self.checkpoints, self.policy, self.path / "trajectories"):
                if path.exists():
                    shutil.rmtree(path)
            for path in (self.metrics, self.warm_start, self.report, self.state, self.config):
                path.unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> None:
        """Write the file `name` in the directory, whole or not at all.

        Raises:
            MachineError: the machine refuses.
        """
        write_atomic(self.path / name, text.encode())

    def write_state(self, status: Literal["running", "finished"], **details: Any) -> None:
        """Record how far the run is, with JSON values of the caller's choice beside it."""
        self.write_text(self.state.name, json.dumps({"status": status, **details}, indent=2, sort_keys=True) + "\n")

    def read_state(self) -> dict[str, Any]:
        """What `write_state` recorded; empty for a run that has not begun.

        Raises:
            MachineError: the file can't be read or was written by something else.
        """
        if not self.state.exists():
            return {}
        with machine_errors(self.state):
            text = self.state.read_text()
        try:
            state = json.loads(text)
        except ValueError:
            state = None
        if not isinstance(state, dict):
            raise MachineError(f"{self.state} is not a run's state", hint="remove it, or choose another run name")
        return state

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; the system lets go of it when the process dies.

        Raises:
            MachineError: another process holds it; the message names its process id.
        """
        path = self.path / ".lock"
        with machine_errors(path):
            file = path.open("a+")
        with file:
            _acquire(file.fileno(), path)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        # of a place where there is nothing yet, as the kernel's own file systems say it
        raise MachineError(f"{path} can't be made ({error.strerror})", hint=_ELSEWHERE) from error


def _acquire(descriptor: int, path: Path) -> None:
    with machine_errors(path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text().strip()
            raise MachineError(
                f"{path.parent} is in use by another run" + (f" (process {holder})" if holder else ""),
                hint="wait for it, stop it, or give this run another `name`",
            ) from None
