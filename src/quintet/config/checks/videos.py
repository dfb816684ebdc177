"""Videos in runs whose environments are not simulated."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.problems import ConfigProblem


def video_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the videos that are asked for without a simulator."""
    run = composed.experiment
    if any(env.config.is_simulator for env in run.run_envs):
        return
    for name in ("video", "validation_video"):
        if getattr(run.tracking, name) is not None:
            key = f"tracking.{name}"
            yield composed.problem(key, "only robots in a simulator have videos", f"{key}=null")
