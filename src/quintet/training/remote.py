"""Checkpoints in another store: any address that fsspec knows, such as `hdfs://…`, `s3://…` or a path.

A copy's manifest is written last, and then its step beside all of them: without a manifest a copy isn't there, and
copies of later steps than that one are an earlier run's. Nothing but a probe is ever removed from such a store.
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
from quintet.training.checkpoint import (
    LATEST,
    MANIFEST,
    NAME,
    Checkpoint,
    fault,
    put_in_place,
    read_checkpoint,
    stage,
)

__all__ = ["RemoteStore", "file_system"]

PROBE = ".writable"


def file_system(url: str, key: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path there; `key` is where the address was configured.

    Raises:
        ConfigError: nobody knows such an address here.
    """
    import fsspec  # type: ignore[import-untyped]

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        hint = f"install what it names, or leave {key} out and copy by hand"
        raise ConfigError(f"{key} = {url}: can't write there: {error}", key=key, value=url, hint=hint) from error
    return system, str(path).rstrip("/")


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """The checkpoints of a run at an address."""

    url: str
    system: Any
    path: str

    @classmethod
    def of(cls, url: str, key: str = "checkpoint.remote_dir") -> RemoteStore:
        """The store at that address.

        Raises:
            ConfigError: nobody knows such an address here.
        """
        return cls(url, *file_system(url, key))

    def prove(self) -> None:
        """See that something can be written there.

        Raises:
            MachineError: the store refuses, or isn't reached.
        """
        probe = f"{self.path}/{PROBE}"
        with self._errors("write to"):
            self.system.makedirs(self.path, exist_ok=True)
            self.system.pipe_file(probe, b"\0")
        with suppress(OSError):  # some let nobody remove anything, which no copy needs
            self.system.rm_file(probe)

    def put(self, directory: Path) -> None:
        """Copy a whole checkpoint there, and then its step.

        Raises:
            MachineError: the store refuses; the checkpoint lies where it lay.
        """
        target = f"{self.path}/{directory.name}"
        names = list(json.loads((directory / MANIFEST).read_text()))
        with self._errors(f"copy {directory} to"):
            if self.system.exists(target):
                self.system.rm(target, recursive=True)
            for name in (*names, MANIFEST):
                place = f"{target}/{name}"
                self.system.makedirs(place.rpartition("/")[0], exist_ok=True)
                self.system.put_file(str(directory / name), place)
            self.system.pipe_file(f"{self.path}/{LATEST}", directory.name.removeprefix(NAME).encode())

    def has(self, directory: Path) -> bool:
        """Whether that very checkpoint lies there as a whole.

        Raises:
            MachineError: the store can't be read.
        """
        manifest = f"{self.path}/{directory.name}/{MANIFEST}"
        with self._errors("read"):
            there: bytes | None = self.system.cat_file(manifest) if self.system.exists(manifest) else None
        return there == (directory / MANIFEST).read_bytes()

    def refuse_own(self, root: Path, key: str = "checkpoint.remote_dir") -> None:
        """See that copies don't take the place of what is copied.

        Raises:
            ConfigError: the address is that of the checkpoints themselves.
        """
        if self._is_local and Path(self.path).resolve() == root.resolve():
            hint = f"name another place, or leave {key} out: the run's own checkpoints lie there in any case"
            raise ConfigError(f"{key} = {self.url}: that is {root} itself", key=key, value=self.url, hint=hint)

    @property
    def _is_local(self) -> bool:
        return "file" in ((kind,) if isinstance(kind := self.system.protocol, str) else kind)

    def fetch(self, root: Path, reject: Callable[[Path, str], None]) -> Checkpoint | None:
        """The newest checkpoint that comes whole, copied into `root`; `reject(directory, reason)` hears of every newer
        one. None where there is none.

        Raises:
            MachineError: the store can't be read.
        """
        for step in self._steps():
            staging = stage(root, step)
            with self._errors(f"read {NAME}{step} from"):
                found = self._copy(f"{self.path}/{NAME}{step}", staging)
            found = found or fault(staging)
            if found is None:
                return read_checkpoint(put_in_place(root, staging, step))
            shutil.rmtree(staging)
            reject(root / f"{NAME}{step}", found)
        return None

    def _steps(self) -> list[int]:
        """Newest first, but those beyond the one that was copied last: another run's that began anew here."""
        with self._errors("read"):
            listed = self.system.ls(self.path, detail=False) if self.system.exists(self.path) else []
            latest = f"{self.path}/{LATEST}"
            last = self.system.cat_file(latest).decode().strip() if self.system.exists(latest) else ""
        names = (str(path).rstrip("/").rpartition("/")[2] for path in listed)
        numbers = (name.removeprefix(NAME) for name in names if name.startswith(NAME))
        steps = sorted((int(number) for number in numbers if number.isdigit()), reverse=True)
        return [step for step in steps if step <= int(last)] if last.isdigit() else steps

    def _copy(self, source: str, target: Path) -> str | None:
        """Copy what its manifest names; what was wrong with that."""
        if not self.system.exists(f"{source}/{MANIFEST}"):
            return "it was never copied as a whole"
        self.system.get_file(f"{source}/{MANIFEST}", str(target / MANIFEST))
        try:
            names = list(json.loads((target / MANIFEST).read_text()))
        except ValueError:
            return "its manifest is unreadable"
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                return f"its manifest names {name}, which lies elsewhere"
            if not self.system.exists(f"{source}/{name}"):
                return f"{name} is missing"
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.system.get_file(f"{source}/{name}", str(target / name))
        return None

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # stores have exceptions of their own, such as botocore's; Python's others are defects of ours
            if type(error).__module__ == "builtins" and not isinstance(error, OSError | ValueError | ImportError):
                raise
            told = f"can't {doing} {self.url}: {type(error).__name__}: {error}"
            raise MachineError(told, "mend that and give the same command again, or leave the address out") from error
