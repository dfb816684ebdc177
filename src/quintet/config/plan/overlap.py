"""Whether a run generates and trains at the same time."""

from quintet.config.native.experiment import Experiment
from quintet.config.plan.placement import LEARNERS, LOGPROBS, SECTION_TITLES, place_components, share_devices


def overlaps_training(config: Experiment) -> bool:
    """Return whether episodes are generated while the policy is trained."""
    return overlap_obstacle(config) is None


def overlap_obstacle(config: Experiment) -> str | None:
    """Return why the rollout of a run does not overlap with training; None if it does.

    It does with `rollout.async_ratio`, or within a step with `training.pipelined`. Both can compute at the same time
    only on different devices; otherwise episodes of an asynchronous rollout pause during updates of the policy.
    """
    if config.rollout.async_ratio == 0 and not config.training.pipelined:
        return "rollout.async_ratio = 0"
    return engines_on_learner_devices(config)


def engines_on_learner_devices(config: Experiment) -> str | None:
    """Return that engines and learners share devices; None if they do not."""
    placement = place_components(config)
    learners = [component for name in (*LEARNERS, LOGPROBS) if (component := placement.of(name)) is not None]
    engines = placement.of("rollout")
    if engines is None or not learners:
        return "the run has no engines or no learners"
    shared = [learner.name for learner in learners if share_devices(learner.devices, engines.devices)]
    if not engines.devices and not all(learner.devices for learner in learners):
        shared = [learner.name for learner in learners if not learner.devices]
    shared = [SECTION_TITLES.get(name, name) for name in shared]
    return f"the engines and {' and '.join(shared)} are on the same devices" if shared else None
