"""If these fail, a reward model or a language model that judges isn't what the policy is rewarded by."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import warm_processes

Command = Any

SUMS = """\
name: sums
env: {name: prompts}
policy: {preset: numbers-1m}
data: {train_files: sums/train.parquet, validation_files: sums/validation.parquet}
rollout: {max_turns: 1, window_size: null, max_prompt_tokens: 64, max_response_tokens: 8}
warm_start: null
training: {steps: 1, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
validation: {before_training: false, every_steps: -1}
checkpoint: {every_steps: 0}
tracking: {trajectories_every_steps: 1, loggers: [jsonl]}
"""


@pytest.fixture
def sums(quintet: Command, tmp_path: Path) -> Path:
    quintet("data", "make", "addition", "sums", "digits=1", "--train", "20", "--validation", "4")
    path = tmp_path / "sums.yaml"
    path.write_text(SUMS)
    return path


def answers(run: Path) -> list[dict[str, Any]]:
    """What was answered in the first step, with what each answer was worth."""
    return [json.loads(line) for line in (run / "trajectories/train/step_000001.jsonl").read_text().splitlines()]


def mean_score(run: Path) -> float:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(next(line for line in records if line["step"] == 1)["critic/score/mean"])


def classifier(policy: Path, directory: Path) -> None:
    """A sequence classifier of random weights, with the policy's own shape and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(policy, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.normal_(0.0, 1.0)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(policy).save_pretrained(directory)


def test_a_reward_models_scores_are_the_rewards(quintet: Command, sums: Path, tmp_path: Path) -> None:
    quintet("train", str(sums), "training.steps=0", "name=made")
    classifier(tmp_path / "runs/made/checkpoints/global_step_0/hf", tmp_path / "judge")
    quintet("train", str(sums), "reward={model: {path: judge}, scale: 2.0}")
    verdict = answers(tmp_path / "runs/sums")
    assert len(verdict) == 16
    for answer in verdict:
        assert answer["failure"] is None
        assert answer["reward"] == pytest.approx(2.0 * answer["reward_components"]["model_score"], rel=1e-6)
    assert len({answer["reward_components"]["model_score"] for answer in verdict}) > 8, "other answers, other scores"
    rewards = [answer["reward"] for answer in verdict]
    assert mean_score(tmp_path / "runs/sums") == pytest.approx(sum(rewards) / 16, rel=1e-5)
    assert scored_alone(tmp_path, verdict[0]["turns"][0]) == pytest.approx(
        verdict[0]["reward_components"]["model_score"], rel=1e-5
    )
    # the same over two processes, with a part of the weights in each
    overrides = ["-m", "quintet", "train", str(sums), "name=sharded"]
    overrides.append("reward={model: {path: judge, min_sharded_parameters: 10000}, scale: 2.0}")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    warm_processes.run([*ranks, *overrides], cwd=tmp_path, check=True, capture_output=True, timeout=240)
    sharded = [answer["reward"] for answer in answers(tmp_path / "runs/sharded")]
    assert sharded == pytest.approx(rewards, rel=1e-4)


def scored_alone(directory: Path, turn: dict[str, Any]) -> float:
    """What transformers gives for that prompt and answer, by themselves."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(directory / "judge").eval()
    asked = [{"role": "user", "content": turn["observation"].removeprefix("user: ")}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt + turn["text"] + tokenizer.eos_token, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return float(model(tokens["input_ids"]).logits)


@contextmanager
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Speaks OpenAI's protocol on this machine; gives an odd number of letters 8 of 10, an even one 3."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, **asked})
            verdict = "So. [[8]]" if len(asked["messages"][0]["content"]) % 2 else "So. [[3]]"
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": verdict}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # sixteen verdicts are asked for at once; by default five may wait

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def test_a_language_models_verdicts_are_the_rewards(quintet: Command, sums: Path, tmp_path: Path) -> None:
    with endpoint() as (url, seen):
        prompt = "{answer}"
        judge = json.dumps({"url": url, "model": "any", "prompt": prompt, "retries": 0})
        quintet("train", str(sums), f"reward={{judge: {judge}}}")
    assert len(seen) == 16
    assert {(one["path"], one["model"]) for one in seen} == {("/v1/chat/completions", "any")}
    verdict = answers(tmp_path / "runs/sums")
    asked = sorted(one["messages"][0]["content"] for one in seen)
    assert asked == sorted(answer["turns"][0]["text"] for answer in verdict)
    for answer in verdict:
        result = 0.8 if len(answer["turns"][0]["text"]) % 2 else 0.3
        assert (answer["failure"], answer["reward"], answer["reward_components"]["acc"]) == (None, result, result)
    assert {answer["reward"] for answer in verdict} == {0.3, 0.8}
    assert mean_score(tmp_path / "runs/sums") == pytest.approx(sum(answer["reward"] for answer in verdict) / 16)
