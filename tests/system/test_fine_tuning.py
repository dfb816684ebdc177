"""If these fail, fine-tuning by command loses work, or ends with other weights after a stop than without one."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from paused_runs import stop_run

from quintet.policies.tiny_models import create_preset_policy
from quintet.tracking.metrics import without_timing

Command = Any

CONFIG = """\
name: tuned
policy: {preset: grid-1m}
data: {train_files: [train.jsonl], validation_files: [held.jsonl], messages_key: messages}
sft: {epochs: 3, batch: 10, before_training: true, optimizer: {learning_rate: 0.003}}
training: {threads: 1}
checkpoint: {every_steps: 1}
tracking: {loggers: [jsonl]}
"""


@pytest.fixture
def tuning(tmp_path: Path) -> Path:
    """A configuration with 40 conversations of two replies each, and 8 held-out ones."""
    for name, numbers in {"train": range(40), "held": range(40, 48)}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(talk(number)) for number in numbers))
    path = tmp_path / "tuning.yaml"
    path.write_text(CONFIG)
    return path


def talk(number: int) -> dict[str, Any]:
    results = [f"{number} + 1 = ?", str(number + 1), "And one more?", str(number + 2)]
    roles = ["user", "assistant", "user", "assistant"]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, results, strict=True)]}


def weights(directory: Path) -> dict[str, str]:
    files = sorted(directory.rglob("*.safetensors"))
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [without_timing(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_stopped_twice_ends_as_one_that_never_stopped(quintet: Command, tuning: Path, tmp_path: Path) -> None:
    overrides = ["sft.lora={rank: 4, alpha: 8}", "sft.final_weights=best"]
    quintet("sft", str(tuning), *overrides, "name=whole")
    whole, stopped = tmp_path / "runs/whole", tmp_path / "runs/stopped"
    stop(tuning, tmp_path, [*overrides, "name=stopped"], 2, signal.SIGKILL)
    stop(tuning, tmp_path, [*overrides, "name=stopped"], 5, signal.SIGTERM)
    assert not (stopped / "model").exists()
    again = quintet("sft", str(tuning), *overrides, "name=stopped")
    assert "resuming from" in again.stdout
    for place in ("model", "lora_adapter", "checkpoints/global_step_12"):
        assert weights(whole / place) == weights(stopped / place)
    assert weights(whole / "model")
    assert metrics(whole) == metrics(stopped)
    described = (stopped / "model/config.json").read_text()
    assert "quintet" not in described
    assert "peft" not in described


def stop(tuning: Path, directory: Path, overrides: list[str], step: int, how: signal.Signals) -> None:
    """Start or continue a run, and send it a signal between that step's checkpoint and the next."""
    before = f"runs/stopped/checkpoints/global_step_{step + 1}"
    status, output = stop_run(["sft", str(tuning), *overrides], directory, before, how)
    assert status == (-signal.SIGKILL if how is signal.SIGKILL else 128 + how)
    assert "Traceback" not in output


def test_episodes_are_solved_learnt_and_played(quintet: Command, tmp_path: Path) -> None:
    """RAGEN's stages: a small policy that saw 100 solved lakes answers in their form on others."""
    episodes = "sft.episodes={episodes: 100, validation_episodes: 10, processes: 2}"
    quick = [
        "sft.batch=32",
        "sft.optimizer.learning_rate=0.004",
        "training.threads=1",
        "rollout.max_turns=4",
        "checkpoint.every_steps=0",
    ]
    done = quintet(
        "sft", episodes, *quick, "sft.epochs=5", "validation.episodes=32", "sft.output_dir=out", "env.size=3"
    )
    assert "success_rate" in done.stdout
    assert (tmp_path / "out/merged_model/model.safetensors").exists()
    lines = metrics(tmp_path / "runs/sft-frozenlake")
    assert lines[-1]["val/frozenlake/valid_format"] > 0.5
    assert lines[-1]["step"] == lines[-2]["step"] + 1
    assert (tmp_path / "sft/data/frozenlake/train.parquet").exists()


REFERENCES = Path(__file__).parents[1] / "unit/config/dialects/keys"


def test_verls_own_reference_tunes_a_local_model(
    quintet: Command, tuning: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key of it as it stands, the model alone put in its place; what its users' files say of data and trainer."""
    # verl has no key for it, and two threads wait for each other in steps as small as these
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    create_preset_policy("grid-1m", tmp_path / "made", [str(talk(number)) for number in range(48)], 0)
    (tmp_path / "sft_trainer.yaml").write_text((REFERENCES / "verl_sft_trainer.yaml").read_text())
    for name in ("train", "held"):
        rows = [json.loads(line)["messages"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        results = [{"extra_info": {"question": row[0]["content"], "answer": row[1]["content"]}} for row in rows]
        (tmp_path / f"{name}_rows.jsonl").write_text("\n".join(map(json.dumps, results)))
    overrides = [
        f"model.partial_pretrain={tmp_path / 'made'}",
        *("data.train_files=train_rows.jsonl", "data.val_files=held_rows.jsonl"),
        *("data.prompt_key=extra_info", "data.prompt_dict_keys=['question']"),
        *("data.response_key=extra_info", "data.response_dict_keys=['answer']"),
        *("data.train_batch_size=10", "data.micro_batch_size_per_gpu=4", "data.max_length=128"),
        *("trainer.default_local_dir=out/sums", "trainer.logger=['console']", "trainer.total_epochs=2"),
    ]
    done = quintet("sft", "sft_trainer.yaml", *overrides)
    assert "sft_trainer.yaml: a configuration of verl" in done.stderr
    run = tmp_path / "out/sums"
    lines = metrics(run)
    assert lines[-1]["step"] == 8, "two passes of four steps"
    # a tenth of the eight steps warms up: none; then the cosine falls from the reference's 1e-5
    rates = [line["train/lr"] for line in lines if "train/lr" in line]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (pytest.approx(1e-5, rel=0.1), 0.0)
    assert {"train/loss", "val/loss"} <= set(lines[-1])
    assert weights(run / "model") != weights(tmp_path / "made")
    assert "learning_rate: 1.0e-05  # optim.lr: sft_trainer.yaml:2" in (run / "config.yaml").read_text()
