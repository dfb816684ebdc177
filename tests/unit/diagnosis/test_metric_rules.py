"""If these fail, a run that is going wrong looks well, or its user is led to the wrong metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from healthy_metrics import Row, changed, healthy_rows

from quintet.diagnosis.diagnose import METRIC_RULES, diagnose_metrics, rule_name
from quintet.diagnosis.findings import Finding

Change = Callable[[Sequence[Row]], list[Row]]


def flat(value: float) -> Callable[[float], float]:
    return lambda done: value


def late(before: float, after: float, since: float = 0.6) -> Callable[[float], float]:
    return lambda done: after if done > since else before


def unsolved(rows: Sequence[Row]) -> list[Row]:
    """A run in which nothing is ever solved."""
    return changed(rows, trajectory__success_rate=flat(0.0), critic__score__mean=flat(0.0))


def with_failures(rows: Sequence[Row]) -> list[Row]:
    some = {"trajectory/failed": 8.0, "trajectory/outcome/failed": 0.1, "trajectory/failures/step/Timeout": 8.0}
    return [row | (some if row["step"] % 2 else {}) for row in rows]


def with_spikes(rows: Sequence[Row]) -> list[Row]:
    return [row | ({"actor/grad_norm": 40.0} if row["step"] in (30, 55, 80) else {}) for row in rows]


def with_validations(curve: Callable[[float], float]) -> Change:
    def change(rows: Sequence[Row]) -> list[Row]:
        return [
            row | ({"val/lake/success_rate": curve(number / len(rows))} if row["step"] % 10 == 0 else {})
            for number, row in enumerate(rows, 1)
        ]

    return change


def with_nan(rows: Sequence[Row]) -> list[Row]:
    return [row | ({"actor/pg_loss": None, "actor/grad_norm": None} if row["step"] >= 70 else {}) for row in rows]


def hacked(rows: Sequence[Row]) -> list[Row]:
    return changed(rows, critic__score__mean=lambda done: 0.3 + 2 * done, trajectory__success_rate=flat(0.4))


CASES: dict[str, tuple[str, Change, str | None, str, int | None]] = {
    "entropy": (
        "entropy-collapse",
        lambda rows: changed(rows, actor__entropy=late(0.8, 0.01), trajectory__success_rate=flat(0.3)),
        "actor/entropy",
        "warning",
        61,
    ),
    "entropy without reward": (
        "entropy-collapse",
        lambda rows: changed(unsolved(rows), actor__entropy=late(0.8, 0.01)),
        "actor/entropy",
        "critical",
        61,
    ),
    "random text": (
        "entropy-explosion",
        lambda rows: changed(rows, actor__entropy=lambda done: 0.5 + 3 * done),
        "actor/entropy",
        "warning",
        None,
    ),
    "clipped updates": (
        "clipping",
        lambda rows: changed(rows, actor__pg_clipfrac=late(0.02, 0.5)),
        "actor/pg_clipfrac",
        "warning",
        61,
    ),
    "large updates": (
        "policy-jumps",
        lambda rows: changed(rows, actor__ppo_kl=late(0.01, 0.4)),
        "actor/ppo_kl",
        "warning",
        61,
    ),
    "far from the reference": (
        "reference-kl",
        lambda rows: changed(rows, actor__kl_loss=lambda done: 4 * done),
        "actor/kl_loss",
        "warning",
        None,
    ),
    "spikes": ("gradient-spikes", with_spikes, "actor/grad_norm", "warning", 30),
    "growing gradient": (
        "gradient-growth",
        lambda rows: changed(rows, actor__grad_norm=lambda done: 0.1 * 1000**done),
        "actor/grad_norm",
        "warning",
        None,
    ),
    "skipped updates": (
        "skipped-updates",
        lambda rows: changed(rows, actor__skipped_updates=late(0, 4)),
        "actor/skipped_updates",
        "critical",
        61,
    ),
    "updates that stop early": (
        "skipped-updates",
        lambda rows: changed(rows, actor__stopped_updates=late(0, 4, 0.3)),
        "actor/stopped_updates",
        "warning",
        31,
    ),
    "useless critic": (
        "critic-explains-nothing",
        lambda rows: changed(rows, critic__vf_explained_var=flat(0.01)),
        "critic/vf_explained_var",
        "warning",
        51,
    ),
    "misleading critic": (
        "critic-explains-nothing",
        lambda rows: changed(rows, critic__vf_explained_var=flat(-0.6)),
        "critic/vf_explained_var",
        "critical",
        51,
    ),
    "wrong weights in the engine": (
        "engine-drift",
        lambda rows: changed(rows, training__rollout_probs_diff_beyond=late(0, 0.5)),
        "training/rollout_probs_diff_beyond",
        "critical",
        61,
    ),
    "another precision in the engine": (
        "engine-drift",
        lambda rows: changed(rows, rollout_corr__kl=flat(0.03)),
        "rollout_corr/kl",
        "warning",
        1,
    ),
    "cut responses": (
        "responses-cut-off",
        lambda rows: changed(rows, response_length__clip_ratio=late(0.02, 0.6)),
        "response_length/clip_ratio",
        "critical",
        61,
    ),
    "long responses": (
        "responses-explode",
        lambda rows: changed(unsolved(rows), response_length__mean=lambda done: 100 + 900 * done),
        "response_length/mean",
        "warning",
        None,
    ),
    "short responses": (
        "responses-collapse",
        lambda rows: changed(unsolved(rows), response_length__mean=late(200, 4)),
        "response_length/mean",
        "warning",
        61,
    ),
    "unparsed responses": (
        "invalid-format",
        lambda rows: changed(rows, response__valid_format=flat(0.05)),
        "response/valid_format",
        "critical",
        1,
    ),
    "nothing solved": (
        "no-group-solved",
        lambda rows: changed(unsolved(rows), training__groups_with_signal=flat(0.0)),
        "training/groups_with_signal",
        "critical",
        1,
    ),
    "everything solved": (
        "all-groups-solved",
        lambda rows: changed(rows, training__groups_with_signal=late(0.5, 0.01), trajectory__success_rate=flat(0.99)),
        "training/groups_with_signal",
        "warning",
        61,
    ),
    "equal samples": (
        "groups-alike",
        lambda rows: changed(rows, training__groups_with_signal=late(0.5, 0.0), trajectory__success_rate=flat(0.5)),
        "training/groups_with_signal",
        "critical",
        61,
    ),
    "flat reward": ("no-learning", unsolved, "critic/score/mean", "critical", 1),
    "lost reward": (
        "reward-collapse",
        lambda rows: changed(rows, critic__score__mean=lambda done: 0.2 + done if done < 0.6 else 0.1),
        "critic/score/mean",
        "critical",
        None,
    ),
    "overfitting": (
        "validation-falls",
        with_validations(lambda done: 0.3 + 1.2 * done if done <= 0.5 else 1.5 - 1.2 * done),
        "val/lake/success_rate",
        "critical",
        None,
    ),
    "rows learned by heart": (
        "held-out-loss-rises",
        lambda rows: changed(rows, train__loss=lambda done: 2 - done, val__loss=lambda done: 1.5 + (done - 0.5) ** 2),
        "val/loss",
        "warning",
        50,
    ),
    "hacked reward": ("reward-without-success", hacked, "critic/score/mean", "warning", 51),
    "failed episodes": ("episodes-fail", with_failures, "trajectory/failed", "warning", 1),
    "failed scores": (
        "scores-fail",
        lambda rows: changed(rows, reward__failed=late(0, 3)),
        "reward/failed",
        "warning",
        61,
    ),
    "failed tools": (
        "tool-calls-fail",
        lambda rows: changed(rows, tool__calls=flat(50), tool__failed_calls=late(1, 45, 0.4)),
        "tool/failed_calls",
        "warning",
        51,
    ),
    "restarts": (
        "restarts",
        lambda rows: changed(rows, engine__restarts=late(0, 1)),
        "engine/restarts",
        "critical",
        61,
    ),
    "slow environments": (
        "slow-phase",
        lambda rows: changed(rows, timing_s__env=flat(6.0)),
        "timing_s/env",
        "warning",
        1,
    ),
    "slower and slower": (
        "phase-grows",
        lambda rows: changed(rows, timing_s__sync_weights=lambda done: 0.2 + 9 * done, timing_s__step=flat(12)),
        "timing_s/sync_weights",
        "warning",
        None,
    ),
    "idle learner": (
        "waiting",
        lambda rows: [row | {"channel/groups/get_seconds": 0.8 * row["timing_s/step"]} for row in rows],
        "channel/groups/get_seconds",
        "warning",
        1,
    ),
    "leak": (
        "memory-grows",
        lambda rows: changed(rows, perf__max_memory_rss_gb=lambda done: 2 + 10 * done),
        "perf/max_memory_rss_gb",
        "warning",
        None,
    ),
    "full GPU": (
        "gpu-memory-full",
        lambda rows: changed(rows, perf__gpu_memory_share=late(0.7, 0.99), perf__max_memory_allocated_gb=flat(78)),
        "perf/gpu_memory_share",
        "critical",
        61,
    ),
    "retried allocations": (
        "gpu-memory-full",
        lambda rows: changed(
            rows, perf__gpu_memory_share=flat(0.9), perf__gpu_alloc_retries=lambda done: 60 * done // 2
        ),
        "perf/gpu_alloc_retries",
        "warning",
        5,
    ),
    "not finite": ("non-finite", with_nan, "actor/grad_norm", "critical", 70),
}


def rows(steps: int = 100) -> list[Row]:
    return healthy_rows(steps, noise=0.01)


def findings_of(rule: str, metrics: Sequence[Row]) -> list[Finding]:
    return [finding for finding in diagnose_metrics(metrics) if finding.rule == rule]


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_reported_with_its_metric_and_steps(case: str) -> None:
    rule, change, metric, severity, first = CASES[case]
    (finding,) = findings_of(rule, change(rows()))
    assert finding.metric == metric
    assert finding.severity == severity
    assert finding.first_step is not None
    assert finding.last_step is not None
    if first is not None:
        assert abs(finding.first_step - first) < 5


def test_every_rule_is_tested() -> None:
    assert {rule for rule, *_ in CASES.values()} == {rule_name(rule) for rule in METRIC_RULES}


@pytest.mark.parametrize("case", CASES)
def test_findings_have_evidence_with_numbers(case: str) -> None:
    for finding in findings_of(CASES[case][0], CASES[case][1](rows())):
        assert any(character.isdigit() for character in finding.evidence)


def test_critical_findings_come_first() -> None:
    metrics = changed(with_nan(rows()), actor__pg_clipfrac=flat(0.5))
    severities = [finding.severity for finding in diagnose_metrics(metrics)]
    assert severities == sorted(severities)
    assert set(severities) == {"critical", "warning"}


def test_a_learning_rate_of_0_is_named_as_the_cause() -> None:
    (finding,) = findings_of("no-learning", changed(unsolved(rows()), actor__lr=flat(0.0)))
    assert "the learning rate is 0 (actor/lr)" in finding.evidence
    assert finding.suggestions[0] == "a learning rate above 0: actor.optimizer.learning_rate=1e-6"


def test_equal_rewards_are_no_finding_if_a_critic_gives_the_advantages() -> None:
    metrics = changed(unsolved(rows()), training__groups_with_signal=flat(0.0), critic__vf_loss=flat(0.1))
    assert not findings_of("no-group-solved", metrics)


def test_a_gpu_whose_memory_was_full_once_or_is_used_well_is_no_finding() -> None:
    """PyTorch gives its cache back in the first steps, and a resumed run counts from 0."""
    used = {"perf__gpu_memory_share": flat(0.94), "perf__max_memory_allocated_gb": flat(75)}
    assert not findings_of("gpu-memory-full", changed(rows(), perf__gpu_alloc_retries=late(7, 0), **used))
    (warning,) = findings_of("gpu-memory-full", changed(rows(), **used | {"perf__gpu_memory_share": flat(0.96)}))
    assert (warning.severity, warning.evidence) == ("warning", "perf/gpu_memory_share is 96 %, 75 GiB")
    assert warning.suggestions[0] == "fewer tokens per pass: half of training.micro_batch_tokens"


def test_long_responses_that_pay_are_no_finding() -> None:
    metrics = changed(rows(), response_length__mean=lambda done: 100 + 900 * done)
    assert not findings_of("responses-explode", metrics)


def test_a_reward_that_rises_by_a_better_format_is_no_finding() -> None:
    metrics = changed(hacked(rows()), response__valid_format=lambda done: done)
    assert not findings_of("reward-without-success", metrics)


def test_a_slow_validation_does_not_count_as_a_slow_step() -> None:
    metrics: list[Any] = [row | ({"timing_s/testing": 5.0} if row["step"] % 10 == 0 else {}) for row in rows()]
    assert not findings_of("slow-phase", metrics)


def test_steps_with_more_tokens_may_take_longer() -> None:
    longer = {
        "timing_s__update_actor": lambda done: 1 + 9 * done,
        "perf__total_num_tokens": lambda done: 1e5 + 9e5 * done,
    }
    assert not findings_of("phase-grows", changed(rows(), **longer))


def test_metrics_of_another_version_are_read() -> None:
    metrics = [row | {"timing_s/former_phase": float(row["step"])} for row in rows()]
    (finding,) = findings_of("phase-grows", metrics)
    assert finding.metric == "timing_s/former_phase"


def test_a_reward_function_that_gives_every_response_the_same_is_named_first() -> None:
    same = {f"critic__score__{part}": flat(0.5) for part in ("mean", "min", "max")}
    broken = changed(unsolved(rows()), **same, training__groups_with_signal=flat(0.0))
    for rule in ("no-learning", "no-group-solved"):
        (finding,) = findings_of(rule, broken)
        assert "every reward" in finding.evidence
        assert finding.suggestions[0].startswith("check the reward function: it gives every response the same reward")
    varied = changed(broken, critic__score__max=late(0.5, 0.6))
    assert all("every reward" not in finding.evidence for finding in diagnose_metrics(varied))
