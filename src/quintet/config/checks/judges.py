"""Servers of judges that cannot be started."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem


def judge_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield devices of nodes without a rank of the actor, which would start the servers, and unused arguments."""
    config = composed.experiment
    layout = process_layout(config)
    nodes = {layout.devices[rank] // layout.devices_per_node for rank in layout.learner_ranks}
    for section, judge in config.reward.judges.items() if config.reward is not None else ():
        key, server = f"reward.{section}.server", judge.server
        if server is None:
            continue
        far = [device for device in server.devices or () if device // layout.devices_per_node not in nodes]
        if far:
            problem = (
                f"no device of the actor is on the nodes of {', '.join(map(str, far))}, to start the servers there"
            )
            near = [device for device in server.devices or () if device not in far]
            yield composed.problem(f"{key}.devices", problem, f"nearest valid value: {key}.devices={near or 'null'}")
        if server.arguments and server.engine == "hf":
            problem = "the engine hf has no further arguments"
            yield composed.problem(f"{key}.arguments", problem, f"{key}.arguments={{}}, or {key}.engine=vllm")
