"""Rules about time, memory, failures and values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quintet.diagnosis.findings import Finding
from quintet.diagnosis.policy_rules import span
from quintet.diagnosis.rule_specs import Limits
from quintet.diagnosis.run_data import RunData
from quintet.diagnosis.series import Series, median, percent, text
from quintet.tracking.timing_tree import PREFIX

STEP = "timing_s/step"
VALIDATION = "timing_s/testing"
MEMORY = "perf/max_memory_rss_gb"
GPU_SHARE, GPU_PEAK, GPU_RETRIES = "perf/gpu_memory_share", "perf/max_memory_allocated_gb", "perf/gpu_alloc_retries"
LEARNERS = ("actor/", "critic/", "sft/", "train/loss", "train/grad_norm")
FAILED = ("trajectory/failed", "env/failed")
FAILED_SHARE = "trajectory/outcome/failed"
SHOWN = 4
"""Names that evidence lists."""


def non_finite(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report all metrics with such values at once; a loss or gradient first."""
    steps = {name: null_steps for name in run.names if (null_steps := run.metrics.null_steps(name))}
    if not steps:
        return
    names = sorted(steps, key=lambda name: (not name.startswith(LEARNERS), steps[name][0], name))
    shown = [f"{name} from step {steps[name][0]} on, in {len(steps[name])} steps" for name in names[:SHOWN]]
    more = f", and {len(names) - SHOWN} more metrics" if len(names) > SHOWN else ""
    yield run.finding(
        "non-finite",
        f"{', '.join(shown)}{more}",
        metric=names[0],
        steps=(steps[names[0]][0], steps[names[0]][-1]),
        critical=names[0].startswith(LEARNERS),
    )


