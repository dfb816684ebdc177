"""Checkpoints written in the background while training goes on.

`save` is given a function that writes from copies; a thread calls it. One checkpoint is written at a time: the next
`save` waits for the one before. Of several ranks each writes its own files into the same staging directory, which all
of them must reach; the first makes the manifest once the others are through.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from quintet.errors import MachineError
from quintet.training.checkpoint import complete, stage, staging_directory

__all__ = ["PartSaver", "Saver", "Write"]

Write = Callable[[Path], None]
"""Puts files into a checkpoint's staging directory."""
LOOK_SECONDS = 0.02
PARTS = ".parts"
"""Directory of the other ranks' words, beside what they wrote: `<rank>.written` or `<rank>.failed`, which says why.
They lie there from the beginning under another name, so that a full disk can't keep them back."""


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        others: int = 0,
        publish: Callable[[Path], None] | None = None,
        timeout_seconds: float = 1800.0,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`others` are the ranks that write parts of their own, and `timeout_seconds` is how long they are waited for
        once this one's are written, unless `check` raises: one has ended. `publish(directory)` is called with each
        whole checkpoint, in the background too."""
        self._root = root
        self._keep = keep
        self._others = others
        self._publish = publish
        self._timeout = timeout_seconds
        self._check = check
        self._writer = _Writer()

    def save(
        self, step: int, state: dict[str, Any], copy: Callable[[Path], Write], *, without: Path | None = None
    ) -> None:
        """Begin the checkpoint of `step`: `copy(directory)` takes copies of what it is to hold, and gives what writes
        them into that directory; `state` is stored as JSON. `without` is a checkpoint that goes once this one is
        whole.

        Raises:
            Exception: what went wrong with the checkpoint before.
        """
        self.wait()
        staging = stage(self._root, step)
        if self._others:
            (staging / PARTS).mkdir()
        self._writer.begin(partial(self._write, step, deepcopy(state), copy(staging), without))

    def publish(self, directory: Path) -> None:
        """Begin to hand a whole checkpoint on that wasn't, in an earlier run.

        Raises:
            Exception: what went wrong with the checkpoint before.
        """
        self.wait()
        if self._publish is not None:
            self._writer.begin(partial(self._publish, directory))

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole.

        Raises:
            Exception: what went wrong with it.
        """
        self._writer.wait()

    def close(self) -> None:
        """End the thread once it has written what it writes; faults aren't told any more."""
        self._writer.close()

    def _write(self, step: int, state: dict[str, Any], write: Write, without: Path | None) -> None:
        staging = staging_directory(self._root, step)
        try:
            write(staging)
            if self._others:
                self._gather_parts(staging / PARTS)
            final = complete(self._root, step, state, keep=self._keep, without=without)
        except BaseException:
            if not self._others:  # they may be writing there still
                shutil.rmtree(staging, ignore_errors=True)
            raise
        if self._publish is not None:
            self._publish(final)

    def _gather_parts(self, parts: Path) -> None:
        """Wait for what the other ranks say of theirs.

        Raises:
            MachineError: one couldn't write, or says nothing.
        """
        end = time.monotonic() + self._timeout
        for rank in range(1, self._others + 1):
            written, failed = (parts / f"{rank}.{word}" for word in ("written", "failed"))
            while not written.exists():
                if failed.exists():
                    raise MachineError(f"rank {rank} couldn't write its part of the checkpoint: {failed.read_text()}")
                if self._check is not None:
                    self._check()
                if time.monotonic() > end:
                    hint = "is it alive, and is the checkpoints' directory the same for all ranks?"
                    raise MachineError(f"rank {rank} hasn't written its part within {self._timeout:g} s", hint)
                time.sleep(LOOK_SECONDS)
            written.unlink()
        parts.rmdir()


class PartSaver:
    """Writes another rank's part of each checkpoint."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._writer = _Writer()

    def save(self, staging: Path, write: Write) -> None:
        """Begin to write into a staging directory of the first rank's.

        Raises:
            Exception: what went wrong with the checkpoint before.
        """
        self._writer.wait()
        self._writer.begin(partial(self._write, staging, write))

    def wait(self) -> None:
        """Until it is written.

        Raises:
            Exception: what went wrong with it.
        """
        self._writer.wait()

    def _write(self, staging: Path, write: Write) -> None:
        word = staging / PARTS / f".{self._rank}"
        word.touch()
        try:
            write(staging)
        except BaseException as error:
            with suppress(OSError):
                word.write_text(f"{type(error).__name__}: {error}")
            word.rename(word.with_name(f"{self._rank}.failed"))
            raise
        word.rename(word.with_name(f"{self._rank}.written"))


class _Writer:
    """A thread that does one thing at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        self._under_way = self._thread.submit(work)

    def wait(self) -> None:
        if self._under_way is not None:
            future, self._under_way = self._under_way, None
            future.result()

    def close(self) -> None:
        self._thread.shutdown()
