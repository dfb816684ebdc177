"""If these fail, the report's times don't add up."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from quintet.tracking.metric_columns import MetricColumns
from quintet.tracking.metrics import all_metrics, describe
from quintet.tracking.timing_tree import PREFIX, TimedPhase, timing_tree, total_times

TIMINGS = [metric.name for metric in all_metrics() if metric.name.startswith(PREFIX)]


def test_nested_phases_are_counted_once() -> None:
    first = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/engine": 4.0, "timing_s/env": 1.0}
    second = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/engine": 5.0, "timing_s/update_actor": 3.0}
    lines = [{"step": 0, "timing_s/testing": 2.0}, {"step": 1, **first}, {"step": 2, **second}]
    run = timing_tree(total_times(MetricColumns.from_lines(lines)))
    gen = TimedPhase("gen", 12.0, (TimedPhase("engine", 9.0), TimedPhase("other", 2.0), TimedPhase("env", 1.0)))
    step = TimedPhase("step", 20.0, (gen, TimedPhase("other", 5.0), TimedPhase("update_actor", 3.0)))
    assert run == TimedPhase("run", 22.0, (step, TimedPhase("testing", 2.0)))


def test_a_part_of_an_unmeasured_phase_belongs_to_the_phase_around_it() -> None:
    run = timing_tree({"timing_s/step": 4.0, "timing_s/engine": 3.0})
    assert [part.name for part in run.parts[0].parts] == ["engine", "other"]


def test_runs_without_timings_have_no_phases() -> None:
    assert timing_tree({"step": 1, "actor/entropy": 0.3, "timing_s/gen": math.nan}) == TimedPhase("run", 0)


@given(st.lists(st.dictionaries(st.sampled_from(TIMINGS), st.floats(0, 1e4)), max_size=4))
def test_the_parts_of_every_phase_add_up(lines: list[dict[str, float]]) -> None:
    def check(phase: TimedPhase) -> None:
        assert not phase.parts or math.isclose(
            math.fsum(part.seconds for part in phase.parts), phase.seconds, rel_tol=2e-3
        )
        for part in phase.parts:
            check(part)

    numbered = [{"step": step, **line} for step, line in enumerate(lines)]
    check(timing_tree(total_times(MetricColumns.from_lines(numbered))))


def test_phases_are_parts_of_timings() -> None:
    assert {describe(parent).name for name in TIMINGS if (parent := describe(name).part_of)} <= set(TIMINGS)
