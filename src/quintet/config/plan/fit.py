"""Whether it all fits into the memory of a device, and which key helps most where it doesn't."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.faults import Fault
from quintet.config.keys import show
from quintet.config.plan.batches import budget_of, longest
from quintet.config.plan.memory import GIB, Memory, Peak, memory
from quintet.config.plan.models import Models
from quintet.config.plan.placement import Placement
from quintet.config.plan.values import source, value, with_value

if TYPE_CHECKING:
    from quintet.config.compose import Composed
    from quintet.config.native import Experiment

__all__ = ["gib", "memory_faults", "remedies"]

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
"""What saves memory without another result, the cheapest in time first."""
WORDS = {
    "weights": "weights",
    "copies": "weights gathered or cast",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits",
    "cache": "KV cache",
}


MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Remedy:
    """Another value for one key, and the fullest device then."""

    key: str
    value: object
    total: int


def gib(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{-(-int(count) // 2**20)} MiB"


def memory_faults(composed: Composed, placement: Placement, models: Models, device_bytes: int) -> Iterator[Fault]:
    """The fullest device where it needs more than there is, told by the key that helps most."""
    peak = memory(composed.experiment, placement, models, device_bytes).fullest
    if peak is None or peak.total <= device_bytes:
        return
    chain = _chain(composed.experiment, placement, models, device_bytes)
    key = chain[0].key if chain else "policy.path"
    problem = f"device {peak.devices[0]} needs {gib(peak.total)} of {gib(device_bytes)} {peak.phase}: {_largest(peak)}"
    told = ", ".join(f"{one.key}={show(one.value)} (then {gib(one.total)})" for one in chain)
    enough = chain and chain[-1].total <= device_bytes
    hint = f"what helps most: {told}" if chain else "nothing but more devices or a smaller model helps"
    hint += "" if enough or not chain else "; more devices for the rest"
    yield Fault(key, value(composed.experiment, key), source(composed, key), problem, hint)


def _chain(config: Experiment, placement: Placement, models: Models, device_bytes: int) -> list[Remedy]:
    """One change after another until it fits, few enough to be read."""
    chain: list[Remedy] = []
    while len(chain) < MOST_CHANGES and (not chain or chain[-1].total > device_bytes):
        best = next(iter(remedies(config, placement, models, device_bytes)), None)
        if best is None:
            break
        chain.append(best)
        config = with_value(config, best.key, best.value)
    return chain


def _largest(peak: Peak) -> str:
    """The three largest things on it."""
    parts = [
        (getattr(load, part), f"{word} of {name}") for name, load in peak.parts.items() for part, word in WORDS.items()
    ]
    return ", ".join(f"{words} {gib(size)}" for size, words in sorted(parts, reverse=True)[:3] if size)


def remedies(config: Experiment, placement: Placement, models: Models, device_bytes: int | None) -> list[Remedy]:
    """Changes of one key that make the fullest device emptier: those that make it fit first, the cheapest of them
    before the others; then switches before smaller numbers, those that help most first."""
    now = memory(config, placement, models, device_bytes)
    found = [
        Remedy(key, new, after.fullest.total)
        for key, new in _candidates(config, now)
        if (after := memory(with_value(config, key, new), placement, models, device_bytes)).fullest
    ]
    before = now.fullest.total if now.fullest else 0
    helping = [remedy for remedy in found if remedy.total < 0.99 * before]
    fitting = [remedy for remedy in helping if remedy.total <= (device_bytes or 0)]
    rest = [remedy for remedy in helping if remedy not in fitting]
    return [*fitting, *sorted(rest, key=lambda remedy: (remedy.value is not True, remedy.total))]


def _candidates(config: Experiment, now: Memory) -> Iterator[tuple[str, object]]:
    for key, new in SWITCHES.items():
        section = key.partition(".")[0]
        if section in now.working and value(config, key) is not new:
            yield key, new
    for learner in ("actor", "critic", "reference"):
        if learner in now.working:
            yield from _smaller_budgets(config, learner, inference=learner == "reference")
    if "actor" in now.working and config.rollout.recompute_logprobs:
        yield from _smaller_budgets(config, "actor", inference=True)
    concurrent = config.rollout.max_concurrent
    yield from (("rollout.max_concurrent", size) for size in _halves(concurrent, 1))


def _smaller_budgets(config: Experiment, learner: str, *, inference: bool) -> Iterator[tuple[str, object]]:
    budget = budget_of(config, learner, inference=inference)
    number, least = (budget.tokens, longest(config)) if budget.tokens else (budget.sequences, 1)
    yield from ((budget.key, size) for size in _halves(number or 1, least))


def _halves(number: int, least: int) -> Iterator[int]:
    """Half of it, a quarter, … down to the least that makes sense."""
    while number > least:
        number = max(number // 2, least)
        yield number
