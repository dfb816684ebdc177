"""What surrounds every run: its directory, its clock, its logs, its checkpoints and where it goes on."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config import Composed, dump_config, plan
from quintet.config.native import Experiment, SftConfig
from quintet.pipelines.resuming import starting_point
from quintet.tracking.loggers import LoggerContext, MetricLogger, open_loggers, truncate
from quintet.tracking.progress import Progress, open_progress
from quintet.tracking.run_directory import RunDirectory, machine_errors, write_atomic
from quintet.training.checkpoint import Checkpoint
from quintet.training.remote import RemoteStore
from quintet.training.saving import Saver, Write

if TYPE_CHECKING:
    from rich.console import Console

    from quintet.runtime.conducting import Conductor
    from quintet.runtime.local import Components

__all__ = ["Run", "Timings", "open_run"]

MADE_POLICY_BYTES = 4 << 20
LOG_BYTES = 16 << 20
"""Metrics, games and the report of a run of the usual length."""


class Timings:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        key = f"timing_s/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - started


@dataclass(slots=True)
class Run:
    """One run in its directory."""

    composed: Composed
    directory: RunDirectory
    progress: Progress
    saver: Saver
    checkpoint: Checkpoint | None = None
    """Where it goes on from."""
    conductor: Conductor | None = None
    """Through whom other ranks take part; None where there are none."""
    _begun: float = field(default_factory=time.perf_counter)
    _logger: MetricLogger | None = None

    @property
    def config(self) -> Experiment:
        return self.composed.experiment

    @property
    def seconds(self) -> float:
        """Wall time spent on this run, earlier processes included."""
        before = self.checkpoint.state["seconds"] if self.checkpoint else 0.0
        return float(before) + time.perf_counter() - self._begun

    def settle(self, steps: int) -> None:
        """The number of steps, now that it is known how many follow from the data."""
        config = self.config
        training = config.training.model_copy(update={"steps": steps})
        self.composed = replace(self.composed, experiment=config.model_copy(update={"training": training}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step everywhere."""
        if self._logger is None:
            config = self.config
            stage = config.sft if config.sft and not config.sft.then_reinforce else SftConfig()
            context = LoggerContext(
                self.directory.path,
                resume_step=self.checkpoint.step if self.checkpoint else None,
                reporter=self.progress,
                name=stage.name or config.name,
                project=stage.project or config.tracking.project or "quintet",
            )
            self._logger = open_loggers(config.tracking.loggers if stage.loggers is None else stage.loggers, context)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        self._logger.log(step, self.seconds, {**metrics, "perf/max_memory_rss_gb": memory})

    def reopen(self) -> None:
        """A run that was finished and has more to do now is running again, under the configuration of now."""
        if self.directory.read_state().get("status") == "finished":
            _note_running(self)

    def save(self, step: int, components: Components) -> None:
        """Begin the checkpoint of this step; see `store`."""
        self.store(step, components.save, **components.extra())

    def store(self, step: int, copy: Callable[[Path], Write], **state: Any) -> None:
        """Begin a checkpoint: `copy(directory)` takes copies and gives what writes them there, in the background;
        `state` are JSON values of the caller's. What went wrong with the one before is raised here, as by `wait`."""
        state |= {"seconds": self.seconds, "experiment": self.config.model_dump(mode="json")}
        state["contents"] = list(self.config.checkpoint.contents)
        without = self.checkpoint.directory if self.checkpoint and self.config.checkpoint.delete_after_load else None
        with machine_errors(self.directory.checkpoints):
            self.saver.save(step, state, copy, without=without)

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole.

        Raises:
            MachineError: the machine, or the store that it is copied to, refuses.
        """
        with machine_errors(self.directory.checkpoints):
            self.saver.wait()

    def close(self) -> None:
        """Let go of the log files."""
        self.saver.close()
        if self._logger is not None:
            self._logger.close()


@contextmanager
def open_run(composed: Composed, console: Console, conductor: Conductor | None = None) -> Iterator[Run]:
    """The run's directory, made and locked, and the checkpoint that it goes on from.

    Raises:
        MachineError: the directory can't be written or is in use, or the checkpoint named is damaged.
        ConfigError: the configuration isn't the one that the checkpoint was made with.
    """
    config = composed.experiment
    directory = RunDirectory.of(config)
    directory.create(_needed_bytes(composed, directory.checkpoints))
    remote = _store(config, directory)
    with directory.lock():
        progress = open_progress(console)
        saver = Saver(
            directory.checkpoints,
            keep=config.checkpoint.keep,
            others=conductor.others if conductor else 0,
            publish=remote.put if remote else None,
            check=conductor.check if conductor else None,
        )
        beginning = starting_point(config, directory, progress, remote)
        run = Run(composed, directory, progress, saver, beginning, conductor)
        if beginning and remote:
            _catch_up(saver, remote, beginning, directory)
        _prepare(run)
        try:
            yield run
        finally:
            run.close()


def _store(config: Experiment, directory: RunDirectory) -> RemoteStore | None:
    """Where copies of checkpoints go."""
    if config.checkpoint.remote_dir is None:
        return None
    store = RemoteStore.of(config.checkpoint.remote_dir)
    store.refuse_own(directory.checkpoints)
    return store


def _catch_up(saver: Saver, remote: RemoteStore, checkpoint: Checkpoint, directory: RunDirectory) -> None:
    """Have the run's own checkpoint copied where an earlier process couldn't, or was killed over it."""
    if checkpoint.directory.parent == directory.checkpoints and not remote.has(checkpoint.directory):
        saver.publish(checkpoint.directory)


def _needed_bytes(composed: Composed, checkpoints: Path) -> int:
    """A lower bound of what a run still writes: checkpoints of weights and, where all are trained and kept, their two
    Adam moments, in float32.

    One more than are kept, because the new one is whole before the oldest goes; no more than are made. What lies there
    already takes no more room.
    """
    config = composed.experiment
    kept = min(config.checkpoint.keep + 1, plan(composed).checkpoints)
    given = config.sft.path if config.sft and config.sft.path else config.policy.path
    path = Path(given) if given else None
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path else MADE_POLICY_BYTES
    adapted = config.policy.lora or (config.sft and config.sft.lora)
    copies = 3 if "optimizer" in config.checkpoint.contents and not adapted else 1
    there = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file() and not file.is_symlink())
    return max(0, copies * weights * kept - there) + LOG_BYTES


def _copy_config(run: Run) -> None:
    """The configuration a second time, where somebody wants it to lie."""
    if run.config.tracking.config_dir is not None:
        place = Path(run.config.tracking.config_dir)
        with machine_errors(place):
            place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / run.directory.config.name, dump_config(run.composed).encode())


def _prepare(run: Run) -> None:
    """Forget what the present run won't go on from, and write its configuration."""
    step = run.checkpoint.step if run.checkpoint else -1
    truncate(run.directory.path, step)
    if run.checkpoint is None:
        run.directory.forget()
    if run.directory.read_state().get("status") != "finished":
        _note_running(run)


def _note_running(run: Run) -> None:
    run.directory.write_text(run.directory.config.name, dump_config(run.composed))
    _copy_config(run)
    run.directory.write_state("running")
