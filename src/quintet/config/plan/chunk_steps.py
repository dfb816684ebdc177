"""Robots and action chunks of a training step in a simulator."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import VlaConfig

PRESET_CHUNKS = {"arm-vla": 4, "state-mlp": 1}
"""Actions of a chunk of each preset of action policies (`policies/vla/action_presets.py`)."""
MAX_VALIDATION_ROBOTS = 256
"""Robots of a validation at the same time if `environments` is not set."""


def configured_chunk(config: Experiment) -> int:
    """Return the actions of a chunk by the configuration: by `policy.vla`, else by the preset."""
    policy = config.policy
    if policy.vla is not None and "action_chunk" in policy.vla.model_fields_set:
        return policy.vla.action_chunk
    chunk = policy.overrides.get("action_chunk", PRESET_CHUNKS.get(policy.preset or ""))
    return chunk if isinstance(chunk, int) else (policy.vla or VlaConfig()).action_chunk


@dataclass(frozen=True, slots=True)
class ChunkSteps:
    """Extent of the rollout of a training step."""

    robots: int
    """Robots that are simulated at the same time."""
    passes: int
    """Passes over all robots, each from a reset."""
    chunks: int
    """Chunks of actions of a robot in a pass."""
    validation_robots: int
    """Robots of a validation that are simulated at the same time."""
    validation_chunks: int
    """Chunks of a validation episode."""

    @classmethod
    def from_config(cls, config: Experiment, action_chunk: int | None = None) -> ChunkSteps:
        """Return the extent of a run in a simulator. `action_chunk` is that of the policy; None takes the configured
        one.

        Raises:
            TypeError: the run has no simulator.
        """
        env = config.env
        if not isinstance(env, SimulatorConfig):
            raise TypeError("the run has no simulator")
        chunk = action_chunk or configured_chunk(config)
        episodes = config.training.groups_per_step * config.training.samples_per_group
        validation = config.validation.simulator or env
        return cls(
            robots=env.environments or -(-episodes // env.epochs),
            passes=env.epochs,
            chunks=-(-(env.steps_per_epoch or env.max_steps) // chunk),
            validation_robots=validation.environments or min(config.validation.episodes, MAX_VALIDATION_ROBOTS),
            validation_chunks=-(-validation.max_steps // chunk),
        )

    @property
    def samples(self) -> int:
        """Chunk steps of a training step, which mini-batches divide."""
        return self.robots * self.passes * self.chunks
