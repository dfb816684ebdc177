"""Checkpoints of a reinforcement-learning run: learners, tokenizer, start states, KL coefficient and schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.algorithms.kl import KlControl
from quintet.config.native.experiment import Experiment
from quintet.envs.start_states import StartStates
from quintet.rollout.async_rollout import AsyncRollout
from quintet.runtime.groups import CheckpointedLearners
from quintet.runtime.learners.learner_checkpoint import HF, contents_to_load
from quintet.runtime.learners.optimizer_schedules import OptimizerSchedules
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.checkpoint.checkpoint import Checkpoint
from quintet.training.checkpoint.hf_directory import capture_files, write_files


class TokenizerFiles:
    """Files of a tokenizer, read when the first checkpoint is saved."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._files: dict[str, bytes] = {}

    def add_to(self, write: WriteFiles, *directories: str) -> WriteFiles:
        """Return a function that calls `write` and then writes the tokenizer into these directories of the
        checkpoint."""
        self._files = self._files or capture_files(self._tokenizer.save_pretrained)

        def write_all(checkpoint: Path) -> None:
            write(checkpoint)
            for directory in directories:
                write_files(checkpoint / directory, self._files)

        return write_all


def load_learners(learners: CheckpointedLearners, checkpoint: Checkpoint, config: Experiment) -> dict[str, Any]:
    """Load what `checkpoint.load_contents` names; return the checkpoint's state, which is empty without `extra`.

    Raises:
        ConfigError: the checkpoint does not have it.
        MachineError: the checkpoint belongs to another model.
    """
    contents = contents_to_load(checkpoint, config.checkpoint.load_contents)
    extra = checkpoint.state if "extra" in contents else {}
    scales = {name: value for name, value in extra.items() if name.endswith("_scale")}
    learners.load(checkpoint.directory, contents, scales)
    return extra


@dataclass(slots=True)
class RunCheckpoint:
    """Saves and loads everything that a resumed run continues from."""

    config: Experiment
    learners: LearnerGroup
    tokenizer_files: TokenizerFiles
    start_states: StartStates
    schedules: OptimizerSchedules
    kl: KlControl | None = None
    async_rollout: AsyncRollout | None = field(default=None)

    def save(self, directory: Path) -> WriteFiles:
        """Copy all tensors; return the function that writes them into the checkpoint at `directory`."""
        return self.tokenizer_files.add_to(self.learners.save(directory), HF)

    def extra_state(self) -> dict[str, Any]:
        """Return the state besides tensors, as JSON values. A resumed run restarts running episodes, which are aborted
        unless the rollout overlaps with training."""
        if "extra" not in self.config.checkpoint.contents:
            return {}
        kl = {} if self.kl is None else {"kl_coefficient": self.kl.coefficient}
        starts = self.async_rollout.suspend() if self.async_rollout else self.start_states.state()
        return {"starts": starts, **self.schedules.state(), **kl, **self.learners.extra_state()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the parts named in `checkpoint.load_contents`.

        Raises:
            ConfigError: the checkpoint does not have it.
            MachineError: the checkpoint belongs to another model.
        """
        extra = load_learners(self.learners, checkpoint, self.config)
        self.schedules.load(extra)
        if self.kl is not None and "kl_coefficient" in extra:
            self.kl.coefficient = float(extra["kl_coefficient"])
        if "starts" not in extra:
            self.schedules.start_at(checkpoint.step)
            return
        self.start_states.load(extra["starts"])
        if self.async_rollout is not None:
            self.async_rollout.load(extra["starts"])
