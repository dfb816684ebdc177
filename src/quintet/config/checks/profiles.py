"""Profiles of steps, ranks and GPUs that a run does not have."""

from collections.abc import Iterator
from dataclasses import replace

from quintet import hardware
from quintet.config.composed import ComposedConfig
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem


def profile_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield ranks without a device of the actor, steps after the last one, and kernels and snapshots without a GPU."""
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
    if profile.torch is not None and {*profile.torch.activities} == {"cuda"} and not hardware.sees_gpu():
        problem = "kernels need a CUDA GPU, and this machine has none that the run may use"
        cpu = "tracking.profile.torch.activities=[cpu]"
        yield replace(composed.problem("tracking.profile.torch.activities", problem, cpu), elsewhere=True)
    if profile.memory_snapshot and not hardware.sees_gpu():
        problem = "a snapshot of GPU memory needs a CUDA GPU, and this machine has none that the run may use"
        yield composed.problem("tracking.profile.memory_snapshot", problem, "tracking.profile.memory_snapshot=false")
