"""Channels in runs that do not have them, and channels with the same name."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.placement import ChannelConfig
from quintet.config.plan.overlap import overlap_obstacle
from quintet.config.problems import ConfigProblem

GROUPS = "placement.rollout.channel"
SECTIONS = (GROUPS, "placement.rollout.action_channel", "placement.envs.channel")


def channel_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield keys of channels that the run does not have, and names that two of them have."""
    first: dict[str, str] = {}
    for section in SECTIONS:
        channel: ChannelConfig = composed.value(section)
        if channel.is_default:
            continue
        if (obstacle := _obstacle(composed.experiment, section)) is not None:
            yield from _refused(composed, section, obstacle)
        elif (other := first.setdefault(channel.full_name, section)) is not section:
            key = f"{section}.queue"
            problem = f"{other} has the name {channel.full_name} in metrics, too"
            yield composed.problem(key, problem, f"{key}={channel.default_name[1]}_2")


def _obstacle(config: Experiment, section: str) -> str | None:
    """Return why a run does not have a channel; None if it has."""
    if section == GROUPS:
        # without async_ratio, the learner takes each group of a step when it is complete
        obstacle = overlap_obstacle(config) if config.rollout.async_ratio else None
        return obstacle and f"rollout and training do not overlap: {obstacle} (docs/async.md)"
    return "a run that answers prompts has no environments" if config.env.reads_prompts else None


def _refused(composed: ComposedConfig, section: str, obstacle: str) -> Iterator[ConfigProblem]:
    """Yield each key of a channel that was set."""
    for name, field in ChannelConfig.model_fields.items():
        key = f"{section}.{name}"
        if composed.value(key) != field.default:
            default = "null" if field.default is None else field.default
            yield composed.problem(key, f"there is no queue, because {obstacle}", f"{key}={default}")
