"""Rules about responses: their length, their format, and the limit that cuts them off."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.diagnosis.findings import Finding
from quintet.diagnosis.policy_rules import span
from quintet.diagnosis.rule_specs import Limits
from quintet.diagnosis.run_data import RunData
from quintet.diagnosis.series import percent, text

LENGTH = "response_length/mean"
CUT = "response_length/clip_ratio"
FORMAT = "response/valid_format"


def responses_cut_off(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a large share of responses at the limit of tokens."""
    cut = run.series(CUT)
    high = cut.above(limits["share"])
    if len(cut) >= limits["steps"] and len(high) >= 2:
        climbs = f", after {percent(cut.start)} at the beginning" if cut.rises else ""
        yield run.finding(
            "responses-cut-off",
            f"{percent(cut.end)} of the responses have the maximum length at the end ({CUT}){climbs}",
            metric=CUT,
            steps=span(high),
            critical=cut.end > limits["worse"],
        )


def responses_explode(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report responses that grow while the reward does not."""
    length = run.series(LENGTH)
    if len(length) < limits["steps"] or not length.rises or _reward_rises(run):
        return
    high = length.above(limits["times"] * length.start)
    if high:
        evidence = f"{LENGTH} was {text(length.start)} tokens in the first steps, and is {text(length.end)} at the end"
        yield run.finding("responses-explode", evidence + _reward_text(run), metric=LENGTH, steps=span(high))


def responses_collapse(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report responses that shrink while the reward does not rise."""
    length = run.series(LENGTH)
    if len(length) < limits["steps"] or not length.falls or _reward_rises(run):
        return
    low = length.below(limits["share"] * length.start)
    if low:
        evidence = f"{LENGTH} was {text(length.start)} tokens in the first steps, and is {text(length.end)} at the end"
        yield run.finding("responses-collapse", evidence + _reward_text(run), metric=LENGTH, steps=span(low))


def _reward_rises(run: RunData) -> bool:
    """Return whether the reward or the success rate rises."""
    return any(series is not None and len(series) > 1 and series.rises for series in (run.score, run.success))


def _reward_text(run: RunData) -> str:
    score = run.score
    return "" if score is None else f"; {score.name} went from {text(score.start)} to {text(score.end)}"


def invalid_format(run: RunData, limits: Limits) -> Iterator[Finding]:
    """Report a large share of responses without an action."""
    valid = run.series(FORMAT)
    low = valid.below(limits["share"])
    if len(valid) >= limits["steps"] and len(low) >= 2 and not valid.rises:
        yield run.finding(
            "invalid-format",
            f"{percent(1 - valid.end)} of the responses at the end cannot be parsed into an action ({FORMAT})",
            metric=FORMAT,
            steps=span(low),
            critical=valid.end < limits["worse"],
        )
