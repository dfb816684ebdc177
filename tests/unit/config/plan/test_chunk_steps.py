"""If these fail, a step of a robot run has other robots or passes than configured."""

from __future__ import annotations

from quintet.config.compose import load_experiment
from quintet.config.plan.chunk_steps import ChunkSteps

BASE = (
    "env.name=simulator",
    "policy.vla.action_chunk=4",
    "training={groups_per_step: 4, samples_per_group: 4, mini_batches: 1}",
)


def steps(*overrides: str) -> ChunkSteps:
    return ChunkSteps.from_config(load_experiment(None, [*BASE, *overrides]).experiment)


def test_robots_passes_and_chunks_are_as_configured() -> None:
    plain = steps("env.max_steps=20")
    assert (plain.robots, plain.passes, plain.chunks) == (16, 1, 5)
    assert steps("env.auto_reset=true", "env.max_steps=20", "env.steps_per_epoch=44").chunks == 11
    assert steps("env.epochs=2").robots == 8
    more = steps("env.environments=4", "env.epochs=4")
    assert (more.robots, more.passes, more.validation_robots) == (4, 4, 4)
