"""If these fail, somebody's own configuration of another framework doesn't run, or runs as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    games = (tmp_path / "runs/RAGEN/lake/trajectories/validation/step_000002.jsonl").read_text().splitlines()
    assert len(games) == 6
    written = (tmp_path / "runs/RAGEN/lake/config.yaml").read_text()
    assert "temperature: 0.9  # training.temperature: command line" in written
    assert "max_turns: 3  # training.max_turns: base.yaml:7" in written


def test_ragens_own_base_yaml_trains(quintet: Command, small: Path, tmp_path: Path) -> None:
    """Every key of the reference as it stands, the model alone put in its place; fewer and shorter games here."""
    quintet("train", str(small), "training.steps=0", "name=made", "world.name=sokoban")
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


def test_what_waits_is_told_before_anything_begins(quintet: Command, tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {rollout: {name: vllm}, actor: {stratgy: fsdp}}\n")
    done = quintet("train", "verl.yaml", check=False)
    assert done.returncode == 2
    assert "did you mean actor_rollout_ref.actor.strategy?" in done.stderr
    assert "actor_rollout_ref.rollout.name = 'vllm' (verl.yaml:1): waits for" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
