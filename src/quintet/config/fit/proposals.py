"""Proposals for `quintet plan --fit`: parallel sizes, micro-batch budgets and offloads with which a run fits into the
memory of given devices, ranked by estimated step time.

Learners and engines are varied separately (`variants.py`); of variants with the same parallel sizes only those are
combined that no other one beats in time, memory and number of changes. The best combinations are read back as overrides
in the format of the user (`overrides.py`), and proposals have the estimates of what was read.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from quintet.config.composed import ComposedConfig, with_values
from quintet.config.fit.overrides import Changes, Reload, read_back, to_overrides
from quintet.config.fit.variants import Cluster, Progress, Variant, VariantSearch, undominated
from quintet.config.plan.format_sizes import format_bytes
from quintet.config.plan.memory import PHASES, MemoryPeak, largest_parts, memory_peaks, plan_memory
from quintet.config.plan.models import Models, UnknownModel, find_models
from quintet.config.plan.parallelism import Parallelism
from quintet.config.plan.placement import LEARNERS, Placement, place_components
from quintet.config.plan.step_time import Seconds, step_seconds, total_seconds
from quintet.errors import ConfigError

EQUAL_TIMES = 1.05
"""Ratio of step times that count as equal: the estimates are not more precise than that."""
MAX_READ_BACK = 16
"""Combinations that are read back at most, in search of proposals."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration that fits."""

    overrides: tuple[str, ...]
    """`KEY=VALUE` in the format of the user."""
    composed: ComposedConfig
    """The configuration with the overrides."""
    placement: Placement
    peak: MemoryPeak
    seconds: Seconds

    @property
    def step_seconds(self) -> float:
        return total_seconds(self.composed.experiment, self.seconds)

    @property
    def reason(self) -> str:
        """The phase that takes longest, and what limits memory."""
        phase, longest = max(self.seconds.items(), key=lambda item: item[1])
        fullest = f"memory is fullest {self.peak.phase}: {largest_parts(self.peak, 1)}"
        return f"{phase} takes {longest / self.step_seconds:.0%} of the step; {fullest}"


@dataclass(frozen=True, slots=True)
class FitResult:
    """Proposals, the fastest first, and why other combinations were rejected."""

    proposals: tuple[Proposal, ...]
    considered: int
    """Combinations, and parallel sizes that were rejected before they were combined."""
    rejected: Counter[str]


@dataclass(frozen=True, slots=True)
class _Combination:
    """A variant of the learners with one of the engines."""

    learner: Variant
    engine: Variant
    bytes: int
    """Peak of all devices."""

    @property
    def seconds(self) -> float:
        return self.learner.seconds + self.engine.seconds

    def rank(self, fastest: float) -> tuple[int, ...]:
        """Return a key that sorts faster ones first, then those that change fewer parallel sizes, then those that
        change less, then those that need less memory."""
        sizes = self.learner.changed_sizes + self.engine.changed_sizes
        changes = len(self.learner.changes) + len(self.engine.changes)
        return (_time_class(self.seconds, fastest), sizes, changes, self.bytes)


@dataclass(slots=True)
class _Combinations:
    """The best combination that fits for each choice of parallel sizes, and what became of the others."""

    best: list[_Combination] = field(default_factory=list)
    considered: int = 0
    closest: _Combination | None = None
    """The combination that needs least memory."""
    invalid: Counter[str] = field(default_factory=Counter)
    """Why combinations were not valid when they were read back."""


def _time_class(seconds: float, fastest: float) -> int:
    """Return a number that is the same for times that count as equal, 0 for those that equal the fastest."""
    return math.floor(math.log(seconds / fastest, EQUAL_TIMES))


def _by_rank(combinations: Sequence[_Combination]) -> list[_Combination]:
    fastest = min((combination.seconds for combination in combinations), default=0.0)
    return sorted(combinations, key=lambda combination: combination.rank(fastest))


