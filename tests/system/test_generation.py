"""If these fail, a file of generated responses is lost or differs after an interruption, or cannot be scored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import warm_processes

from quintet.policies.tiny_models import create_preset_policy

Command = Any

SCRIPT = """\
python3 -m verl.trainer.main_generation data.path=sums/train.parquet data.output_path=$1 data.n_samples=2 \\
    data.batch_size=8 model.path=model rollout.name=hf rollout.prompt_length=32 rollout.response_length=12 \\
    rollout.top_k=0 rollout.top_p=1.0 trainer.n_gpus_per_node=1 rollout.dtype=float32
"""
SCORES = """\
python3 -m verl.trainer.main_eval data.path=answers.parquet custom_reward_function.path=length.py
"""
LENGTH = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100
"""


@pytest.fixture(autouse=True)
def _model(quintet: Command, tmp_path: Path) -> None:
    quintet("data", "make", "addition", "sums", "digits=1", "--train", "40", "--validation", "5")
    texts = [message["content"] for row in rows(tmp_path / "sums/train.parquet") for message in row["prompt"]]
    create_preset_policy("numbers-1m", tmp_path / "model", texts, 0)
    for name, text in {"score.sh": SCORES, "length.py": LENGTH}.items():
        (tmp_path / name).write_text(text)


def rows(path: Path) -> Any:
    return pq.read_table(path).to_pylist()


def kill_after_a_batch(tmp_path: Path, *words: str) -> None:
    """Run `quintet …`, and kill it once it has stored a batch, but not all."""
    store = tmp_path / "runs/generate-answers/responses.jsonl"
    process = warm_processes.Popen(
        [sys.executable, "-m", "quintet", *words], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 200
        while not store.exists() or store.read_bytes().count(b"\n") < 2:
            assert process.poll() is None, "it has ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_a_script_of_verl_generates_is_killed_continues_and_is_scored(quintet: Command, tmp_path: Path) -> None:
    """`main_generation`, then `main_eval`: the mean over prompts of the mean over their responses, by data source."""
    (tmp_path / "whole.sh").write_text(SCRIPT.replace("$1", "whole.parquet"))
    (tmp_path / "run.sh").write_text(SCRIPT.replace("$1", "answers.parquet"))
    quintet("generate", "whole.sh")
    whole, source = rows(tmp_path / "whole.parquet"), rows(tmp_path / "sums/train.parquet")
    assert [{key: row[key] for key in source[0]} for row in whole] == source
    assert all(len(row["responses"]) == 2 for row in whole)

    kill_after_a_batch(tmp_path, "generate", "run.sh")
    assert not (tmp_path / "answers.parquet").exists()
    lines = (tmp_path / "runs/generate-answers/responses.jsonl").read_text().splitlines()
    continued = quintet("train", "run.sh")  # the same command under its other name
    assert "40 prompts, 80 responses" in continued.stdout
    assert (tmp_path / "runs/generate-answers/responses.jsonl").read_text().splitlines()[: len(lines)] == lines
    assert rows(tmp_path / "answers.parquet") == whole

    told = json.loads(quintet("eval", "score.sh", "--json").stdout)
    mean = sum(sum(map(len, row["responses"])) / 2 for row in whole) / 40 / 100
    assert told["metrics"]["test_score/addition"] == pytest.approx(mean)
    assert told["sources"]["addition"]["answers"] == 80
    assert list(told["sources"]["addition"]["passed"]) == ["1", "2"]


def test_engines_of_two_ranks_write_what_one_writes(quintet: Command, tmp_path: Path) -> None:
    words = ("--data", "sums/train.parquet", "--samples", "3", "--max-tokens", "8", "generation.batch_size=16")
    quintet("generate", "model", "-o", "one.parquet", *words)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "quintet"]
    command = [*torchrun, "generate", "model", "-o", "two.parquet", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    warm_processes.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=240, env=environment)
    assert rows(tmp_path / "two.parquet") == rows(tmp_path / "one.parquet")
    assert json.loads((tmp_path / "runs/generate-two/processes/rank_1.json").read_text())["outcome"] == "ended"