def slow_phase(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report phases other than generation and updates that take a large part of the time."""
    if len(run.series(STEP)) < limits["steps"]:
        return
    # the first step compiles and allocates
    step_seconds = sum(run.series(STEP).values[1:])
    for name in (name for name in run.names if name.startswith(PREFIX)):
        phase = run.series(name)
        limit = limits.get(name.removeprefix(PREFIX))
        seconds = sum(phase.values[1:] if name != VALIDATION else phase.values)
        total = step_seconds + seconds if name == VALIDATION else step_seconds
        if limit is None or total <= 0 or median(phase.values) < limits["seconds"] or seconds / total <= limit:
            continue
        yield run.finding(
            "slow-phase",
            f"{name} takes {percent(seconds / total)} of the time, {text(seconds / len(phase))} s per step",
            metric=name,
            steps=phase.steps,
        )


def phase_grows(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report the phases that grow. A phase is left out if one of its parts grows, which is the cause."""
    step, tokens = run.series(STEP), run.series("perf/total_num_tokens")
    if len(step) < limits["steps"]:
        return
    more_tokens = tokens.end / tokens.start if len(tokens) >= limits["steps"] and tokens.start > 0 else 1.0
    growing = [
        phase
        for phase in map(run.series, run.names)
        if phase.name.startswith(PREFIX) and len(phase) >= limits["steps"] and _grows(phase, limits, more_tokens)
        if phase.end >= limits["share"] * step.end
    ]
    parts = [phase for phase in growing if phase.name not in (STEP, f"{PREFIX}gen")] or growing
    for phase in parts:
        high = phase.above(limits["times"] * phase.start)
        evidence = f"{phase.name} took {text(phase.start)} s in the first steps, and {text(phase.end)} s at the end"
        steps = span(high) if high else phase.steps
        yield run.finding("phase-grows", evidence, metric=phase.name, steps=steps)


def _grows(phase: Series, limits: Limits, more_tokens: float) -> bool:
    return phase.rises and phase.start > 0 and phase.end / phase.start > limits["times"] * max(1.0, more_tokens)


def waiting(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a learner that waits for episodes."""
    step = run.series(STEP)
    if len(step) < limits["steps"] or not sum(step.values):
        return
    for wait in run.matching("channel/{name*}/get_seconds"):
        share = sum(wait.values) / sum(step.values)
        if "group" in wait.name and share > limits["share"]:
            yield run.finding(
                "waiting", f"{wait.name} is {percent(share)} of {STEP}", metric=wait.name, steps=wait.steps
            )


def memory_grows(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report resident memory that grows until the end of the run."""
    memory = run.series(MEMORY)
    if len(memory) < limits["steps"]:
        return
    early, late = memory.values[len(memory) // 10], memory.values[len(memory) * 2 // 3]
    last = memory.values[-1]
    has_grown = last > (1 + limits["share"]) * early and last - early > limits["gigabytes"]
    if has_grown and last > (1 + limits["rest"]) * late:
        per_step = (last - late) / max(1, memory.steps[-1] - memory.steps[len(memory) * 2 // 3])
        yield run.finding(
            "memory-grows",
            f"{MEMORY} was {text(early)} GB early in the run and is {text(last)} GB, {text(1000 * per_step)} MB more"
            " with every step of the last third",
            metric=MEMORY,
            steps=(memory.steps[len(memory) // 10], memory.steps[-1]),
        )


def gpu_memory_full(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report GPU memory that tensors nearly fill, or that allocations find full."""
    share, peak, retries = run.series(GPU_SHARE), run.series(GPU_PEAK), run.series(GPU_RETRIES)
    if len(share) and share.values[-1] > limits["share"]:
        size = f", {text(peak.values[-1])} GiB" if len(peak) else ""
        yield run.finding(
            "gpu-memory-full",
            f"{GPU_SHARE} is {percent(share.values[-1])}{size}",
            metric=GPU_SHARE,
            steps=(_first_above(share, limits["share"]), share.steps[-1]),
            critical=share.values[-1] > limits["worse"],
        )
        return
    counts = zip(retries.steps[1:], retries.values, retries.values[1:], strict=False)
    steps = [step for step, before, now in counts if now > before]
    if len(steps) >= limits["count"] and len(steps) > limits["often"] * len(retries):
        yield run.finding(
            "gpu-memory-full",
            f"allocations found the memory full in {len(steps)} of {len(retries)} steps ({GPU_RETRIES})",
            metric=GPU_RETRIES,
            steps=steps,
        )


def _first_above(series: Series, limit: float) -> int:
    return next(step for step, value in zip(series.steps, series.values, strict=True) if value > limit)


def episodes_fail(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report failed episodes, with the places and kinds of the failures."""
    failed = run.first_of(FAILED)
    if failed is None or not any(failed.values):
        return
    steps = [step for step, value in zip(failed.steps, failed.values, strict=True) if value > 0]
    shares = run.series(FAILED_SHARE).values
    share = sum(shares) / len(shares) if shares else 0.0
    is_often = len(steps) >= limits["count"] and len(steps) > limits["often"] * len(failed)
    if share <= limits["share"] and not is_often:
        return
    kinds = sorted(run.matching("trajectory/failures/{where}/{kind}"), key=lambda each: -sum(each.values))
    listed = ", ".join(f"{sum(kind.values):g} × {kind.name.split('/', 2)[2]}" for kind in kinds[:SHOWN])
    share_text = f", {percent(share)} of all" if shares else ""
    example = next(filter(None, (file.failure for file in run.files)), None)
    yield run.finding(
        "episodes-fail",
        f"{sum(failed.values):g} episodes{share_text}, in {len(steps)} of {len(failed)} steps"
        + (f" ({listed})" if listed else "")
        + (f"; {example}" if example else ""),
        metric=failed.name,
        steps=steps,
        critical=share > limits["worse"],
    )


def scores_fail(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report rewards that could not be computed."""
    for name in ("reward/failed", "state_reward/failed"):
        failed = run.series(name)
        steps = [step for step, value in zip(failed.steps, failed.values, strict=True) if value > 0]
        if len(steps) >= limits["count"] and len(steps) > limits["often"] * len(failed):
            yield run.finding(
                "scores-fail",
                f"{name}: {sum(failed.values):g} in {len(steps)} of {len(failed)} steps",
                metric=name,
                steps=steps,
            )


def tool_calls_fail(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report tool calls that return errors."""
    calls, failed = run.series("tool/calls"), run.series("tool/failed_calls")
    if not len(calls) or len(calls) != len(failed):
        return
    half = len(calls) // 2
    total, lost = sum(calls.values[half:]), sum(failed.values[half:])
    if total >= limits["calls"] and lost > limits["share"] * total:
        yield run.finding(
            "tool-calls-fail",
            f"{lost:g} of {total:g} calls failed since step {calls.steps[half]}",
            metric=failed.name,
            steps=(calls.steps[half], calls.steps[-1]),
        )


def restarts(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report restarts of engines and of hosts of environments."""
    for name, noun in (("engine/restarts", "engine restarts"), ("env/episodes_reassigned", "episodes started again")):
        events = run.series(name)
        steps = [step for step, value in zip(events.steps, events.values, strict=True) if value > 0]
        if steps:
            count = sum(events.values)
            is_often = len(steps) >= limits["count"]
            yield run.finding(
                "restarts", f"{count:g} {noun}, in steps {_listed(steps)}", metric=name, steps=steps, critical=is_often
            )


def _listed(steps: Sequence[int]) -> str:
    """Return the first steps of a list.

    >>> _listed([3, 5, 8, 9, 12])
    '3, 5, 8, 9, …'
    """
    return ", ".join(map(str, steps[:SHOWN])) + (", …" if len(steps) > SHOWN else "")