def find_fits(
    composed: ComposedConfig, cluster: Cluster, reload: Reload, count: int = 5, progress: Progress = lambda _: None
) -> FitResult:
    """Return the fastest configurations that fit, at most one for each choice of parallel sizes. `progress` is called
    with the number of parallel sizes that were considered.

    Raises:
        ConfigError: the run is not reinforcement learning, its model is unknown, or nothing fits.
    """
    models = _models(composed)
    base = with_values(composed, cluster.changes(composed))
    for learners in _learners_to_vary(composed):
        search = VariantSearch(composed, base, cluster, models, learners, progress)
        combinations = _combine_all(search)
        proposals = _read_best(search, combinations, reload, count)
        if proposals:
            return FitResult(tuple(proposals), combinations.considered, search.rejected + combinations.invalid)
    raise _nothing_fits(search, combinations)


def _models(composed: ComposedConfig) -> Models:
    """Return the models of the run.

    Raises:
        ConfigError: the run is not reinforcement learning, or the policy is unknown.
    """
    config, models = composed.experiment, find_models(composed.experiment)
    if config.sft_only or config.evaluation or config.generation or config.validation.only:
        raise ConfigError("--fit proposes settings for reinforcement learning, and this run does something else")
    if isinstance(models.policy, UnknownModel):
        message = f"--fit needs the sizes of the model: {models.policy.reason}"
        raise ConfigError(message, key="policy.path", hint=models.policy.hint)
    return models


def _learners_to_vary(composed: ComposedConfig) -> Iterator[tuple[str, ...]]:
    """Yield all learners of the run; then, in another framework's format, those for which it has sizes: the others may
    follow the actor, or be fixed."""
    placement = place_components(composed.experiment)
    learners = tuple(name for name in LEARNERS if placement.of(name))
    yield learners
    hints = {name: [f"{name}.parallel.{size}=2" for size in ("tensor", "ulysses")] for name in learners}
    with_sizes = tuple(name for name in learners if any(map(composed.translate_hint, hints[name])))
    if with_sizes not in ((), learners):
        yield with_sizes


def _combine_all(search: VariantSearch) -> _Combinations:
    """Combine all variants, and count those that do not fit."""
    combinations, usable = _Combinations(), search.cluster.usable_bytes
    engines = [undominated(search.engine_variants(size)) for size in search.engine_sizes()]
    for layout in search.layouts():
        learners = undominated(search.learner_variants(layout))
        for variants in engines:
            pairs = list(_combine(search, learners, variants))
            fitting = [pair for pair in pairs if pair.bytes <= usable]
            combinations.best += _by_rank(fitting)[:1]
            combinations.considered += len(fitting)
            nearest = filter(None, [combinations.closest, *pairs])
            combinations.closest = min(nearest, key=lambda pair: pair.bytes, default=None)
    combinations.considered += search.rejected.total()
    return combinations


def _combine(search: VariantSearch, learners: Sequence[Variant], engines: Sequence[Variant]) -> Iterator[_Combination]:
    """Yield all combinations, and count those that do not fit."""
    for learner, engine in product(learners, engines):
        needs = list(zip(learner.needs, engine.needs, strict=True))
        learning = max((active + waiting for (active, _), (_, waiting) in needs), default=0)
        generating = max((waiting + active for (_, waiting), (active, _) in needs), default=0)
        size = max(learning, generating)
        if size > search.cluster.usable_bytes:
            phase = "while learners compute" if size == learning else PHASES["rollout"]
            search.rejected[f"too little memory {phase}"] += 1
        yield _Combination(learner, engine, size)


def _changes(search: VariantSearch, combination: _Combination) -> Changes:
    placed = search.differing(search.cluster.changes(search.user))
    return {**placed, **combination.learner.changes, **combination.engine.changes}


def _read_best(search: VariantSearch, combinations: _Combinations, reload: Reload, count: int) -> list[Proposal]:
    """Return the best combinations that are valid overrides and then still fit, by their time.

    Overrides that an error names are not tried together again.
    """
    proposals: dict[tuple[Parallelism, ...], Proposal] = {}
    tried: set[frozenset[str]] = set()
    refused: list[frozenset[str]] = []
    for combination in _by_rank(combinations.best):
        overrides = to_overrides(search.user, _changes(search, combination))
        words = frozenset(overrides)
        if words in tried or any(named <= words for named in refused):
            continue
        if len(proposals) == count or len(tried) == MAX_READ_BACK:
            break
        tried.add(words)
        try:
            proposal = _propose(search, overrides, reload)
        except ConfigError as error:
            combinations.invalid[error.message.splitlines()[0]] += 1
            named = frozenset(word for word in words if word.partition("=")[0] in str(error))
            refused += [named] if named else []
        else:
            sizes = tuple(component.parallelism for component in proposal.placement.components)
            proposals.setdefault(sizes, proposal)
    fastest = min((proposal.step_seconds for proposal in proposals.values()), default=0.0)
    return sorted(proposals.values(), key=lambda proposal: _time_class(proposal.step_seconds, fastest))


