"""Checkpoints written in a background thread while training continues.

A thread writes files from copies of the tensors. One checkpoint is written at a time: the next `save` waits for the
previous one. Each rank writes its own files into the same staging directory, which all ranks must be able to reach;
the first rank writes the manifest once the others are done.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from quintet.errors import MachineError
from quintet.training.checkpoint.checkpoint import create_staging_directory, finish_checkpoint, staging_directory

WriteFiles = Callable[[Path], None]
"""Function that writes files into a checkpoint's staging directory."""
POLL_SECONDS = 0.02
RANK_STATUS_DIRECTORY = ".parts"
"""Directory of the other ranks' status files `<name>.written` or `<name>.failed`, with the reason. They exist under
another name from the beginning, so that they can be reported even if the disk is full."""


class AsyncCheckpointer:
    """Writer of one run's checkpoints, on the first rank."""

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        other_ranks: Sequence[str] = (),
        publish: Callable[[Path], None] | None = None,
        timeout_seconds: float = 1800.0,
        check_alive: Callable[[], None] | None = None,
    ) -> None:
        """The ranks called `other_ranks` write shards of their own; after its own files are written, this rank waits
        `timeout_seconds` for them, unless `check_alive` raises because a rank has died. `publish(directory)` is
        called in the background with each complete checkpoint."""
        self._root = root
        self._keep = keep
        self._other_ranks = other_ranks
        self._publish = publish
        self._timeout = timeout_seconds
        self._check_alive = check_alive
        self._writer = _Writer()

    def save(
        self,
        step: int,
        state: dict[str, Any],
        copy: Callable[[Path], WriteFiles],
        *,
        root: Path | None = None,
        delete: Path | None = None,
    ) -> None:
        """Start writing the checkpoint of `step`. `copy(directory)` copies the tensors and returns a function that
        writes them into that directory; `state` is stored as JSON. Checkpoints in another `root` are not published.
        The directory `delete` is deleted once this checkpoint is complete.

        Raises:
            Exception: writing the previous checkpoint failed.
        """
        self.wait()
        root = root or self._root
        staging = create_staging_directory(root, step)
        if self._other_ranks:
            (staging / RANK_STATUS_DIRECTORY).mkdir()
        self._writer.start(partial(self._write, root, step, deepcopy(state), copy(staging), delete))

    def publish(self, directory: Path) -> None:
        """Start publishing a complete checkpoint that an earlier run has not published.

        Raises:
            Exception: writing the previous checkpoint failed.
        """
        self.wait()
        if self._publish is not None:
            self._writer.start(partial(self._publish, directory))

    def wait(self) -> None:
        """Wait until the current checkpoint is complete.

        Raises:
            Exception: writing it failed.
        """
        self._writer.wait()

    def close(self) -> None:
        """End the thread after the current checkpoint; its errors are not reported."""
        self._writer.close()

    def _write(self, root: Path, step: int, state: dict[str, Any], write: WriteFiles, delete: Path | None) -> None:
        staging = staging_directory(root, step)
        try:
            write(staging)
            if self._other_ranks:
                self._wait_for_other_ranks(staging / RANK_STATUS_DIRECTORY)
            final = finish_checkpoint(root, step, state, keep=self._keep, delete=delete)
        except BaseException:  # also an interrupt leaves no staging directory
            if not self._other_ranks:  # otherwise they may still be writing there
                shutil.rmtree(staging, ignore_errors=True)
            raise
        if self._publish is not None and root == self._root:
            self._publish(final)

    def _wait_for_other_ranks(self, status: Path) -> None:
        """Wait until the other ranks have written their shards.

        Raises:
            MachineError: a rank failed to write, or did not finish in time.
        """
        end = time.monotonic() + self._timeout
        for rank in self._other_ranks:
            written, failed = (status / f"{rank}.{outcome}" for outcome in ("written", "failed"))
            while not written.exists():
                if failed.exists():
                    raise MachineError(
                        f"rank {rank} could not write its part of the checkpoint: {failed.read_text(encoding='utf-8')}"
                    )
                if self._check_alive is not None:
                    self._check_alive()
                if time.monotonic() > end:
                    problem = f"rank {rank} did not write its part of the checkpoint within {self._timeout:g} s"
                    hint = "check that the rank is running and that all ranks have the same checkpoint directory"
                    raise MachineError(problem, hint)
                time.sleep(POLL_SECONDS)
            written.unlink()
        status.rmdir()


class AsyncShardWriter:
    """Writer of this rank's shards of each checkpoint, on all ranks but the first."""

    def __init__(self, rank: str) -> None:
        """`rank` is the name by which the first rank knows this one."""
        self._rank = rank
        self._writer = _Writer()

    def save(self, staging: Path, write: WriteFiles) -> None:
        """Start writing into the first rank's staging directory.

        Raises:
            Exception: writing the previous checkpoint failed.
        """
        self._writer.wait()
        self._writer.start(partial(self._write, staging, write))

    def wait(self) -> None:
        """Wait until the current shards are written.

        Raises:
            Exception: writing them failed.
        """
        self._writer.wait()

    def _write(self, staging: Path, write: WriteFiles) -> None:
        status = staging / RANK_STATUS_DIRECTORY / f".{self._rank}"
        status.touch()
        try:
            write(staging)
        except BaseException as error:  # reported to the first rank, whatever it is
            with suppress(OSError):
                status.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            status.rename(status.with_name(f"{self._rank}.failed"))
            raise
        status.rename(status.with_name(f"{self._rank}.written"))


class _Writer:
    """A thread with one job at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        self._pending = self._thread.submit(work)

    def wait(self) -> None:
        if self._pending is not None:
            future, self._pending = self._pending, None
            future.result()

    def close(self) -> None:
        self._thread.shutdown()
