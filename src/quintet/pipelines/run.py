"""The run that every pipeline works in: its directory, clock, logs and checkpoints."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.training import SftConfig
from quintet.config.plan.disk import disk_problem
from quintet.config.plan.row_counts import learns_from_files
from quintet.config.plan.run_plan import planned_disk
from quintet.config.problems import raise_problems
from quintet.config.yaml_writer import dump_config
from quintet.data.tables import describe_data_files
from quintet.errors import InterruptedRun
from quintet.pipelines.resume import find_resume_checkpoint
from quintet.runtime.device import gpu_memory_metrics
from quintet.runtime.signals import StopRequest
from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.generations import LoggedGeneration
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import GENERATIONS_FILE, MetricLogger, build_loggers, truncate
from quintet.tracking.progress import Progress, build_progress
from quintet.tracking.progress_file import RecordedProgress
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_facts import run_facts
from quintet.training.checkpoint.async_save import AsyncCheckpointer, WriteFiles
from quintet.training.checkpoint.checkpoint import Checkpoint
from quintet.training.checkpoint.remote_store import RemoteStore

if TYPE_CHECKING:
    from rich.console import Console

    from quintet.runtime.controller import Controller

IN_WARM_START = "in_warm_start"
"""Key of a checkpoint's state: whether it is one of the warm start."""


