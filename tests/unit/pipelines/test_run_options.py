"""If these fail, a run writes, prints or checks other things than its configuration says."""

from __future__ import annotations

import io
from pathlib import Path

import yaml
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.pipelines.rl import train

OVERRIDES = (
    "training={steps: 2, groups_per_step: 2, samples_per_group: 2, mini_batches: 1, threads: 1}",
    "policy.preset=grid-1m",
    "warm_start=null",
    "rollout={max_turns: 1, max_response_tokens: 8, template_thinking: null}",
    "validation={every_steps: -1, episodes: 4}",
    "tracking.loggers=[jsonl]",
    "checkpoint.every_steps=0",
)


def run(directory: Path, *overrides: str) -> str:
    """Run two steps; return what the console shows."""
    console = io.StringIO()
    train(
        load_experiment(None, (*OVERRIDES, f"output_dir={directory}", "name=run", *overrides)),
        Console(file=console, width=500),
    )
    return console.getvalue()


def test_a_run_copies_its_configuration_prints_responses_and_compares_weights(tmp_path: Path) -> None:
    shown = run(
        tmp_path,
        f"tracking={{config_dir: {tmp_path}/copy, report_episodes: 1, trajectories_every_steps: 1}}",
        "rollout.engine_options={print_responses: true, validate_weights: true}",
        f"rollout.engine_options.validate_weights_dir={tmp_path}/sync",
    )
    assert yaml.safe_load((tmp_path / "copy/config.yaml").read_text())["name"] == "run"
    assert "step 2, group " in shown
    assert "engine and learner agree: " in shown
    assert any((tmp_path / "sync").iterdir())
    stored = (tmp_path / "run/trajectories/train").iterdir()
    assert sorted(path.name for path in stored) == ["step_000001.jsonl", "step_000002.jsonl"]
    assert (tmp_path / "run/report.html").read_text().count('<article class="episode"') == 1
