"""Check that a run fits into device memory, and suggest the settings that save most."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from quintet.config.composed import ComposedConfig, config_value, with_value
from quintet.config.native.experiment import Experiment
from quintet.config.plan.batches import max_sequence_tokens, micro_batch_limits
from quintet.config.plan.memory import GIB, MemoryPeak, MemoryPlan, plan_memory
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Placement
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

SWITCHES = {
    "actor.gradient_checkpointing": True,
    "actor.memory.offload_optimizer": True,
    "actor.memory.offload_parameters": True,
    "critic.memory.offload_optimizer": True,
    "critic.memory.offload_parameters": True,
    "reference.memory.offload_parameters": True,
    "rollout.engine_options.sleep_between_steps": True,
    "rollout.engine_options.offload": True,
}
"""Settings that save memory without changing results, the fastest first."""
LABELS = {"copies": "weights gathered or cast", "optimizer": "optimizer state", "cache": "KV cache"}
"""Names of parts of `MemoryUse` in messages where they are not the part's own."""
MAX_CHANGES = 3
"""Suggested settings in one message."""


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """A value for one key, and the largest peak with it, bytes."""

    key: str
    value: object
    total: int


def format_bytes(count: float) -> str:
    """Format bytes in GiB or MiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{-(-int(count) // 2**20)} MiB"


def memory_problems(
    composed: ComposedConfig, placement: Placement, models: Models, device_bytes: int
) -> Iterator[ConfigProblem]:
    """Yield a problem if the largest peak exceeds the device, with the settings that save most."""
    peak = plan_memory(composed.experiment, placement, models, device_bytes).fullest
    if peak is None or peak.total <= device_bytes:
        return
    savings = _combine(composed.experiment, placement, models, device_bytes)
    key = savings[0].key if savings else "policy.path"
    needed = f"{format_bytes(peak.total)} of {format_bytes(device_bytes)}"
    problem = f"device {peak.devices[0]} needs {needed} {peak.phase}: {_largest(peak)}"
    steps = ", ".join(f"{one.key}={format_value(one.value)} (then {format_bytes(one.total)})" for one in savings)
    fits = savings and savings[-1].total <= device_bytes
    hint = f"what helps most: {steps}" if savings else "use more devices or a smaller model"
    hint += "" if fits or not savings else "; more devices for the rest"
    value, source = composed.value(key), composed.source(key)
    yield ConfigProblem(key, value, source, problem, composed.translate_hint(hint))


def _combine(config: Experiment, placement: Placement, models: Models, device_bytes: int) -> list[MemorySaving]:
    """Return the best settings, one after another until the run fits, at most `MAX_CHANGES`."""
    chain: list[MemorySaving] = []
    while len(chain) < MAX_CHANGES and (not chain or chain[-1].total > device_bytes):
        best = next(iter(memory_savings(config, placement, models, device_bytes)), None)
        if best is None:
            break
        chain.append(best)
        config = with_value(config, best.key, best.value)
    return chain


def _largest(peak: MemoryPeak) -> str:
    """Describe the three largest parts of a peak."""
    parts = [
        (size, f"{LABELS.get(part, part)} of {name}")
        for name, use in peak.parts.items()
        for part, size in asdict(use).items()
    ]
    return ", ".join(f"{label} {format_bytes(size)}" for size, label in sorted(parts, reverse=True)[:3] if size)


def memory_savings(
    config: Experiment, placement: Placement, models: Models, device_bytes: int | None
) -> list[MemorySaving]:
    """Return the single settings that lower the largest peak.

    Those with which the run fits come first, in the order of `SWITCHES`; then the others, switches before smaller
    numbers and by how much they save.
    """
    current = plan_memory(config, placement, models, device_bytes)
    all_savings = [
        MemorySaving(key, new, after.fullest.total)
        for key, new in _candidates(config, current)
        if (after := plan_memory(with_value(config, key, new), placement, models, device_bytes)).fullest
    ]
    peak = current.fullest.total if current.fullest else 0
    helping = [saving for saving in all_savings if saving.total < 0.99 * peak]
    fitting = [saving for saving in helping if saving.total <= (device_bytes or 0)]
    rest = [saving for saving in helping if saving not in fitting]
    return [*fitting, *sorted(rest, key=lambda saving: (saving.value is not True, saving.total))]


def _candidates(config: Experiment, current: MemoryPlan) -> Iterator[tuple[str, object]]:
    for key, new in SWITCHES.items():
        section = key.partition(".")[0]
        if section in current.active and config_value(config, key) is not new and _is_supported(config, key):
            yield key, new
    for learner in ("actor", "critic", "reference"):
        if learner in current.active:
            yield from _smaller_budgets(config, learner, inference=learner == "reference")
    if "actor" in current.active and config.rollout.recompute_logprobs:
        yield from _smaller_budgets(config, "actor", inference=True)
    concurrent = config.rollout.max_concurrent
    yield from (("rollout.max_concurrent", size) for size in _halves(concurrent, 1))


def _is_supported(config: Experiment, switch: str) -> bool:
    """Megatron learners do not offload, and an engine does not sleep if episodes continue during updates."""
    section, _, option = switch.partition(".")
    if option.startswith("memory."):
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
