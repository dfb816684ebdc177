"""Peak memory of every device, and the settings that save most if a run does not fit.

Colocated components take turns: one computes while the others are idle.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from quintet.config.composed import ComposedConfig, config_value, with_value
from quintet.config.native.experiment import Experiment
from quintet.config.plan.batches import max_requests, max_sequence_tokens, micro_batch_limits
from quintet.config.plan.component_memory import MemoryUse, active_memory, idle_memory
from quintet.config.plan.cpu_memory import CHECKPOINT, PROCESS, cpu_active_memory, cpu_idle_memory, process_memory
from quintet.config.plan.format_sizes import format_bytes
from quintet.config.plan.machine import Machine
from quintet.config.plan.models import Models
from quintet.config.plan.placed_model import PlacedModel
from quintet.config.plan.placement import LOGPROBS, Devices, Placement
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

PHASES: Mapping[str, str] = {
    "actor": "while the actor learns",
    "rollout": "while the engine generates",
    LOGPROBS: "while the log-prob workers compute",
    "reference": "while the reference computes",
    "critic": "while the critic learns",
    "reward": "while the reward model scores",
    CHECKPOINT: "while a checkpoint is copied",
    PROCESS: "between the phases",
}
"""Phase in which each component computes."""
ALL_AT_ONCE = "all at once"
SWITCHES = (
    *(f"{learner}.sharding.sync_every_micro_batch" for learner in ("actor", "critic")),
    "actor.gradient_checkpointing",
    "sft.gradient_checkpointing",
    *(f"{learner}.memory.offload_{part}" for learner in ("actor", "critic") for part in ("optimizer", "parameters")),
    *("reference.memory.offload_parameters", "rollout.engine_options.sleep_between_steps"),
    "rollout.engine_options.offload",
)
"""Settings that save memory without changing results, the fastest first."""
LABELS = {"copies": "weights gathered or cast", "optimizer": "optimizer state", "cache": "KV cache"}
"""Names of parts of `MemoryUse` in messages where they are not the part's own."""
TITLES = {PROCESS: "process", CHECKPOINT: "checkpoint copies"}
"""Names of what a process has besides components."""
MAX_CHANGES = 3
"""Suggested settings in one message."""


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peak memory of devices that hold the same components."""

    devices: Devices
    components: tuple[str, ...]
    phase: str
    parts: Mapping[str, MemoryUse]
    """Memory of each component at the peak."""

    @property
    def total(self) -> int:
        return sum(use.total for use in self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of all components and the peak on every device."""

    active: Mapping[str, MemoryUse]
    """Each component while it computes."""
    idle: Mapping[str, MemoryUse]
    """Each component while others compute."""
    peaks: tuple[MemoryPeak, ...]
    """Peaks of devices with a component whose model is known."""

    @property
    def fullest(self) -> MemoryPeak | None:
        """Largest peak of all devices."""
        return max(self.peaks, key=lambda peak: peak.total, default=None)


def plan_memory(
    config: Experiment,
    placement: Placement,
    models: Models,
    device_bytes: int | None = None,
    *,
    on_cpu: bool = False,
    steps: int | None = None,
    validation_starts: int | None = None,
) -> MemoryPlan:
    """Estimate every component whose model is known.

    Args:
        config: The run.
        placement: Its devices.
        models: Its models.
        device_bytes: Memory of one device, for `memory_share` of an engine.
        on_cpu: Whether devices are processes that compute on the CPU.
        steps: Number of steps, None if it is unknown.
        validation_starts: Start states or rows of one validation, None if their number is unknown.
    """
    requests = max_requests(config, validation_starts)
    placed = {
        component.name: PlacedModel(config, component, shape, device_bytes, requests)
        for component in placement.components
        if component.devices and (shape := models.of(component.name)) is not None
    }
    if on_cpu:
        return _plan_cpu_memory(config, placement, placed, steps)
    active = {name: active_memory(model) for name, model in placed.items()}
    idle = {name: idle_memory(config, name, use) for name, use in active.items()}
    waiting = idle if placement.colocated else active
    return MemoryPlan(active, idle, memory_peaks(placement.groups(), active, waiting))


