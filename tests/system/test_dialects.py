"""If these fail, somebody's own configuration of another framework doesn't run, or runs as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

Command = Any

RAGEN = """\
rl_or_sft: rl
model: {base_model: MODEL, experiment_name: lake, gradient_checkpointing: true}
training:
  train_batch_size: 4
  n_rollout: 4
  ppo_batch_size: 8
  max_turns: 3
  max_start_length: 200
  max_response_length: 20
  max_obs_length: 80
  val_data_num: 7
  val_batch_size: 3
  total_training_steps: 2
  ref_update_steps: 2
optimization: {actor_lr: 1e-4, kl_coef: 0.1, adv_estimator: grpo}
logging: {mode: "['console']", log_images: false}
sft: {env_type: frozenlake, frozenlake: {size: 3, is_slippery: true, p: 0.9}}
"""


def test_a_ragen_configuration_trains_on_a_local_model(quintet: Command, small: Path, tmp_path: Path) -> None:
    drawn = "validation.sampling={do_sample: true, temperature: 1.0, samples: 2}"
    quintet("train", str(small), "validation.only=true", "name=made", "tracking.config_dir=copies", drawn)
    played = tmp_path / "runs/made/trajectories/validation/step_000000.jsonl"
    assert len(played.read_text().splitlines()) == 2 * 16
    assert (tmp_path / "copies/config.yaml").read_text() == (tmp_path / "runs/made/config.yaml").read_text()
    assert len((tmp_path / "runs/made/metrics.jsonl").read_text().splitlines()) == 1
    path = tmp_path / "base.yaml"
    path.write_text(RAGEN.replace("MODEL", str(tmp_path / "runs/made/checkpoints/global_step_0/hf")))
    done = quintet("train", "base.yaml", "training.temperature=0.9")
    assert "a configuration of ragen" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/RAGEN/lake/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["actor/kl_loss"] >= 0
    assert lines[1]["actor/lr"] == 1e-4
    episodes = (tmp_path / "runs/RAGEN/lake/trajectories/validation/step_000002.jsonl").read_text().splitlines()
    assert len(episodes) == 6
    written = (tmp_path / "runs/RAGEN/lake/config.yaml").read_text()
    assert "temperature: 0.9  # training.temperature: command line" in written
    assert "max_turns: 3  # training.max_turns: base.yaml:7" in written


def test_ragens_own_base_yaml_trains(quintet: Command, small: Path, tmp_path: Path) -> None:
    """Every key of the reference as it stands, the model alone put in its place; fewer and shorter episodes here."""
    quintet("train", str(small), "training.steps=0", "name=made", "env.name=sokoban")
    reference = Path(__file__).parents[1] / "unit/config/dialects/keys/ragen.yaml"
    (tmp_path / "base.yaml").write_text(reference.read_text())
    shorter = ["train_batch_size=2", "n_rollout=4", "ppo_batch_size=4", "max_turns=2", "max_response_length=24"]
    done = quintet(
        "train",
        "base.yaml",
        f"model.base_model={tmp_path / 'runs/made/checkpoints/global_step_0/hf'}",
        "logging.log_image_step_size=1",
        *(f"training.{word}" for word in (*shorter, "total_training_steps=2", "val_data_num=10")),
    )
    run = tmp_path / "runs/RAGEN/ragen-main-exp"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2], done.stderr
    assert lines[1]["timing_s/old_log_prob"] > 0, "observations are learnt, too"
    assert len(list((tmp_path / "log/trajectory/ragen-main-exp/train/step_2").glob("*.html"))) == 8
    assert list(run.glob("wandb/offline-run-*"))


VAGEN = """\
#!/bin/bash
set -x
NAME="lake"
python -m vagen.env.create_dataset --yaml_path env_config.yaml --train_path train.parquet --test_path test.parquet
python3 -m vagen.trainer.main_ppo \\
    algorithm.adv_estimator=bi_level_gae algorithm.kl_ctrl.kl_coef=0.01 \\
    data.train_batch_size=4 data.max_prompt_length=200 data.max_response_length=24 data.max_trajectory_length=400 \\
    actor_rollout_ref.model.path=$MODEL critic.model.path=$MODEL \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.dtype=float32 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    trainer.logger=['console'] trainer.experiment_name=$NAME trainer.n_gpus_per_node=1 trainer.nnodes=1 \\
    trainer.total_training_steps=1 trainer.test_freq=-1 \\
    rollout_manager.max_turns=2 rollout_manager.window_size=1 rollout_manager.n_trajectory=4 \\
    2>&1 | tee $NAME.log
"""
VAGEN_ENV = """\
env1:
  env_name: frozenlake
  env_config: {render_mode: text, size: 3, is_slippery: false}
  train_size: 6
  test_size: 5
"""


def test_a_vagen_script_trains_on_a_local_model(
    quintet: Command, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overrides of its script and the env of its `env_config.yaml`; nothing of the script is run."""
    quintet("train", str(small), "validation.only=true", "name=made")
    monkeypatch.setenv("MODEL", str(tmp_path / "runs/made/checkpoints/global_step_0/hf"))
    (tmp_path / "run.sh").write_text(VAGEN)
    (tmp_path / "env_config.yaml").write_text(VAGEN_ENV)
    done = quintet("train", "run.sh")
    assert "run.sh: a configuration of vagen" in done.stderr
    (metrics,) = tmp_path.glob("checkpoints/*/lake/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert "actor/reward_kl_penalty" in lines[1]
    assert "critic/vf_loss" in lines[1]
    assert "val/frozenlake/success_rate" not in lines[1]
    assert not (tmp_path / "lake.log").exists()


def test_what_waits_is_told_before_anything_begins(quintet: Command, tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("trainer: {nnodes: 2}\nactor_rollout_ref: {actor: {stratgy: fsdp}}\n")
    done = quintet("train", "verl.yaml", check=False)
    assert done.returncode == 2
    assert "did you mean actor_rollout_ref.actor.strategy?" in done.stderr
    assert "trainer.nnodes = 2 (verl.yaml:1) requires one process per device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
