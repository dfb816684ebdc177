"""If these fail, a run that failed or is hacked looks well, or the advice does not fit its configuration."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from healthy_metrics import Row, changed, healthy_rows

from quintet import hardware
from quintet.config.compose import load_experiment
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.yaml_writer import dump_config
from quintet.diagnosis.diagnose import EPISODE_RULES, STATE_RULES, diagnose_run, read_coverage, rule_name
from quintet.diagnosis.findings import Finding
from quintet.diagnosis.rule_specs import rule_specs
from quintet.diagnosis.trajectory_rules import is_degenerate
from quintet.errors import MachineError
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import Outcome, RunProcess

LOOP = "I push the box to the left and then " * 30
LIMITS = rule_specs()["degenerate-text"].limits


def make_run(directory: Path, rows: Sequence[Row] = (), *overrides: str, **state: Any) -> RunDirectory:
    """Write the directory of a finished run."""
    run = RunDirectory(directory)
    run.create()
    run.config.write_text(dump_config(load_experiment(None, overrides)))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_state("finished", **state)
    return run


def write_episodes(run: RunDirectory, episodes: Sequence[Mapping[str, Any]], step: int = 10) -> None:
    path = run.trajectories("train", step)
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))


def episode(number: int, text: str, reward: float = 0.0, *, success: bool = False) -> dict[str, Any]:
    turn = {"observation": f"board {number}", "text": text, "finish_reason": "stop", "actions": [], "frames": []}
    turns = [turn | {"reward": reward, "valid_format": True}]
    identity = {"step": 10, "split": "train", "env": "lake", "seed": number, "group": number, "sample": 0}
    return identity | {"outcome": "terminated", "success": success, "reward": reward, "turns": turns}


def test_a_damaged_trajectory_file_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path, healthy_rows(60))
    write_episodes(run, [episode(0, "a"), {"turns": []}, episode(2, "b")])
    finding = only(diagnose_run(tmp_path))
    assert finding.rule == "damaged-episodes"
    assert finding.evidence.startswith("1 of 3 lines: ")
    assert "step_000010.jsonl:2 is not a trajectory" in finding.evidence


def only(findings: Sequence[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_healthy_run_looks_well(tmp_path: Path) -> None:
    run = make_run(tmp_path, healthy_rows(60))
    write_episodes(run, [episode(n, f"<answer>{'Up' if n % 3 else 'Down'} {n}</answer>", n % 2) for n in range(80)])
    assert diagnose_run(tmp_path) == []


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is no run directory"):
        diagnose_run(tmp_path)


def test_a_run_without_metrics_and_configuration_is_read(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_state("finished")
    assert diagnose_run(tmp_path) == []


def test_the_same_answer_to_everything_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = "<think>The goal is to the right, so I go right until I reach it.</think><answer>Right</answer>"
    write_episodes(run, [episode(n, answer if n % 4 else f"<answer>Up {n}</answer>", 0.5) for n in range(80)])
    finding = only(diagnose_run(tmp_path))
    assert finding.rule == "same-response"
    assert (
        "75 % of 80 responses in trajectories/train/step_000010.jsonl, to 60 different observations" in finding.evidence
    )
    assert "(line 2)" in finding.evidence


def test_few_actions_that_repeat_are_normal(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_episodes(run, [episode(n, "<answer>Right</answer>" if n % 4 else "<answer>Up</answer>") for n in range(80)])
    assert diagnose_run(tmp_path) == []


def test_one_answer_that_is_right_everywhere_is_normal(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_episodes(run, [episode(n, "<answer>Right</answer>", 1.0, success=True) for n in range(80)])
    assert diagnose_run(tmp_path) == []


def test_rewarded_loops_are_critical(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_episodes(run, [episode(n, f"{LOOP} {n}" if n % 2 else f"answer {n}", float(n % 2)) for n in range(40)])
    finding = only(diagnose_run(tmp_path))
    assert (finding.rule, finding.severity) == ("degenerate-text", "critical")
    assert finding.title == "Degenerate responses are rewarded"
    assert "20 of 40 responses" in finding.evidence
    assert "in 20 of the 20 episodes with the highest reward" in finding.evidence


def test_loops_without_reward_are_a_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_episodes(run, [episode(n, f"{LOOP} {n}" if n % 2 else f"answer {n}", float(1 - n % 2)) for n in range(40)])
    assert only(diagnose_run(tmp_path)).severity == "warning"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOOP, True),
        ("ha" * 400, True),
        ("\ufffd\x00" * 40, True),
        ("", False),
        ("<answer> Down </answer>", False),
        ("First I list the moves: left, right, up and down. Left is a wall, right is a hole, up leads back to where I"
         " came from, so only down remains, from where the goal is two steps to the right if no hole is there.", False),
        ("\n".join(f'<rect x="{n}" y="{7 * n % 13}" width="{n % 5}" fill="#{n:06x}"/>' for n in range(30)), False),
        ("# # # # # #\n# _ P _ O #\n# _ _ _ _ #\n# G O _ _ #\n", False),
    ],
)  # fmt: skip
def test_loops_and_noise_are_told_from_text(text: str, expected: bool) -> None:
    assert is_degenerate(text, LIMITS) is expected


def end(run: RunDirectory, outcome: Outcome | None, message: str = "") -> None:
    process = RunProcess("rank 0", "elsewhere", 2**22, "another namespace", 1, outcome=outcome, message=message)
    run.processes.write(run.processes.rank(0), process)


@pytest.mark.parametrize(
    ("outcome", "severity", "title"),
    [("failed", "critical", "The run failed"), ("stopped", "warning", "The run was stopped")],
)
def test_a_run_that_ended_early_is_reported_with_its_error(
    tmp_path: Path, outcome: Outcome, severity: str, title: str
) -> None:
    run = make_run(tmp_path, healthy_rows(12))
    run.write_state("running")
    (tmp_path / "progress.json").write_text('{"phase": "learning", "done": 12, "total": 100, "unit": "step"}')
    end(run, outcome, "CUDA out of memory")
    run.logs.mkdir()
    (run.logs / "rank_1.log").write_text("step 12\nRuntimeError: NCCL timeout\nbye\n")
    finding = only(diagnose_run(tmp_path))
    assert (finding.rule, finding.severity) == ("run-ended-early", severity)
    assert finding.title.startswith(title)
    assert f"{outcome} after 12 of 100 steps: CUDA out of memory; there is no checkpoint" in finding.evidence
    assert "rank_1.log: RuntimeError: NCCL timeout" in finding.evidence
    advice = (
        "remove the cause of the error first" if outcome == "failed" else "continue the run from its last checkpoint"
    )
    assert str(finding.suggestions[0]).startswith(advice)


def test_the_verdict_counts_the_steps_of_the_last_stage(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.warm_start.write_text("".join(json.dumps(row) + "\n" for row in healthy_rows(32)))
    assert read_coverage(tmp_path).steps == 32
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in healthy_rows(12)))
    assert read_coverage(tmp_path).steps == 12


def test_a_run_that_hangs_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path, healthy_rows(12))
    run.write_state("running")
    end(run, None)
    progress = tmp_path / "progress.json"
    progress.write_text('{"phase": "learning", "done": 12, "total": 100, "unit": "step"}')
    assert diagnose_run(tmp_path) == []
    os.utime(progress, (time.time() - 7200,) * 2)
    finding = only(diagnose_run(tmp_path))
    assert finding.rule == "run-hangs"
    assert "the last progress was 2 h 0 min ago, where a step takes 7 s" in finding.evidence


def test_memory_is_compared_with_that_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, changed(healthy_rows(20), perf__max_memory_rss_gb=lambda done: 9.0))
    for rank in range(2):
        process = RunProcess.of(os.getpid(), f"rank {rank}", 2)
        run.processes.write(run.processes.rank(rank), process)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 20 * 10**9)
    finding = only(diagnose_run(tmp_path))
    assert (finding.rule, finding.severity) == ("memory-full", "warning")
    assert "2 processes with 9 GB each are 90 % of the 20 GB of this machine" in finding.evidence
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 64 * 10**9)
    assert diagnose_run(tmp_path) == []


def test_every_rule_of_runs_has_limits_and_words() -> None:
    names = {rule_name(rule) for rule in (*STATE_RULES, *EPISODE_RULES)}
    assert names == {
        "run-ended-early",
        "run-hangs",
        "memory-full",
        "same-response",
        "degenerate-text",
        "damaged-episodes",
    }
    assert names <= rule_specs().keys()


def clipped() -> list[Row]:
    return changed(healthy_rows(60, noise=0.01), actor__pg_clipfrac=lambda done: 0.5)


def test_suggestions_follow_from_the_values_of_the_run(tmp_path: Path) -> None:
    make_run(tmp_path, clipped(), "actor.optimizer.learning_rate=1e-5", "training.epochs=4", "training.mini_batches=8")
    assert only(diagnose_run(tmp_path)).suggestions == (
        "smaller updates of the policy: actor.optimizer.learning_rate=5e-06 (now 1e-05)",
        "fewer updates with the same episodes: training.mini_batches=4 (now 8)",
        "use each episode once: training.epochs=1 (now 4)",
        "measure the gap before and after a weight sync: `quintet check drift CONFIG`",
    )


def test_what_a_run_has_already_is_not_suggested(tmp_path: Path) -> None:
    make_run(tmp_path, clipped(), "training.epochs=1", "training.mini_batches=1")
    changes = [text.partition(":")[0] for text in only(diagnose_run(tmp_path)).suggestions]
    assert changes == ["smaller updates of the policy", "measure the gap before and after a weight sync"]


@pytest.mark.parametrize(
    ("dialect", "tree", "key"),
    [
        (
            "verl",
            {"data": {"train_files": "rows.parquet", "val_files": "rows.parquet"}},
            "actor_rollout_ref.actor.optim.lr",
        ),
        ("ragen", {}, "optimization.actor_lr"),
        ("ragen", {"actor_rollout_ref": {"actor": {"optim": {"lr": 2e-6}}}}, "actor_rollout_ref.actor.optim.lr"),
        (
            "roll",
            {"pretrain": "model", "num_return_sequences_in_group": 8},
            "actor_train.training_args.learning_rate",
        ),
        ("rlinf", {}, "actor.optim.lr"),
    ],
)
def test_suggestions_have_the_keys_of_the_users_framework(
    tmp_path: Path, dialect: str, tree: dict[str, Any], key: str
) -> None:
    run = make_run(tmp_path, clipped())
    composed = convert(config_from_tree(tree), DIALECTS[dialect], to_plan=True).composed
    run.config.write_text(dump_config(composed))
    learning_rate = composed.experiment.actor.optimizer.learning_rate
    first = only(diagnose_run(tmp_path)).suggestions[0]
    assert first.startswith(f"smaller updates of the policy: {key}={learning_rate / 2:g}")
    assert first.endswith(f" (now {learning_rate:g})")


def test_the_advantages_of_the_run_decide_whether_groups_matter(tmp_path: Path) -> None:
    rows = changed(healthy_rows(60, noise=0.01), training__groups_with_signal=lambda done: 0.0)
    make_run(tmp_path / "critic", rows, "algorithm.advantage={name: gae}")
    assert diagnose_run(tmp_path / "critic") == []
    make_run(tmp_path / "groups", rows)
    assert only(diagnose_run(tmp_path / "groups")).rule == "groups-alike"


def test_a_warm_start_that_diverges_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.warm_start.write_text("".join(json.dumps({"step": n, "sft/loss": None}) + "\n" for n in range(1, 9)))
    finding = only(diagnose_run(tmp_path))
    assert (finding.rule, finding.metric, finding.first_step) == ("non-finite", "sft/loss", 1)


def test_failed_episodes_are_named_with_the_message_of_the_environment(tmp_path: Path) -> None:
    failed = {"trajectory__failed": lambda done: 3.0, "trajectory__failures__step__Timeout": lambda done: 3.0}
    run = make_run(tmp_path, changed(healthy_rows(20, noise=0.01), **failed))
    failure = {"where": "step", "error_type": "Timeout", "message": "no answer within 10 s"}
    write_episodes(run, [episode(1, "Up"), episode(2, "Down") | {"failure": failure}])
    evidence = only(diagnose_run(tmp_path)).evidence
    assert evidence.startswith("60 episodes, 0 % of all, in 20 of 20 steps (60 × step/Timeout)")
    assert evidence.endswith("trajectories/train/step_000010.jsonl, line 2: step: Timeout: no answer within 10 s")