def learner_memory(config: Experiment, placement: Placement, models: Models) -> dict[str, MemoryUse]:
    """Return the memory of each component but the engines while it computes, on devices."""
    return {
        component.name: active_memory(PlacedModel(config, component, shape))
        for component in placement.components
        if component.name != "rollout" and component.devices and (shape := models.of(component.name)) is not None
    }


def _plan_cpu_memory(
    config: Experiment, placement: Placement, placed: Mapping[str, PlacedModel], steps: int | None
) -> MemoryPlan:
    """Estimate the processes of a run on a CPU: their components take turns, and checkpoints are copied in those of
    the actor."""
    active = {name: cpu_active_memory(model) for name, model in placed.items()}
    idle = {name: cpu_idle_memory(config, name, use) for name, use in active.items()}
    learners = {name: model for name, model in placed.items() if name in ("actor", "critic")}
    active_process, idle_process = process_memory(learners, steps)
    groups = {
        (*names, *(TITLES if "actor" in names else (PROCESS,))): devices
        for names, devices in placement.groups().items()
    }
    active, idle = {**active, **active_process}, {**idle, **idle_process}
    return MemoryPlan(active, idle, memory_peaks(groups, active, idle)) if placed else MemoryPlan({}, {}, ())


def memory_peaks(
    groups: Mapping[tuple[str, ...], Devices],
    active: Mapping[str, MemoryUse],
    waiting: Mapping[str, MemoryUse],
) -> tuple[MemoryPeak, ...]:
    """Return the peak of the devices of each set of components; `waiting` has the memory of each component while
    another one computes."""
    peaks = (_peak(names, devices, active, waiting) for names, devices in groups.items())
    return tuple(peak for peak in peaks if peak is not None)


def _peak(
    names: tuple[str, ...], devices: Devices, active: Mapping[str, MemoryUse], waiting: Mapping[str, MemoryUse]
) -> MemoryPeak | None:
    moments = [
        MemoryPeak(
            devices,
            names,
            ALL_AT_ONCE if waiting is active else PHASES[computing],
            {name: (active if name == computing else waiting)[name] for name in names if name in active},
        )
        for computing in names
        if computing in active
    ]
    return max(moments, key=lambda moment: moment.total, default=None)


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """A value for one key, and the largest peak with it, bytes."""

    key: str
    value: object
    total: int


Estimate = Callable[[Experiment], MemoryPlan]
"""Memory of a run with changed settings."""


def memory_problems(
    composed: ComposedConfig, placement: Placement, models: Models, device_bytes: int
) -> Iterator[ConfigProblem]:
    """Yield a problem if the largest peak exceeds the device, with the settings that save most."""

    def estimate(config: Experiment) -> MemoryPlan:
        return plan_memory(config, placement, models, device_bytes)

    peak = estimate(composed.experiment).fullest
    if peak is not None and peak.total > device_bytes:
        needed = f"{format_bytes(peak.total)} of {format_bytes(device_bytes)}"
        problem = f"device {peak.devices[0]} needs {needed} {peak.phase}: {largest_parts(peak)}"
        key, hint = _remedy(composed, estimate, device_bytes)
        yield ConfigProblem(key, composed.value(key), composed.source(key), problem, hint)


def machine_warning(composed: ComposedConfig, estimate: Estimate, machine: Machine) -> str | None:
    """Return a warning if a run needs more memory than this machine has, with the settings that save most."""
    peak = estimate(composed.experiment).fullest
    if peak is None or peak.total <= machine.device_bytes:
        return None
    share = f" for each of {machine.processes} processes" if machine.processes > 1 and machine.on_cpu else ""
    size = f"{'which' if machine.on_cpu else 'whose GPU'} has {format_bytes(machine.device_bytes)} of memory{share}"
    _, hint = _remedy(composed, estimate, machine.device_bytes)
    needed = f"the run needs {format_bytes(peak.total)} {peak.phase}: {largest_parts(peak)}"
    return f"on this machine, {size}, {needed}; {hint}"


