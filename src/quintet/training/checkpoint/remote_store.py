"""Copies of checkpoints in a remote store: any fsspec URL, such as `hdfs://…`, `s3://…` or a path.

The manifest of a copy is uploaded last, then the file with the latest step: a copy without a manifest is incomplete,
and copies of later steps belong to an earlier run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quintet.errors import ConfigError, MachineError
from quintet.training.checkpoint.checkpoint import (
    CHECKPOINT_PREFIX,
    LATEST_STEP_FILE,
    MANIFEST_FILE,
    Checkpoint,
    create_staging_directory,
    find_damage,
    move_into_place,
    read_checkpoint,
)

PROBE_FILE = ".writable"


def open_file_system(url: str, key: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it; `key` is the config key of the URL.

    Raises:
        ConfigError: fsspec does not support the URL.
    """
    import fsspec  # type: ignore[import-untyped]

    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        hint = f"use a URL that fsspec supports, install the package that it names, or leave {key} out"
        raise ConfigError(f"{key} = {url}: not supported by fsspec: {error}", key=key, value=url, hint=hint) from error
    return file_system, str(path).rstrip("/")


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """Copies of a run's checkpoints at a URL."""

    url: str
    key: str
    """Config key of the URL."""
    file_system: Any
    path: str

    @classmethod
    def from_url(cls, url: str, key: str = "checkpoint.remote_dir") -> RemoteStore:
        """Return the store at a URL.

        Raises:
            ConfigError: fsspec does not support the URL.
        """
        return cls(url, key, *open_file_system(url, key))

    def check_writable(self) -> None:
        """Write and delete a probe file.

        Raises:
            MachineError: the store cannot be reached or written.
        """
        probe = f"{self.path}/{PROBE_FILE}"
        with self._errors("write to"):
            self.file_system.makedirs(self.path, exist_ok=True)
            self.file_system.pipe_file(probe, b"\0")
        with suppress(OSError):  # some stores forbid deletion, which copies do not need
            self.file_system.rm_file(probe)

    def upload(self, directory: Path) -> None:
        """Upload a complete checkpoint, and then its step.

        Raises:
            MachineError: the upload failed; the local checkpoint is intact.
        """
        target = f"{self.path}/{directory.name}"
        names = list(json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8")))
        with self._errors(f"copy {directory} to"):
            if self.file_system.exists(target):
                self.file_system.rm(target, recursive=True)
            for name in (*names, MANIFEST_FILE):
                remote = f"{target}/{name}"
                self.file_system.makedirs(remote.rpartition("/")[0], exist_ok=True)
                self.file_system.put_file(str(directory / name), remote)
            self.file_system.pipe_file(
                f"{self.path}/{LATEST_STEP_FILE}", directory.name.removeprefix(CHECKPOINT_PREFIX).encode()
            )

    def contains(self, directory: Path) -> bool:
        """Return whether the store has a complete copy of exactly this checkpoint.

        Raises:
            MachineError: the store cannot be read.
        """
        manifest = f"{self.path}/{directory.name}/{MANIFEST_FILE}"
        with self._errors("read"):
            remote: bytes | None = self.file_system.cat_file(manifest) if self.file_system.exists(manifest) else None
        return remote == (directory / MANIFEST_FILE).read_bytes()

    def check_is_not(self, root: Path) -> None:
        """Check that copies do not overwrite the run's own checkpoints.

        Raises:
            ConfigError: the URL is the run's checkpoint directory `root`.
        """
        if self._is_local and Path(self.path).resolve() == root.resolve():
            hint = f"name another directory, or leave {self.key} out: the run's checkpoints are in {root} in any case"
            message = f"{self.key} = {self.url} is the run's own checkpoint directory"
            raise ConfigError(message, key=self.key, value=self.url, hint=hint)

    @property
    def _is_local(self) -> bool:
        return "file" in ((protocol,) if isinstance(protocol := self.file_system.protocol, str) else protocol)

    def download_latest(self, root: Path, reject: Callable[[Path, str], None]) -> Checkpoint | None:
        """Download the newest intact checkpoint into `root`; `reject(directory, reason)` is called for each newer one.
        Return None if there is none.

        Raises:
            MachineError: the store cannot be read.
        """
        for step in self._steps():
            staging = create_staging_directory(root, step)
            with self._errors(f"read {CHECKPOINT_PREFIX}{step} from"):
                damage = self._download(f"{self.path}/{CHECKPOINT_PREFIX}{step}", staging)
            damage = damage or find_damage(staging)
            if damage is None:
                return read_checkpoint(move_into_place(root, staging, step))
            shutil.rmtree(staging)
            reject(root / f"{CHECKPOINT_PREFIX}{step}", damage)
        return None

    def _steps(self) -> list[int]:
        """Return the steps of copies, newest first, up to the latest step: later ones belong to an earlier run."""
        with self._errors("read"):
            paths = self.file_system.ls(self.path, detail=False) if self.file_system.exists(self.path) else []
            latest = f"{self.path}/{LATEST_STEP_FILE}"
            last_step = self.file_system.cat_file(latest).decode().strip() if self.file_system.exists(latest) else ""
        names = (str(path).rstrip("/").rpartition("/")[2] for path in paths)
        numbers = (name.removeprefix(CHECKPOINT_PREFIX) for name in names if name.startswith(CHECKPOINT_PREFIX))
        steps = sorted((int(number) for number in numbers if number.isdigit()), reverse=True)
        return [step for step in steps if step <= int(last_step)] if last_step.isdigit() else steps

    def _download(self, source: str, target: Path) -> str | None:
        """Download the files of a manifest; return a description of the damage, None if the copy is intact."""
        if not self.file_system.exists(f"{source}/{MANIFEST_FILE}"):
            return "its upload was not completed"
        self.file_system.get_file(f"{source}/{MANIFEST_FILE}", str(target / MANIFEST_FILE))
        try:
            names = list(json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8")))
        except ValueError:
            return "its manifest is unreadable"
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                return f"its manifest names {name}, which is outside the checkpoint"
            if not self.file_system.exists(f"{source}/{name}"):
                return f"{name} is missing"
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.file_system.get_file(f"{source}/{name}", str(target / name))
        return None

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # stores raise exceptions of their own, such as botocore's; other builtin exceptions are bugs
            if type(error).__module__ == "builtins" and not isinstance(error, OSError | ValueError | ImportError):
                raise
            problem = f"cannot {action} {self.url}: {type(error).__name__}: {error}"
            hint = f"rerun the same command when it can be read and written, or leave {self.key} out"
            raise MachineError(problem, hint) from error
