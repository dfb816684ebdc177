"""Several processes on one device, where a component cannot have them."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.plan.placement import RESTARTABLE, SECTION_TITLES, Placement, format_ranges, place_components
from quintet.config.plan.process_layout import STANDALONE_LEARNERS
from quintet.config.problems import ConfigProblem

MEMORY_SHARE = "rollout.engine_options.memory_share"


def processes_per_device_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield components with several processes per device that cannot have them, and engines that take more than their
    device."""
    config = composed.experiment
    if config.sft_only is not None or config.evaluation is not None:
        return
    yield from _learner_problems(composed)
    placement = place_components(config)
    for name in sorted(RESTARTABLE):
        if key := _key(config, name):
            reason = _obstacle(config, placement, name)
            value = 1 if key.endswith("processes_per_device") else sorted(set(composed.value(key)))
            if reason is not None:
                yield composed.problem(key, reason, f"{key}={value}")
            elif name == "rollout":
                yield from _memory_problems(composed, placement)


def _key(config: Experiment, name: str) -> str | None:
    """Return the key by which a device has several processes of a component; None if none has."""
    component = getattr(config.placement, name)
    if component.processes_per_device > 1:
        return f"placement.{name}.processes_per_device"
    devices = component.devices or ()
    return f"placement.{name}.devices" if len(set(devices)) < len(devices) else None


def _learner_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    for name in ("actor", *STANDALONE_LEARNERS):
        key = f"placement.{name}.devices"
        devices = composed.value(key) or ()
        if len(set(devices)) < len(devices):
            title = SECTION_TITLES.get(name, name)
            problem = f"each device is listed once: the ranks of the {title} cannot share one"
            yield composed.problem(key, problem, f"{key}={sorted(set(devices))}")


def _obstacle(config: Experiment, placement: Placement, name: str) -> str | None:
    """Return why a component cannot have several processes per device; None if it can."""
    component, actor = placement.of(name), placement.of("actor")
    subject = "engines" if name == "rollout" else "environments"
    if component is None or not component.devices:
        return f"the {subject} have no device without the actor; placement.{name}.devices names them"
    if shared := sorted(set(component.devices).intersection(actor.devices if actor else ())):
        return f"the actor is on {format_ranges(shared)}, too, and its process has the {subject} there"
    if name == "rollout" and component.parallelism.devices_per_copy > 1:
        return f"an engine on {component.parallelism.devices_per_copy} devices shares none of them"
    return None


def _memory_problems(composed: ComposedConfig, placement: Placement) -> Iterator[ConfigProblem]:
    component, share = placement.of("rollout"), composed.value(MEMORY_SHARE)
    count = component.processes_per_device if component else 1
    if share is not None and share * count > 1:
        problem = f"each of {count} engines on a device takes that share"
        yield composed.problem(MEMORY_SHARE, problem, f"at most: {MEMORY_SHARE}={int(100 / count) / 100:g}")
