"""If these fail, a configuration that only validates tells nothing of its model, or another model's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.policies.tiny_models import create_preset_policy

Command = Any

RAGEN = """\
rl_or_sft: rl
model: {base_model: MODEL, experiment_name: lake}
training:
  train_batch_size: 4
  n_rollout: 4
  ppo_batch_size: 8
  max_turns: 2
  max_start_length: 200
  max_response_length: 20
  max_obs_length: 80
  val_data_num: 6
  val_batch_size: 3
  total_training_steps: 2
optimization: {actor_lr: 1e-4, adv_estimator: grpo}
trainer: {val_only: true}
logging: {mode: "['console']", log_images: false}
sft: {env_type: frozenlake, frozenlake: {size: 3, is_slippery: false}}
"""

SUMS = """\
name: sums
env: {name: prompts}
policy: {preset: numbers-1m}
data: {train_files: sums/train.parquet, validation_files: sums/validation.parquet}
rollout: {max_turns: 1, window_size: null, max_prompt_tokens: 64, max_response_tokens: 16}
warm_start: {episodes: 20, updates: 5, turns_per_update: 16, until_success: null}
training: {steps: 0, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
validation: {only: true, sampling: {do_sample: true, temperature: 1.0, samples: 3}}
tracking: {loggers: [jsonl]}
"""


def results(directory: Path) -> Any:
    return json.loads((directory / "results.json").read_text())


def test_a_ragen_configuration_that_only_validates(
    quintet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # RAGEN has no key for it, and two threads wait for each other in passes as small as these
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tmp_path / "made"
    create_preset_policy("grid-1m", model, ["You are on a frozen lake. Go to the goal: <answer> Right </answer>"], 0)
    (tmp_path / "base.yaml").write_text(RAGEN.replace("MODEL", str(model)))
    done = quintet("eval", "base.yaml")
    assert "a configuration of ragen" in done.stderr
    assert "pass@1" in done.stdout
    run = tmp_path / "runs/RAGEN/lake"
    (source,) = results(run)["sources"].values()
    assert source["score"]["prompts"] == 6
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 6
    assert {episode["env"] for episode in episodes} == {"frozenlake"}
    assert all(len(episode["turns"]) <= 2 for episode in episodes)
    assert f"path: {model}  # model.base_model: base.yaml:2" in (run / "evaluation.yaml").read_text()


@pytest.fixture
def sums(quintet: Command, tmp_path: Path) -> Path:
    quintet("data", "make", "addition", "sums", "digits=1", "--train", "20", "--validation", "5")
    path = tmp_path / "sums.yaml"
    path.write_text(SUMS)
    return path


def test_held_out_questions_of_a_configuration_and_the_model_of_its_run(
    quintet: Command, sums: Path, tmp_path: Path
) -> None:
    refused = quintet("eval", str(sums), check=False)
    assert refused.returncode == 2
    assert "no model to evaluate" in refused.stderr
    assert not (tmp_path / "runs").exists()
    quintet("train", str(sums), "validation.only=false", "validation.before_training=false")
    parsed = json.loads(quintet("eval", str(sums), "--json", "--confidence", "0.9").stdout)
    run = tmp_path / "runs/sums"
    assert parsed == results(run)
    assert parsed["confidence"] == 0.9
    actual = parsed["sources"]["addition"]
    assert actual["answers"] == 5 * 3
    assert list(actual["passed"]) == list(actual["majority"]) == ["1", "2", "3"]
    assert "val-core/addition/acc/mean@3" in parsed["metrics"]
    assert len((run / "answers.jsonl").read_text().splitlines()) == 15
    made = f"path: {Path('runs/sums/checkpoints/global_step_0/hf')}  # checkpoint"
    assert made in (run / "evaluation.yaml").read_text()
