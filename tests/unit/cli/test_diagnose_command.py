"""If these fail, `quintet diagnose` hides what is wrong from people, scripts or CI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from healthy_metrics import changed, healthy_rows

from quintet.cli import main as command
from quintet.config.compose import load_experiment
from quintet.config.yaml_writer import dump_config
from quintet.tracking.run_directory import RunDirectory

ROOT = Path(__file__).parents[3]


def diagnose(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["quintet", "diagnose", *arguments])
    with pytest.raises(SystemExit) as end:
        command.main()
    return int(end.value.code or 0)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A healthy run, and one whose entropy has collapsed."""
    monkeypatch.chdir(tmp_path)
    healthy = healthy_rows(100, noise=0.01)
    flat = changed(
        healthy, trajectory__success_rate=lambda done: 0.3, critic__score__mean=lambda done: 0.2 + 0.1 * done
    )
    bad = changed(flat, actor__entropy=lambda done: 0.8 if done < 0.5 else 0.002)
    bad = [row | ({"critic/score/mean": 0.25} if row["step"] > 50 else {}) for row in bad]
    for name, rows in (("good", healthy), ("bad", bad)):
        run = RunDirectory(tmp_path / "runs" / name)
        run.create()
        run.config.write_text(dump_config(load_experiment(None, ["algorithm.loss.clip_high=0.2"])))
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.write_state("finished")
    return tmp_path / "runs"


def test_a_healthy_run_has_nothing_to_report(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(monkeypatch, "good", "--fail") == 0
    assert capsys.readouterr().out == "runs/good: nothing looks wrong\n"


def test_a_run_of_two_steps_is_not_called_healthy(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"step": step, "response/valid_format": 0.0, "critic/score/mean": -0.1} for step in (1, 2)]
    (runs / "good/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert diagnose(monkeypatch, "good") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/good: nothing looks wrong so far, after 2 steps; 4 rules cannot judge yet"
    assert lines[2:] == [
        "not judged yet",
        "  from 10 steps on: Many responses cannot be parsed",
        "  from 20 steps on: The reward has collapsed",
        "  from 40 steps on: The reward rises, and success does not",
        "  from 50 steps on: The reward does not rise",
    ]
    (runs / "good/metrics.jsonl").unlink()
    assert diagnose(monkeypatch, "good") == 0
    assert capsys.readouterr().out == "runs/good: nothing could be judged: no metrics have been logged\n"


def test_findings_are_shown_with_evidence_and_suggestions(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(monkeypatch, "runs/bad") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("runs/bad: 1 critical")
    assert "CRITICAL  The entropy of the policy has collapsed  (entropy-collapse)\n" in shown
    assert (
        "  actor/entropy was 0.8 nats in the first steps, and is 0.002 at the end; critic/score/mean has not risen"
        in shown
    )
    assert "  steps 51 to 100\n" in shown
    assert "algorithm.loss.clip_high=0.28 (now 0.2)\n" in shown
    assert "  more: quintet explain actor/entropy\n" in shown


def test_several_runs_are_diagnosed_as_json(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(monkeypatch, "good", "bad", "--json") == 0
    good, bad = json.loads(capsys.readouterr().out)
    assert (good["path"], good["findings"], good["coverage"]["steps"]) == ("runs/good", [], 100)
    assert {"entropy-collapse", "no-learning"} <= set(good["coverage"]["judged"])
    first = bad["findings"][0]
    assert (first["rule"], first["severity"], first["metric"]) == ("entropy-collapse", "critical", "actor/entropy")
    assert (first["first_step"], first["last_step"]) == (51, 100)


def test_ci_can_fail_on_critical_findings(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnose(monkeypatch, "good", "bad", "--fail") == 1
    assert diagnose(monkeypatch, "bad") == 0


def test_a_name_that_is_no_run_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(monkeypatch, "baad") == 2
    assert "did you mean bad?" in capsys.readouterr().err
    assert diagnose(monkeypatch, str(runs.parent)) == 2


def test_the_page_shows_what_the_example_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert diagnose(monkeypatch, "examples/native/stuck_run") == 0
    assert f"```text\n{capsys.readouterr().out}```\n" in (ROOT / "docs/diagnosis.md").read_text()
