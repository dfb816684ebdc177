"""Components of a run in simulators."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.config.plan.chunk_steps import ChunkSteps
from quintet.runtime.controller import Controller
from quintet.runtime.embodied.robot_learner_group import RobotLearnerGroup
from quintet.runtime.learners.optimizer_schedules import OptimizerSchedules
from quintet.runtime.run_checkpoint import load_learners
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.checkpoint.checkpoint import Checkpoint


@dataclass(slots=True)
class RobotComponents:
    """Everything that a training step in simulators uses."""

    config: Experiment
    workers: RobotLearnerGroup
    schedules: OptimizerSchedules = field(init=False)
    steps: ChunkSteps = field(init=False)
    """Robots and chunks of a step."""

    def __post_init__(self) -> None:
        self.schedules = OptimizerSchedules(self.config)
        self.steps = ChunkSteps.from_config(self.config, self.workers.calls.policy.action_chunk)

    @classmethod
    def build(cls, config: Experiment, policy: Path, controller: Controller) -> RobotComponents:
        """Build the components around the action policy at that directory."""
        return cls(config, controller.build_robot_learners(config, policy))

    def close(self) -> None:
        """End the simulators."""
        self.workers.close()

    # ---- checkpoints

    def save(self, directory: Path) -> WriteFiles:
        """Copy all tensors; return the function that writes them into the checkpoint at `directory`."""
        return self.workers.calls.save(directory)

    def extra_state(self) -> dict[str, Any]:
        """Return the state besides tensors, as JSON values."""
        if "extra" not in self.config.checkpoint.contents:
            return {}
        state = self.workers.calls.extra_state()
        return {**self.schedules.state(), **state}

    def load(self, checkpoint: Checkpoint) -> None:
        """Load what `checkpoint.load_contents` names.

        Raises:
            ConfigError: the checkpoint does not have it.
            MachineError: the checkpoint belongs to another model.
        """
        extra = load_learners(self.workers.calls, checkpoint, self.config)
        self.schedules.load(extra)
        if not extra:
            self.schedules.start_at(checkpoint.step)
