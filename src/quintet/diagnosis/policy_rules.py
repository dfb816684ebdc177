"""Rules about the updates: entropy, clipping, divergences, gradients, the critic, engine and learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quintet.diagnosis.findings import Finding
from quintet.diagnosis.rule_specs import Limits
from quintet.diagnosis.run_data import RunData
from quintet.diagnosis.series import Block, Series, median, percent, text

ENTROPY = "actor/entropy"
NEIGHBOURS = 20
"""Steps whose median a gradient is compared with."""
DRIFT = {
    "training/rollout_probs_diff_beyond": "beyond",
    "rollout_corr/kl": "kl",
    "training/rollout_probs_diff_mean": "mean",
}


def span(blocks: Sequence[Block]) -> tuple[int, int]:
    """Return the first and the last step of blocks."""
    return blocks[0].first_step, blocks[-1].last_step


def entropy_collapse(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report entropy near 0 before success."""
    entropy, success = run.series(ENTROPY), run.success
    if len(entropy) < limits["steps"] or (success is not None and success.end >= limits["solved"]):
        return
    limit = min(limits["share"] * entropy.start, limits["nats"])
    low = entropy.below(limit)
    if low and entropy.end < limit:
        score = run.score
        later = None if score is None else score.since(low[0].first_step)
        is_stuck = later is None or len(later) < 2 or not later.rises
        evidence = f"{ENTROPY} was {text(entropy.start)} nats in the first steps, and is {text(entropy.end)} at the end"
        rest = "" if score is None else f"; {score.name} has {'not ' if is_stuck else ''}risen since"
        yield run.finding("entropy-collapse", evidence + rest, metric=ENTROPY, steps=span(low), critical=is_stuck)


