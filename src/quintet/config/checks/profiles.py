"""Profiles of steps and ranks that a run does not have."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem


def profile_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield ranks without a device of the actor, and steps that all come after the last one."""
    run = composed.experiment
    profile, steps = run.tracking.profile, run.training.steps
    if profile is None:
        return
    ranks = process_layout(run).learner_ranks
    others = [rank for rank in profile.ranks or () if rank not in ranks]
    if others:
        listed = [rank for rank in profile.ranks or () if rank in ranks] or [0]
        problem = f"rank {others[0]} has no device of the actor; the ranks that have one: {', '.join(map(str, ranks))}"
        yield composed.problem("tracking.profile.ranks", problem, f"tracking.profile.ranks={listed}")
    if profile.steps and run.sft is None and steps and min(profile.steps) > steps:
        problem = f"the last step of the run is {steps}"
        yield composed.problem("tracking.profile.steps", problem, f"tracking.profile.steps=[{steps}]")
