"""If these fail, `quintet explain METRIC` explains another metric, or none."""

from __future__ import annotations

import json
import sys

import pytest

from quintet.cli import main as command
from quintet.tracking.metrics import all_metrics


def explain(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["quintet", "explain", *arguments])
    with pytest.raises(SystemExit) as end:
        command.main()
    return int(end.value.code or 0)


def test_a_metric_is_explained_with_causes_and_remedies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(monkeypatch, "actor/ppo_kl") == 0
    shown = capsys.readouterr().out
    assert "  unit      nats\n  healthy   -0.01 to 0.1\n  computed  mean of old minus new log-prob" in shown
    assert "  too high, usual causes\n    - the learning rate is too large\n" in shown
    assert "    - smaller updates of the policy: half of actor.optimizer.learning_rate\n" in shown
    assert "  related   actor/pg_clipfrac, actor/ratio, actor/grad_norm\n  ROLL      actor/approxkl\n" in shown


def test_a_metric_of_an_environment_has_the_explanation_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(monkeypatch, "val/frozenlake/success_rate") == 0
    assert capsys.readouterr().out.startswith("val/frozenlake/success_rate  (val/{env}/success_rate)\n")


def test_a_name_of_another_framework_leads_to_the_name_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(monkeypatch, "actor/approxkl") == 0
    shown = capsys.readouterr()
    assert shown.err == "actor/approxkl of ROLL is actor/ppo_kl here\n"
    assert shown.out.startswith("actor/ppo_kl\n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("actor/entropi", "actor/entropy"), ("actor/grad_nrom", "actor/grad_norm"), ("ppo/clipfrac", "actor/pg_clipfrac")],
)
def test_a_misspelt_metric_leads_to_the_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    assert explain(monkeypatch, name) == 2
    message = capsys.readouterr().err
    assert f"unknown metric {name}" in message
    assert meant in message


def test_the_beginning_of_names_lists_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(monkeypatch, "num_turns") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["num_turns/max", "num_turns/mean", "num_turns/min"]


def test_common_words_lead_to_metrics_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(monkeypatch, "entropy") == 0
    assert capsys.readouterr().out.endswith("Metrics: actor/entropy\n")


def test_all_metrics_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [metric.name for metric in all_metrics()]
    assert explain(monkeypatch, "--list", "--metrics") == 0
    *lines, count = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == names
    assert count == f"{len(names)} metrics"
    assert explain(monkeypatch, "--metrics", "--json") == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["metric"] for each in objects] == names
    assert objects[names.index("critic/vf_loss")]["elsewhere"] == {"RLinf": "critic/value_loss"}
