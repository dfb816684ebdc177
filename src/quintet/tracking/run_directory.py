"""Run directory: paths, locking and run state."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quintet.config.composed import ComposedConfig
from quintet.config.key_states import key_states
from quintet.config.native.experiment import Experiment
from quintet.contained_files import check_entries, read_contained
from quintet.errors import MachineError
from quintet.file_formats import check_format, format_fields
from quintet.tracking.atomic_files import open_unlinked, translate_os_errors, writable_hint, write_atomic
from quintet.tracking.run_processes import RunProcess, RunProcesses

logger = logging.getLogger(__name__)
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of file systems that have no locks."""

EPISODE_FOLDERS = ("trajectories", "images", "pictures", "videos")
FINAL_WEIGHTS = ("model", "lora_adapter")
"""Directories with the final weights of fine-tuning."""
EVALUATION_FILES = ("results.json", "answers.jsonl", "episodes.jsonl", "evaluation.yaml", "generations.jsonl")
"""Results of evaluations of the run's model."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run, `runs/<name>/`."""

    path: Path

    @classmethod
    def from_config(cls, experiment: Experiment) -> RunDirectory:
        """Return the directory of an experiment: `output_dir/name`."""
        return cls(Path(experiment.output_dir) / experiment.name)

    @classmethod
    def create_for(cls, composed: ComposedConfig) -> RunDirectory:
        """Create the directory of an experiment and check that it is writable.

        Raises:
            MachineError: It cannot be created or written, or its disk is full; the message names the key.
        """
        directory = cls.from_config(composed.experiment)
        try:
            directory.create()
        except MachineError as error:
            hint = error.hint and composed.hint_for_user(error.hint)
            raise MachineError(f"{composed.describe('output_dir')}: {error.message}", hint) from error
        return directory

    @property
    def config(self) -> Path:
        """Resolved configuration with the source of each value."""
        return self.path / "config.yaml"

    @property
    def keys(self) -> Path:
        """Keys that the user set, with their states."""
        return self.path / "keys.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def warm_start(self) -> Path:
        """Metrics of the warm start, one line per update."""
        return self.path / "warm_start.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def warm_start_checkpoints(self) -> Path:
        """Checkpoints of the warm start, numbered by update; removed once reinforcement learning has its first."""
        return self.path / "warm_start"

    @property
    def policy(self) -> Path:
        """Policy as a Hugging Face directory."""
        return self.path / "policy"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def state(self) -> Path:
        return self.path / "run.json"

    @property
    def progress(self) -> Path:
        return self.path / "progress.json"

    @property
    def logs(self) -> Path:
        """Output of the ranks that do not print."""
        return self.path / "logs"

    @property
    def profile(self) -> Path:
        """Profiles of training steps."""
        return self.path / "profile"

    @property
    def processes(self) -> RunProcesses:
        return RunProcesses(self.path / "processes")

    def trajectories(self, split: Literal["train", "validation"], step: int) -> Path:
        """Return the file with the trajectories of `step`."""
        return self.path / "trajectories" / split / f"step_{step:06d}.jsonl"

    def create(self, required_bytes: int = 1 << 20) -> None:
        """Create the directory and check that it is writable.

        Raises:
            MachineError: It cannot be created or written, fewer than `required_bytes` are free on its disk, or it has
                links out of it, pipes or devices.
        """
        with translate_os_errors(self.path):
            _make(self.path)
            check_entries(self.path)
            free = shutil.disk_usage(self.path).free
            if free < required_bytes:
                raise OSError(errno.ENOSPC, f"{free} bytes free")
        probe = self.path / ".writable"
        write_atomic(probe, b"\0" * 4096)
        probe.unlink()

    def clear(self, *, keep_warm_start: bool = False, keep_fine_tuning: bool = False) -> None:
        """Remove all files of an earlier run with this name; with `keep_warm_start` only those after its warm start,
        with `keep_fine_tuning` only those after the fine-tuning that precedes reinforcement learning.

        Raises:
            MachineError: A file cannot be removed.
        """
        with translate_os_errors(self.path):
            before = (self.policy, self.warm_start_checkpoints, self.warm_start)
            stage = () if keep_fine_tuning else ("sft",)
            folders = (*EPISODE_FOLDERS, *FINAL_WEIGHTS, "profile", *stage)
            after = (self.tensorboard, self.checkpoints, *(self.path / name for name in folders))
            results = [self.path / name for name in EVALUATION_FILES]
            files = (self.metrics, self.report, self.state, self.config, self.keys, self.progress, *results)
            for path in (*after, *files, *(() if keep_warm_start else before)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> None:
        """Write the file `name` in the directory atomically.

        Raises:
            MachineError: The file cannot be written.
        """
        write_atomic(self.path / name, text.encode())

    def write_keys(self, composed: ComposedConfig) -> None:
        """Write the state of each key that the user set.

        Raises:
            MachineError: The file cannot be written.
        """
        states = [each.to_json() for each in key_states(composed)]
        self.write_text(self.keys.name, json.dumps(states, indent=1, default=str) + "\n")

    def write_state(self, status: Literal["running", "finished"], **details: Any) -> None:
        """Write the run state: `status` and further JSON values."""
        self.write_text(
            self.state.name,
            json.dumps({"status": status, **format_fields(), **details}, indent=2, sort_keys=True) + "\n",
        )

    def read_state(self) -> dict[str, Any]:
        """Return the state that `write_state` recorded, empty for a run that has not started.

        Raises:
            MachineError: The file cannot be read, is not a run state, or has a newer format.
        """
        if not self.state.exists():
            return {}
        with translate_os_errors(self.state):
            text = read_contained(self.path, self.state.name)
        try:
            state = json.loads(text)
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise MachineError(f"{self.state} is not a run state", hint="remove the file, or choose another run `name`")
        check_format(state, self.state)
        return state

    @contextmanager
    def lock(self, name: str = ".lock") -> Iterator[None]:
        """Lock the directory for this process by the file `name`; the system releases the lock when the process dies.

        Raises:
            MachineError: Another process holds the lock; the message names its process id.
        """
        path = self.path / name
        with translate_os_errors(path):
            descriptor = open_unlinked(str(path), os.O_RDWR | os.O_CREAT)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            _acquire(file.fileno(), path)
            file.truncate(0)
            owner = RunProcess.of(os.getpid(), "", 1)
            file.write(f"{owner.pid} {owner.start_ticks} {owner.namespace}")
            file.flush()
            yield


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        # raised by kernel file systems such as /proc, where nothing can be created
        raise MachineError(f"cannot create {path} ({error.strerror})", hint=writable_hint()) from error


def _acquire(descriptor: int, path: Path) -> None:
    with translate_os_errors(path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _check_owner(path)


def _check_owner(path: Path) -> None:
    """Check that the process in a lock file has ended, on file systems without locks (some NFS, FUSE and Lustre).

    Raises:
        MachineError: it runs on this machine.
    """
    logger.warning(
        "%s is on a file system without locks: a second run of this name on another machine is not noticed", path.parent
    )
    pid, _, rest = path.read_text(encoding="utf-8").partition(" ")
    start, _, namespace = rest.partition(" ")
    if not pid.isdecimal() or int(pid) == os.getpid():
        return
    owner = RunProcess("", "", int(pid), namespace, int(start) if start.isdecimal() else None)
    if owner.is_local and owner.local_state() != "ended":
        raise _in_use(path)


def _in_use(path: Path) -> MachineError:
    pid = path.read_text(encoding="utf-8").partition(" ")[0]
    return MachineError(
        f"{path.parent} is in use by another run" + (f" (process {pid})" if pid else ""),
        hint="wait for that run, stop it, or choose another `name` for this one",
    )