def _remedy(composed: ComposedConfig, estimate: Estimate, limit: int) -> tuple[str, str]:
    """Return the key of the setting that saves most, and a hint with all that a peak of `limit` bytes needs."""
    savings = _combine(composed, estimate, limit)
    if not savings:
        return "policy.path", "use more devices or a smaller model"
    steps = ", ".join(f"{_change(composed, saving)} (then {format_bytes(saving.total)})" for saving in savings)
    rest = "" if savings[-1].total <= limit else "; more devices for the rest"
    return savings[0].key, f"what helps most: {steps}{rest}"


def _change(composed: ComposedConfig, saving: MemorySaving) -> str | None:
    """Return the assignment in the format of the user, None if it has no such key."""
    return composed.translate_hint(f"{saving.key}={format_value(saving.value)}")


def _combine(composed: ComposedConfig, estimate: Estimate, limit: int) -> list[MemorySaving]:
    """Return the best settings, one after another until the run fits, at most `MAX_CHANGES`."""
    chain: list[MemorySaving] = []
    config = composed.experiment
    while len(chain) < MAX_CHANGES and (not chain or chain[-1].total > limit):
        savings = memory_savings(config, estimate, limit)
        best = next((saving for saving in savings if _change(composed, saving)), None)
        if best is None:
            break
        chain.append(best)
        config = with_value(config, best.key, best.value)
    return chain


def largest_parts(peak: MemoryPeak, count: int = 3) -> str:
    """Describe the largest parts of a peak."""
    parts = [
        (size, TITLES.get(name) or f"{LABELS.get(part, part)} of {name}")
        for name, use in peak.parts.items()
        for part, size in asdict(use).items()
    ]
    return ", ".join(f"{label} {format_bytes(size)}" for size, label in sorted(parts, reverse=True)[:count] if size)


def memory_savings(config: Experiment, estimate: Estimate, limit: int | None) -> list[MemorySaving]:
    """Return the single settings that lower the largest peak; a run fits if it is at most `limit`.

    Those with which the run fits come first, in the order of `SWITCHES`; then the others, switches before smaller
    numbers and by how much they save.
    """
    current = estimate(config)
    all_savings = [
        MemorySaving(key, new, after.fullest.total)
        for key, new in _candidates(config, current)
        if (after := estimate(with_value(config, key, new))).fullest
    ]
    peak = current.fullest.total if current.fullest else 0
    helping = [saving for saving in all_savings if saving.total < 0.99 * peak]
    fitting = [saving for saving in helping if saving.total <= (limit or 0)]
    rest = [saving for saving in helping if saving not in fitting]
    return [*fitting, *sorted(rest, key=lambda saving: (saving.value is not True, saving.total))]


def _candidates(config: Experiment, current: MemoryPlan) -> Iterator[tuple[str, object]]:
    for key in SWITCHES:
        section = key.partition(".")[0]
        section = "actor" if section == "sft" and config.sft_only is not None else section
        if section in current.active and config_value(config, key) is not True and is_supported(config, key):
            yield key, True
    for learner in ("actor", "critic", "reference"):
        if learner in current.active:
            yield from _smaller_budgets(config, learner, inference=learner == "reference")
    if "actor" in current.active and config.scores_rollout:
        yield from _smaller_budgets(config, "actor", inference=True)
    if "rollout" in current.active:
        yield from (("rollout.max_concurrent", size) for size in _halves(config.rollout.max_concurrent, 1))


def is_supported(config: Experiment, switch: str) -> bool:
    """Megatron learners do not offload or shard, and an engine does not sleep if episodes continue during updates."""
    section, _, option = switch.partition(".")
    if option.startswith(("memory.", "sharding.")):
        return bool(getattr(config, section).backend != "megatron")
    return config.rollout.async_ratio == 0 or section != "rollout"


def _smaller_budgets(config: Experiment, learner: str, *, inference: bool) -> Iterator[tuple[str, object]]:
    budget = micro_batch_limits(config, learner, inference=inference)
    number, minimum = (budget.tokens, max_sequence_tokens(config)) if budget.tokens else (budget.sequences, 1)
    yield from ((budget.key, size) for size in _halves(number or 1, minimum))


def _halves(number: int, minimum: int) -> Iterator[int]:
    """Yield half of a number, a quarter, … down to the minimum."""
    while number > minimum:
        number = max(number // 2, minimum)
        yield number
