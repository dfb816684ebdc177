"""Rules about rewards: groups without signal, no learning, collapse, overfitting, reward without success."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quintet.diagnosis.findings import Finding
from quintet.diagnosis.policy_rules import span
from quintet.diagnosis.rule_specs import Limits, rule_specs
from quintet.diagnosis.run_data import RunData
from quintet.diagnosis.series import CERTAINTY, MEDIAN_ERROR, Block, Series, median, percent, text

SIGNAL = "training/groups_with_signal"
VALIDATION = ("val/{env}/success_rate", "val/{env}/reward", "val-core/{source*}/{part}/{statistic*}")


def _without_signal(run: RunData, limits: Limits) -> list[Block]:
    """Return the last steps in which nearly no group has a signal; none if the advantages compare no groups."""
    signal = run.series(SIGNAL)
    if run.composed is not None:
        compares_groups = run.composed.experiment.algorithm.advantage.needs_several_samples
    else:
        compares_groups = not len(run.series("critic/vf_loss"))
    if not compares_groups or len(signal) < limits["steps"]:
        return []
    low = signal.below(limits["share"])
    return low if len(low) >= 2 else []


def _solved(run: RunData, step: int) -> float | None:
    """Return the share of solved episodes since a step; without it, where the mean reward is between its extremes."""
    if run.success is not None:
        late = run.success.since(step)
        return median(late.values) if len(late) else None
    score, highest = run.score, run.series("critic/score/max")
    if score is None or not len(highest):
        return None
    low, high = min(run.series("critic/score/min").values, default=0.0), max(highest.values)
    late = score.since(step)
    return (median(late.values) - low) / (high - low) if len(late) and high > low else None


def no_group_solved(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report groups without signal in which no episode is solved."""
    low = _without_signal(run, limits)
    solved = _solved(run, low[0].first_step) if low else None
    if solved is not None and solved < limits["solved"]:
        yield _signal_finding(run, "no-group-solved", low, solved)


