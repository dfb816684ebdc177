"""Profiles of training steps on one rank: spans, memory over time, `torch.profiler`, and snapshots of GPU memory."""

from __future__ import annotations

import logging
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from quintet.config.native.tracking import ProfileConfig, TorchProfilerConfig
from quintet.trace import TraceRecorder

logger = logging.getLogger(__name__)
SAMPLE_SECONDS = 0.1
"""Time between two values of the memory in a trace."""
SNAPSHOT_EVENTS = 100_000
"""Allocations that a snapshot of GPU memory has at most, the number that verl and ROLL record."""


class RankProfiler:
    """Records the profiles of a rank, see `ProfileConfig`."""

    def __init__(self, config: ProfileConfig, directory: Path, rank: int) -> None:
        self._config, self._directory, self._rank = config, directory, rank
        self._torch: profile | None = None
        self._recorder: TraceRecorder | None = None
        self._memory: _MemorySampler | None = None

    def start(self, step: int) -> None:
        """Record a step or, if it is not profiled itself, warm `torch.profiler` up for the next one."""
        covers = self._config.covers(step)
        if self._torch is not None:
            self._torch.step()  # from warm-up to recording
        elif self._config.torch is not None:
            self._torch = build_torch_profiler(self._config.torch, warmup=not covers)
            self._torch.start()
        if covers:
            annotate = None if self._torch is None else record_function
            self._recorder = TraceRecorder(self._rank, f"rank {self._rank}", annotate)
            self._memory = _MemorySampler(self._recorder)
            self._recorder.start()
            if self._config.memory_snapshot:
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=SNAPSHOT_EVENTS)

    def stop(self, step: int) -> None:
        """End the recording of a step and write its files; the run continues if they cannot be written."""
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        recorder.stop()
        if self._memory is not None:
            self._memory.stop()
        path = self._directory / f"step_{step:06d}_rank_{self._rank}.json"
        try:
            if self._config.trace:
                recorder.write(path, step=step, rank=self._rank)
            if self._torch is not None:
                self._torch.stop()
                _export(self._torch.export_chrome_trace, path.with_suffix(".torch.json.gz"))
            if self._config.memory_snapshot:
                _export(torch.cuda.memory._dump_snapshot, path.with_suffix(".memory.pickle"))
        except OSError as error:
            logger.warning("the profile of step %d is not written: %s", step, error)
        self._end_memory_history()
        self._torch = None

    def _end_memory_history(self) -> None:
        if self._config.memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        """Discard the current recording."""
        if self._recorder is not None:
            self._recorder.stop()
            self._end_memory_history()
        if self._memory is not None:
            self._memory.stop()
        if self._torch is not None:
            with suppress(RuntimeError):
                self._torch.stop()
        self._recorder = self._memory = self._torch = None


def _export(write: Callable[[str], object], path: Path) -> None:
    """Write a file with a function of PyTorch; it gets its final name when it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp_{path.name}")
    write(str(temporary))
    temporary.replace(path)


def build_torch_profiler(config: TorchProfilerConfig, *, warmup: bool) -> profile:
    """Return a profiler that records at once or, with `warmup`, after its first `step`."""
    available = {"cpu": ProfilerActivity.CPU}
    if torch.cuda.is_available():
        available["cuda"] = ProfilerActivity.CUDA
    actions = [ProfilerAction.WARMUP, ProfilerAction.RECORD_AND_SAVE][0 if warmup else 1 :]
    return profile(
        activities=[available[name] for name in config.activities if name in available],
        schedule=lambda number: actions[min(number, len(actions) - 1)],
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
        with_flops=config.with_flops,
        with_modules=config.with_modules,
    )


class _MemorySampler:
    """Thread that records the memory of this process and of its GPU."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder, self._stopped = recorder, threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="memory samples", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Record the memory a last time and end the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        self._recorder.add_counter("memory, MiB", {"resident": resident_bytes() / (1 << 20)})
        if torch.cuda.is_available():
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            values = {"allocated": allocated / (1 << 20), "reserved": reserved / (1 << 20)}
            self._recorder.add_counter("GPU memory, MiB", values)


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; on other systems than Linux, its maximum so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return pages * resource.getpagesize()
