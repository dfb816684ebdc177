"""Keys of overlapped rollouts in runs whose rollout does not overlap with training."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.native.placement import GroupChannelConfig
from quintet.config.plan.overlap import overlap_obstacle
from quintet.config.problems import ConfigProblem

CHANNEL = "placement.rollout.channel"


def overlap_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the keys of the channel if there is none."""
    channel, default = composed.experiment.placement.rollout.channel, GroupChannelConfig()
    if channel == default or (obstacle := overlap_obstacle(composed.experiment)) is None:
        return
    for name in GroupChannelConfig.model_fields:
        value = getattr(default, name)
        if getattr(channel, name) != value:
            problem = (
                f"there is no queue, because the rollout does not overlap with training: {obstacle} (docs/async.md)"
            )
            yield composed.problem(
                f"{CHANNEL}.{name}", problem, f"{CHANNEL}.{name}={'null' if value is None else value}"
            )