def all_groups_solved(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report groups without signal in which all episodes are solved."""
    low = _without_signal(run, limits)
    solved = _solved(run, low[0].first_step) if low else None
    if solved is not None and solved > limits["solved"]:
        yield _signal_finding(run, "all-groups-solved", low, solved)


def groups_alike(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report groups without signal that are solved or lost as a whole."""
    specs = rule_specs()
    if low := _without_signal(run, limits):
        solved = _solved(run, low[0].first_step)
        min_solved, max_solved = (specs[name].limits["solved"] for name in ("no-group-solved", "all-groups-solved"))
        if solved is None or min_solved <= solved <= max_solved:
            yield _signal_finding(run, "groups-alike", low, solved)


def _signal_finding(run: RunData, rule: str, low: list[Block], solved: float | None) -> Finding:
    share = "" if solved is None else f", and {percent(solved)} of the episodes are solved"
    constant = _constant_reward(run)
    same = "" if constant is None else f"; every reward of the run is {text(constant)}"
    evidence = f"{SIGNAL} has been {percent(low[-1].median)} since step {low[0].first_step}{share}{same}"
    remedies = [] if constant is None else ["check-reward"]
    is_critical = rule != "all-groups-solved"
    return run.finding(rule, evidence, metric=SIGNAL, steps=span(low), critical=is_critical, remedies=remedies)


def _constant_reward(run: RunData) -> float | None:
    """Return the reward of every episode of the run, None if they differ or are not logged."""
    values = {value for name in ("min", "max") for value in run.series(f"critic/score/{name}").values}
    return values.pop() if len(values) == 1 else None


def no_learning(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a reward that never rose, with likely causes."""
    score, success = run.score, run.success
    if score is None or len(score) < limits["steps"] or _has_risen(score):
        return
    if success is not None and (success.end >= limits["solved"] or _has_risen(success)):
        return
    causes = dict(_causes(run))
    evidence = (
        f"{score.name} was {text(score.start)} at the beginning, and is {text(score.end)} after {len(score)} steps"
    )
    likely = f"; likely because {' and '.join(causes)}" if causes else ""
    yield run.finding(
        "no-learning",
        evidence + likely,
        metric=score.name,
        steps=score.steps,
        critical=bool(causes) or score.is_constant,
        remedies=[*causes.values()],
    )


def _has_risen(score: Series) -> bool:
    """Return whether the reward was once above its beginning by more than noise, or its last third above the first.

    Thirds have more values, so that half of the certainty is enough.
    """
    third = len(score) // 3
    rise = median(score.values[-third:]) - median(score.values[:third])
    error = MEDIAN_ERROR * score.noise * math.sqrt(2 / third)
    peak = max((block.median for block in score.blocks(score.window)), default=score.end)
    has_peak = peak - score.start > max(CERTAINTY * score.error, 0.1 * abs(score.start))
    return score.rises or has_peak or rise > max(CERTAINTY / 2 * error, 0.05 * abs(score.start))


def _causes(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield likely causes that the metrics show, each with the remedy against it."""
    constant = _constant_reward(run)
    if constant is not None:
        yield f"every reward is {text(constant)} (critic/score/min, critic/score/max)", "check-reward"
    rate, norm = run.series("actor/lr"), run.series("actor/grad_norm")
    signal, ratio = run.series(SIGNAL), run.series("actor/stopped_updates")
    if len(rate) and not any(rate.values):
        yield "the learning rate is 0 (actor/lr)", "some-learning-rate"
    if len(signal) and median(signal.values) < 0.05 and not len(run.series("critic/vf_loss")):
        yield f"nearly no group has a signal ({SIGNAL})", "refill-groups"
    elif len(norm) and median(norm.values) < 1e-8:
        yield "the gradient is 0 (actor/grad_norm)", "reward-scale"
    if run.series("actor/skipped_updates").values and median(run.series("actor/skipped_updates").values) > 0:
        yield "updates are skipped (actor/skipped_updates)", "smaller-steps"
    if len(ratio) and median(ratio.values) > 0:
        yield "updates stop early (actor/stopped_updates)", "smaller-steps"


def reward_collapse(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a reward that rose and fell again."""
    score = run.score
    if score is None or len(score) < limits["steps"]:
        return
    blocks = score.blocks(score.window)
    best = max(blocks, key=lambda block: block.median)
    rise, loss = best.median - score.start, best.median - score.end
    is_rise = rise > max(CERTAINTY * score.error, 0.1 * max(abs(value) for value in score.values))
    if is_rise and loss > max(limits["share"] * rise, CERTAINTY * score.error):
        yield run.finding(
            "reward-collapse",
            f"{score.name} rose from {text(score.start)} to {text(best.median)} around step {best.last_step}, and is"
            f" {text(score.end)} at the end",
            metric=score.name,
            steps=(best.last_step, score.steps[-1]),
            critical=True,
        )


def validation_falls(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report held-out scores that fall while training scores do not."""
    score, count = run.score, int(limits["count"])
    for held_out in run.matching(*VALIDATION):
        if len(held_out) < limits["validations"] or not _is_score(held_out.name):
            continue
        medians = held_out.rolling_medians(count)
        best = medians.index(max(medians))
        loss = medians[best] - medians[-1]
        scale = 1.0 if held_out.name.endswith("/success_rate") else _range(held_out, score)
        peak = held_out.steps[best + count - 1]
        later = None if score is None else score.since(peak)
        by_noise = CERTAINTY * MEDIAN_ERROR * held_out.noise * math.sqrt(2 / count)
        if loss <= max(limits["share"] * scale, by_noise) or (later is not None and len(later) > 1 and later.falls):
            continue
        training = "" if later is None or not len(later) else f", while {later.name} is {text(later.end)}"
        yield run.finding(
            "validation-falls",
            f"{held_out.name} was {text(medians[best])} up to step {peak}, and is {text(medians[-1])} in the last"
            f" {count} validations{training}",
            metric=held_out.name,
            steps=(peak, held_out.steps[-1]),
            critical=loss > 2 * limits["share"] * scale,
        )


def _is_score(name: str) -> bool:
    """Return whether a validation metric is a score, not a statistic of its spread."""
    return not name.startswith("val-core/") or "/mean@" in name


def _range(held_out: Series, score: Series | None) -> float:
    values = [*held_out.values, *(score.values if score is not None else ())]
    return max(values) - min(values)


def held_out_loss_rises(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report fine-tuning that learns its rows by heart."""
    held_out, trained = run.series("val/loss"), run.series("train/loss")
    if len(held_out) < limits["validations"] or len(trained) < 2:
        return
    lowest = min(range(len(held_out)), key=lambda number: held_out.values[number])
    low, step = held_out.values[lowest], held_out.steps[lowest]
    last = min(held_out.values[-2:])
    if last > (1 + limits["share"]) * low and trained.end < trained.start:
        yield run.finding(
            "held-out-loss-rises",
            f"val/loss was {text(low)} at step {step}, and is {text(held_out.values[-1])} at the end, while train/loss"
            f" fell to {text(trained.end)}",
            metric="val/loss",
            steps=(step, held_out.steps[-1]),
        )


def reward_without_success(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a reward that rises without success and without a better format."""
    score, success = run.score, run.success
    if score is None or success is None or len(score) < limits["steps"]:
        return
    middle = score.steps[len(score) // 2]
    late, solved, valid = (metric.since(middle) for metric in (score, success, run.series("response/valid_format")))
    if not any(success.values) or len(solved) < 2 or solved.end >= limits["solved"]:
        return
    rise = late.end - late.start
    is_large = rise > limits["rise"] * max(abs(late.start), _spread(run))
    if late.rises and is_large and solved.end - solved.start < 0.01 and not (len(valid) > 1 and valid.rises):
        yield run.finding(
            "reward-without-success",
            f"from step {middle} on, {score.name} rose from {text(late.start)} to {text(late.end)}, and {success.name}"
            f" went from {text(solved.start)} to {text(solved.end)}",
            metric=score.name,
            steps=(middle, late.steps[-1]),
        )


def _spread(run: RunData) -> float:
    """Return the difference of the largest and the smallest reward of an episode, 0 if they are not logged."""
    highest, lowest = run.series("critic/score/max").values, run.series("critic/score/min").values
    return max(highest) - min(lowest) if highest and lowest else 0.0
