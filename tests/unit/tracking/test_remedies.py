"""If these fail, `quintet explain METRIC` and `quintet diagnose` advise changes that are impossible."""

from __future__ import annotations

import pytest

from quintet.config.schema import is_key
from quintet.tracking.metrics import all_metrics, describe
from quintet.tracking.remedies import Remedy, Value, changed_value, remedies


def test_the_keys_of_remedies_exist() -> None:
    for name, remedy in remedies().items():
        assert all(map(is_key, remedy.changes)), name


def test_metrics_refer_to_remedies_and_metrics_that_exist() -> None:
    for metric in all_metrics():
        assert {name for names in metric.remedies.values() for name in names} <= remedies().keys(), metric.name
        assert all(describe(name) for name in metric.related)
        assert metric.name not in metric.related
        assert metric.name not in metric.elsewhere.values(), "names are listed where they differ"
        assert metric.causes.keys() == metric.remedies.keys(), metric.name


def test_the_metrics_that_people_look_at_have_causes_and_remedies() -> None:
    explained = [metric.name for metric in all_metrics() if metric.causes]
    assert len(explained) >= 40
    assert {"actor/entropy", "actor/ppo_kl", "actor/grad_norm", "critic/score/mean", "response_length/mean"} <= {
        *explained
    }


@pytest.mark.parametrize(
    ("change", "present", "value"),
    [
        ("*0.5", 8, 4),
        ("*0.5", 1, 1),
        ("*0.5", 6e-4, 3e-4),
        ("*0.5", None, None),
        ("*3 or 0.001", 0.0, 0.001),
        ("*3 or 0.001", 0.01, 0.03),
        ("*3 or 0.001", None, 0.001),
        ("*1 or 250", None, 250),
        ("*1 or 250", 40, 40),
        (">=4", 0, 4),
        (">=4", 8, 8),
        ("<=1", 4, 1),
        ("<=1", None, None),
        (True, False, True),
        ("float32", "bfloat16", "float32"),
        ("*2", True, True),
    ],
)
def test_changes_follow_from_the_present_value(change: Value, present: Value, value: Value) -> None:
    assert changed_value(change, present) == value


def test_a_remedy_reads_well_without_a_configuration() -> None:
    remedy = Remedy("smaller updates", {"actor.optimizer.learning_rate": "*0.5", "training.epochs": "<=1"})
    assert str(remedy) == "smaller updates: half of actor.optimizer.learning_rate, training.epochs at most 1"
    assert str(Remedy("reward entropy", {"algorithm.entropy_coefficient": "*3 or 0.001"})) == (
        "reward entropy: 3 times algorithm.entropy_coefficient, or algorithm.entropy_coefficient=0.001 if it has none"
    )
