"""If these fail, answering questions from files doesn't train, forgets where it was, or dies of a reward function."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from paused_runs import stop_run

from quintet.tracking.metrics import describe, without_timing

Command = Any

SMALL = """\
name: sums
env: {name: prompts}
policy: {preset: numbers-1m}
data: {train_files: sums/train.parquet, validation_files: sums/validation.parquet}
rollout: {max_turns: 1, window_size: null, max_prompt_tokens: 64, max_response_tokens: 16}
warm_start: {episodes: 60, updates: 25, turns_per_update: 32, until_success: null}
training: {steps: 3, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
validation: {every_steps: 2}
checkpoint: {every_steps: 1}
tracking: {trajectories_every_steps: 1, loggers: [jsonl]}
"""


@pytest.fixture
def sums(quintet: Command, tmp_path: Path) -> Path:
    quintet("data", "make", "addition", "sums", "digits=1", "--train", "20", "--validation", "6")
    path = tmp_path / "sums.yaml"
    path.write_text(SMALL)
    return path


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


VARIANTS = {
    "grpo, refilled and shaped": [
        "algorithm.filter={refill_rounds: 1, keep_share: 0.5}",
        "algorithm.shaping={length_penalty: 0.1, length_budget: 4}",
    ],
    "remax, gspo": ["algorithm.advantage={name: remax}", "algorithm.loss={name: gspo}"],
    "gae, corrected, over observations": [
        "algorithm.advantage={name: gae}",
        "algorithm.correction={level: sequence, reject: [{upper: 2.0}]}",
        "algorithm.advantage_over_response_tokens=false",
    ],
    "token baseline, full divergence": [
        "algorithm.advantage={name: optimal_token_baseline}",
        "algorithm.loss={name: clip_cov}",
        "algorithm.kl={estimator: full, place: loss, coefficient: 0.1}",
    ],
    "gdpo, divergence off the rewards": [
        "algorithm.advantage={name: gdpo}",
        "algorithm.kl={estimator: full, place: reward, coefficient: 0.1, target: 0.1}",
        "reward={format: answer_tag, format_reward: 0.5, wrong_reward: -1.0, scale: 2.0}",
    ],
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_questions_are_answered_and_learnt_from(
    quintet: Command, sums: Path, tmp_path: Path, overrides: list[str]
) -> None:
    quintet("train", str(sums), "training.steps=2", *overrides)
    run = tmp_path / "runs/sums"
    records = lines(run)
    assert [line["step"] for line in records] == [0, 1, 2]
    for line in records:
        for name in set(line) - {"step", "time_seconds"}:
            describe(name)
    assert {"val/prompts/success_rate", "val-core/addition/acc/mean@1"} <= set(records[0])
    assert records[1]["actor/grad_norm"] >= 0
    episode = json.loads((run / "trajectories/train/step_000001.jsonl").read_text().splitlines()[0])
    assert set(episode["reward_components"]) >= {"acc"}


def test_a_killed_run_goes_on_with_the_next_questions(quintet: Command, sums: Path, tmp_path: Path) -> None:
    quintet("train", str(sums), "name=whole")
    stop_run(["train", str(sums), "name=stopped"], tmp_path, "runs/stopped/checkpoints/global_step_2", signal.SIGKILL)
    quintet("train", str(sums), "name=stopped")
    runs = [[without_timing(line) for line in lines(tmp_path / f"runs/{name}")] for name in ("whole", "stopped")]
    assert runs[0] == runs[1]
    asked = [
        [json.loads(line)["seed"] for line in (file).read_text().splitlines()]
        for file in sorted((tmp_path / "runs/stopped/trajectories/train").glob("*.jsonl"))
    ]
    assert len({seed for step in asked for seed in step}) == 12, "three steps of four questions, none twice"


REWARD = """\
def score(data_source, solution_str, ground_truth, extra_info, bonus):
    if extra_info["index"] % 2:
        raise ValueError("no opinion on odd rows")
    return {"score": bonus, "mine": 3.0}
"""


def test_a_reward_function_that_raises_costs_its_answers_and_then_the_run(
    quintet: Command, sums: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    own = ["reward.function=mine.py:score", "reward.function_arguments={bonus: 0.5}", "training.steps=1"]
    quintet("train", str(sums), *own, "reward.max_failed_share=1.0")
    step = lines(tmp_path / "runs/sums")[1]
    assert 0 < step["reward/failed"] < 16
    episodes = (tmp_path / "runs/sums/trajectories/train/step_000001.jsonl").read_text().splitlines()
    failed = [episode["failure"] for episode in map(json.loads, episodes) if episode["failure"]]
    assert len(failed) == step["reward/failed"]
    assert failed[0]["error_type"] == "ValueError"
    assert "no opinion" in failed[0]["message"]
    done = quintet("train", str(sums), *own, "reward.max_failed_share=0.01", "name=strict", check=False)
    assert done.returncode == 2
    assert "could not be scored (first: ValueError: no opinion on odd rows" in done.stderr
    assert "Traceback" not in done.stderr