@dataclass(slots=True)
class Run:
    """A run in its directory."""

    composed: ComposedConfig
    directory: RunDirectory
    progress: Progress
    saver: AsyncCheckpointer
    checkpoint: Checkpoint | None = None
    """Checkpoint that it resumes from."""
    controller: Controller | None = None
    """Controller of the workers; None if they run in this process."""
    warm_start_checkpoint: Checkpoint | None = None
    """Checkpoint of its warm start that it resumes from; `checkpoint` is None then."""
    _started_at: float = field(default_factory=time.perf_counter)
    _logger: MetricLogger | None = None
    _data_files: list[dict[str, Any]] | None = None
    """Records of the data files, once they are read."""
    _is_noted: bool = False
    """Whether the user knows that no logger shows generations."""

    @property
    def config(self) -> Experiment:
        return self.composed.experiment

    @property
    def steps_done(self) -> int:
        """Number of training steps that the checkpoint has."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def seconds(self) -> float:
        """Wall-clock time spent on this run, including earlier processes."""
        checkpoint = self.checkpoint or self.warm_start_checkpoint
        before = float(checkpoint.state.get("seconds", 0.0)) if checkpoint else 0.0
        return before + time.perf_counter() - self._started_at

    def set_steps(self, steps: int) -> None:
        """Set the number of steps, which may follow from the data."""
        config = self.config
        training = config.training.model_copy(update={"steps": steps})
        self.composed = replace(self.composed, experiment=config.model_copy(update={"training": training}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step to all loggers."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        memories = {"perf/max_memory_rss_gb": memory, **gpu_memory_metrics()}
        self._open_logger().log(step, self.seconds, {**metrics, **memories})

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        """Send episodes of a validation to the loggers; the run continues if that fails."""
        try:
            has_logger = self._open_logger().log_generations(step, generations)
        except Exception as error:  # noqa: BLE001 - whatever a logger's library raises must not end a run
            self.progress.note(f"tracking.validation_generations of step {step} are not logged: {error}")
            return
        if not has_logger and not self._is_noted:
            self._is_noted = True
            self.progress.note("tracking.validation_generations: none of tracking.loggers shows generations")

    def log_video(self, step: int, name: str, path: Path) -> None:
        """Send a video file to the loggers that show videos; the run continues if that fails."""
        try:
            self._open_logger().log_video(step, name, path)
        except Exception as error:  # noqa: BLE001 - whatever a logger's library raises must not end a run
            self.progress.note(f"{path} is not logged: {error}")
            return

    def _open_logger(self) -> MetricLogger:
        if self._logger is None:
            config = self.config
            stage = config.sft if config.sft and not config.sft.then_reinforce else SftConfig()
            context = LoggerContext(
                self.directory.path,
                resume_step=self.checkpoint.step if self.checkpoint else None,
                reporter=self.progress,
                name=stage.name or config.tracking.run_name or config.name,
                project=stage.project or config.tracking.project or "quintet",
                log_dir=Path(config.tracking.log_dir) if config.tracking.log_dir else None,
                facts=run_facts(config),
                started=time.time() - self.seconds,
            )
            self._logger = build_loggers(config.tracking.loggers if stage.loggers is None else stage.loggers, context)
        return self._logger

    def reopen(self) -> None:
        """Mark a finished run that has more steps to do now as running, with its current configuration."""
        if self.directory.read_state().get("status") == "finished":
            _mark_running(self)

    def save(self, step: int, copy: Callable[[Path], WriteFiles], *, in_warm_start: bool = False, **state: Any) -> None:
        """Start to write a checkpoint in the background. The first one after the warm start replaces those of it.

        Args:
            step: Number of training steps done; of a checkpoint of the warm start, number of its updates.
            copy: Copies all tensors, and returns the function that writes them into the checkpoint.
            in_warm_start: Whether it is a checkpoint of the warm start.
            state: State besides tensors, as JSON values.

        Raises:
            MachineError: the previous checkpoint could not be written.
        """
        state |= self.training_state()
        state |= {"contents": list(self.config.checkpoint.contents), IN_WARM_START: in_warm_start}
        root = self.directory.warm_start_checkpoints if in_warm_start else self.directory.checkpoints
        with translate_os_errors(root):
            self.saver.save(step, state, copy, root=root, delete=None if in_warm_start else self._replaced_checkpoint())

    def training_state(self) -> dict[str, Any]:
        """Return time, configuration and data files of the training so far, as JSON values."""
        if self._data_files is None:
            data = self.config.data
            is_read = data is not None and data.dataset_class is None and learns_from_files(self.config)
            self._data_files = describe_data_files(data) if data is not None and is_read else []
        experiment = self.config.model_dump(mode="json")
        return {"seconds": self.seconds, "experiment": experiment, "data": self._data_files}

    def _replaced_checkpoint(self) -> Path:
        """Return the directory that is deleted once the next checkpoint is complete."""
        if self.checkpoint and self.config.checkpoint.delete_after_load:
            return self.checkpoint.directory
        return self.directory.warm_start_checkpoints

    def profiled(self, step: int) -> AbstractContextManager[None]:
        """Return the context of a step that is profiled if `tracking.profile` lists it."""
        config = self.config.tracking.profile
        if config is None or self.controller is None or not (config.covers(step) or config.prepares(step)):
            return nullcontext()
        directory = Path(config.directory) if config.directory else self.directory.profile
        return self.controller.profiled(config, directory.absolute(), step)

    def wait(self) -> None:
        """Wait until the current checkpoint is written completely.

        Raises:
            MachineError: it could not be written, or copied to `checkpoint.remote_dir`.
        """
        with translate_os_errors(self.directory.checkpoints):
            self.saver.wait()

    def close(self) -> None:
        """Close checkpoint writer and loggers."""
        self.saver.close()
        if self._logger is not None:
            self._logger.close()


@contextmanager
def open_run(composed: ComposedConfig, console: Console, controller: Controller | None = None) -> Iterator[Run]:
    """Create and lock the run's directory, and find the checkpoint that it resumes from.

    Raises:
        MachineError: the directory cannot be written or is in use, or the checkpoint is damaged.
        ConfigError: the configuration differs from the one that the checkpoint was saved with, or its checkpoints would
            fill the disk.
    """
    config = composed.experiment
    directory = RunDirectory.from_config(config)
    directory.create()
    raise_problems(filter(None, [disk_problem(composed, planned_disk(composed))]))
    remote = _build_remote_store(config, directory)
    with directory.lock():
        progress = RecordedProgress(build_progress(console), directory.progress)
        saver = AsyncCheckpointer(
            directory.checkpoints,
            keep=config.checkpoint.keep,
            other_ranks=controller.shard_writers(config) if controller else (),
            publish=remote.upload if remote else None,
            timeout_seconds=config.placement.call_timeout_seconds,
            check_alive=controller.check_alive if controller else None,
        )
        checkpoint = find_resume_checkpoint(config, directory, progress, remote)
        run = Run(composed, directory, progress, saver, controller=controller)
        if checkpoint and checkpoint.state.get(IN_WARM_START):
            run.warm_start_checkpoint = checkpoint
        else:
            run.checkpoint = checkpoint
        is_of_run = checkpoint is not None and checkpoint.directory.parent == directory.checkpoints
        if checkpoint and remote and is_of_run and not remote.contains(checkpoint.directory):
            # an earlier process ended before it had copied the run's last checkpoint
            saver.publish(checkpoint.directory)
        _prepare(run)
        try:
            yield run
        finally:
            run.close()


def _build_remote_store(config: Experiment, directory: RunDirectory) -> RemoteStore | None:
    """Return the store that checkpoints are copied to."""
    if config.checkpoint.remote_dir is None:
        return None
    store = RemoteStore.from_url(config.checkpoint.remote_dir)
    store.check_is_not(directory.checkpoints)
    return store


def _copy_config(run: Run) -> None:
    """Write a second copy of the configuration into `tracking.config_dir`."""
    if run.config.tracking.config_dir is not None:
        directory, key = Path(run.config.tracking.config_dir), "tracking.config_dir"
        with translate_os_errors(directory, key):
            directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / run.directory.config.name, dump_config(run.composed).encode(), key)


def _prepare(run: Run) -> None:
    """Remove logs and files from after the checkpoint, and write the configuration."""
    for filename in (run.directory.metrics.name, GENERATIONS_FILE):
        truncate(run.directory.path, run.checkpoint.step if run.checkpoint else -1, filename)
    if run.warm_start_checkpoint:
        truncate(run.directory.path, run.warm_start_checkpoint.step, run.directory.warm_start.name)
    if run.checkpoint is None:
        sft = run.config.sft
        run.directory.clear(
            keep_warm_start=_resumes_own_warm_start(run), keep_fine_tuning=sft is not None and sft.then_reinforce
        )
    if run.directory.read_state().get("status") != "finished":
        _mark_running(run)


def _resumes_own_warm_start(run: Run) -> bool:
    checkpoint, directory = run.warm_start_checkpoint, run.directory.warm_start_checkpoints
    return checkpoint is not None and checkpoint.directory.resolve().parent == directory.resolve()


def _mark_running(run: Run) -> None:
    run.directory.write_text(run.directory.config.name, dump_config(run.composed))
    run.directory.write_keys(run.composed)
    _copy_config(run)
    run.directory.write_state("running")


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every `every` steps (never if 0 or less) is due after `step`."""
    return every > 0 and step % every == 0


def interrupted(run: Run, stop: StopRequest, position: str) -> InterruptedRun:
    """Return the error that ends a run after a request to stop; `position` is the last step, such as `step 3`."""
    number = stop.number or signal.SIGINT
    message = f"stopped by {number.name} after {position}; {run.directory.path} can be resumed"
    return InterruptedRun(message, "rerun the same command to continue from its last checkpoint", number)