def _propose(search: VariantSearch, overrides: Sequence[str], reload: Reload) -> Proposal:
    """Return the proposal with these overrides.

    Raises:
        ConfigError: they are invalid or change results, or the run then has other devices or does not fit.
    """
    overrides, composed = read_back(search.user, overrides, reload)
    config = composed.experiment
    placement = place_components(composed.experiment)
    cluster = search.cluster
    if len(placement.devices) != cluster.devices:
        raise ConfigError(f"the run would have {len(placement.devices)} of {cluster.devices} devices")
    memory = plan_memory(config, placement, search.models, cluster.device_bytes)
    if memory.fullest is None or memory.fullest.total > cluster.usable_bytes:
        raise ConfigError("too little memory, because settings depend on one another in this format")
    seconds = step_seconds(config, placement, search.models, memory, cluster.figures)
    return Proposal(tuple(overrides), composed, placement, memory.fullest, seconds)


def _nothing_fits(search: VariantSearch, combinations: _Combinations) -> ConfigError:
    """Return an error with the combination that needs least memory, what it lacks, and what would help."""
    cluster, closest = search.cluster, combinations.closest
    where = f"{cluster.devices} device{'s' * (cluster.devices > 1)} of {format_bytes(cluster.device_bytes)}"
    if closest is None:
        return _no_valid_sizes(search, where)
    words = " ".join(to_overrides(search.user, _changes(search, closest))) or "the configuration as it is"
    peak = _peak(search, closest)
    if closest.bytes <= cluster.usable_bytes:
        (reason, _), *_ = combinations.invalid.most_common(1)
        message = f"no combination that fits into {where} is valid in the format of this configuration"
        message += f"\n  most often: {reason}\n  for example: {words}"
    else:
        missing = closest.bytes - cluster.usable_bytes
        message = f"no combination fits into {where}, of which {format_bytes(cluster.usable_bytes)} are usable"
        message += f"\n  closest: {words}\n  it needs {format_bytes(closest.bytes)} {peak.phase}, "
        message += f"{format_bytes(missing)} too much: {largest_parts(peak)}"
    return ConfigError(message, key="--fit", hint=_what_helps(search, peak))


def _peak(search: VariantSearch, combination: _Combination) -> MemoryPeak:
    active = {**combination.learner.active, **combination.engine.active}
    idle = {**combination.learner.waiting, **combination.engine.waiting}
    peaks = memory_peaks(search.groups, active, idle if search.placement.colocated else active)
    return max(peaks, key=lambda peak: peak.total)


def _no_valid_sizes(search: VariantSearch, where: str) -> ConfigError:
    """Return an error with the problem that most parallel sizes have."""
    message = f"no parallel sizes are valid on {where}"
    if not search.problems:
        return ConfigError(f"{message}: the format of this configuration has no keys for them", key="--fit")
    (problem, _), *_ = Counter(map(str, search.problems)).most_common(1)
    return ConfigError(f"{message}; most often: {problem}", key="--fit")


def _what_helps(search: VariantSearch, peak: MemoryPeak) -> str:
    """Return what lowers the largest part of a peak: states of models, or what grows with the tokens."""
    config = search.user.experiment
    states = sum(use.weights + use.copies + use.gradients + use.optimizer for use in peak.parts.values())
    changes = [f"rollout.max_response_tokens={max(1, config.rollout.max_response_tokens // 2)}"]
    if 2 * states > peak.total:
        changes = ["policy.lora.rank=16"] if config.policy.lora is None else []
    others = filter(None, map(search.user.translate_hint, changes))
    # states are divided by the devices; models and batches by powers of two
    times = 1 << max(1, math.ceil(math.log2(peak.total / search.cluster.usable_bytes)))
    return ", or ".join([f"what helps: --devices {times * search.cluster.devices}", *others, "a smaller model"])