def entropy_explosion(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report entropy far above the entropy at the beginning."""
    entropy, score = run.series(ENTROPY), run.score
    if len(entropy) < limits["steps"]:
        return
    limit = max(limits["times"] * entropy.start, entropy.start + limits["nats"])
    high = entropy.above(limit)
    if high and entropy.end > limit:
        yield run.finding(
            "entropy-explosion",
            f"{ENTROPY} was {text(entropy.start)} nats in the first steps, and is {text(entropy.end)} at the end",
            metric=ENTROPY,
            steps=span(high),
            critical=score is not None and score.falls,
        )


def _above_at_end(
    run: RunData, rule: str, name: str, limit: float, steps: float, *, unit: str = ""
) -> Iterator[Finding]:
    """Yield a finding if the medians at the end are above a limit."""
    series = run.series(name)
    high = series.above(limit)
    if len(series) >= steps and len(high) >= 2:
        peak = max(block.median for block in high)
        evidence = (
            f"{name} is {text(series.end)}{unit} at the end, up to {text(peak)}; healthy runs are below {limit:g}"
        )
        yield run.finding(rule, evidence, metric=name, steps=span(high))


def clipping(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report that most of the probability ratios are clipped."""
    yield from _above_at_end(run, "clipping", "actor/pg_clipfrac", limits["share"], limits["steps"])


def policy_jumps(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a large divergence of the updated policy from the rollout policy."""
    yield from _above_at_end(run, "policy-jumps", "actor/ppo_kl", limits["nats"], limits["steps"], unit=" nats")


def reference_kl(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a large divergence from the reference policy that continues to rise."""
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        if len(run.series(name)) >= limits["steps"] and run.series(name).rises:
            yield from _above_at_end(run, "reference-kl", name, limits["nats"], limits["steps"], unit=" nats")


def gradient_spikes(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report single steps with a gradient norm far above the surrounding steps."""
    for name in ("actor/grad_norm", "critic/grad_norm", "train/grad_norm"):
        norms = run.series(name)
        spikes = _spikes(norms, limits["times"]) if len(norms) >= limits["steps"] else []
        if len(spikes) >= limits["count"]:
            largest = max(spikes, key=lambda spike: spike[1])
            evidence = (
                f"{name} has {len(spikes)} spikes above {limits['times']:g} times the median, the largest at step"
                f" {largest[0]}: {text(largest[1])} (median {text(median(norms.values))})"
            )
            steps = (spikes[0][0], spikes[-1][0])
            yield run.finding("gradient-spikes", evidence, metric=name, steps=steps)


def _spikes(norms: Series, times: float) -> list[tuple[int, float]]:
    """Return steps and values above a multiple of the median of the values around them."""
    spikes = []
    for first in range(0, len(norms), NEIGHBOURS):
        around = norms.values[max(0, first - NEIGHBOURS // 2) : first + NEIGHBOURS + NEIGHBOURS // 2]
        limit = times * median(around)
        neighbours = zip(norms.steps[first : first + NEIGHBOURS], norms.values[first : first + NEIGHBOURS], strict=True)
        spikes += [(step, value) for step, value in neighbours if value > limit > 0]
    return spikes


def gradient_growth(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a gradient that grows over the run."""
    for name in ("actor/grad_norm", "critic/grad_norm", "train/grad_norm"):
        norms = run.series(name)
        if len(norms) < limits["steps"] or not norms.rises or norms.end <= limits["times"] * norms.start:
            continue
        high = norms.above(limits["times"] * norms.start)
        evidence = f"the median of {name} was {text(norms.start)} at the beginning, and is {text(norms.end)} at the end"
        steps = span(high) if high else norms.steps
        yield run.finding("gradient-growth", evidence, metric=name, steps=steps)


def skipped_updates(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report updates that were skipped, or stopped early in most of the steps."""
    for name in ("actor/skipped_updates", "critic/skipped_updates", "actor/stopped_updates", "train/skipped_updates"):
        skipped = run.series(name)
        steps = [step for step, value in zip(skipped.steps, skipped.values, strict=True) if value > 0]
        share = len(steps) / max(1, len(skipped))
        # early stopping by the ratio is wanted, unless it stops most steps
        limit = 0.5 * len(skipped) if name == "actor/stopped_updates" else 0
        if sum(skipped.values) >= limits["count"] and len(steps) > limit:
            yield run.finding(
                "skipped-updates",
                f"{name}: {sum(skipped.values):g} updates in {len(steps)} of {len(skipped)} steps",
                metric=name,
                steps=steps,
                critical=share > limits["share"] and limit == 0,
            )


def critic_explains_nothing(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a critic whose values are no better than their mean."""
    explained, name = run.series("critic/vf_explained_var"), "critic/vf_explained_var"
    if len(explained) < limits["steps"] or _has_constant_reward(run):
        return
    late = explained.values[len(explained) // 2 :]
    value = median(late)
    if value < limits["share"]:
        yield run.finding(
            "critic-explains-nothing",
            f"the median of {name} over the last {len(late)} steps is {text(value)}",
            metric=name,
            steps=(explained.steps[len(explained) // 2], explained.steps[-1]),
            critical=value < limits["worse"],
        )


def _has_constant_reward(run: RunData) -> bool:
    """Return whether all episodes of most steps have the same reward, which leaves a critic nothing to explain."""
    highest, lowest = run.series("critic/score/max"), run.series("critic/score/min")
    pairs = list(zip(highest.values, lowest.values, strict=False))
    return bool(pairs) and sum(high == low for high, low in pairs) > len(pairs) / 2


def engine_drift(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report the first of the metrics that shows a gap: they measure the same."""
    for name, key in DRIFT.items():
        series, limit = run.series(name), limits[key]
        high = series.above(limit)
        if len(series) >= limits["steps"] and high:
            shown = percent(series.end) + " of the tokens" if key == "beyond" else text(series.end)
            since = f"above {limit:g} since step {high[0].first_step}"
            yield run.finding(
                "engine-drift",
                f"{name} is {shown} at the end, {since}",
                metric=name,
                steps=span(high),
                critical=series.end > limits["times"] * limit,
            )
            return
