"""Environments on devices without the actor, in runs that cannot have them there."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.plan.placement import format_ranges
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem

KEY = "placement.envs.devices"


def env_host_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield why a run cannot have environments in processes of their own, if its placement asks for them."""
    layout = process_layout(composed.experiment)
    hosts = frozenset(layout.standalone.get("envs", ()))
    if not hosts:
        return
    if composed.experiment.env.reads_prompts:
        problem = "a run that answers prompts has no environments; its rewards are computed by the controller"
        yield composed.problem(KEY, problem, f"{KEY}=null")
        return
    # robots and copies of their policy may share a process
    shares = {"envs", "rollout"} if composed.experiment.env.is_simulator else {"envs"}
    for name, ranks in layout.standalone.items():
        if name not in shares and (shared := sorted({layout.devices[rank] for rank in hosts.intersection(ranks)})):
            problem = f"placement.{name}.devices has {format_ranges(shared)}, too; a process hosts environments alone"
            yield composed.problem(KEY, problem, f"{KEY}=null")
