"""If these fail, different runs without a name overwrite or continue each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.config.compose import load_experiment


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "frozenlake"),
        (["env.name=sokoban"], "sokoban"),
        (["env.name=sokoban", "policy.path=/models/SmolLM2-135M"], "sokoban-SmolLM2-135M"),
        (["envs={a: {env: {name: sokoban}}, b: {env: {name: frozenlake}}}", "warm_start=null"], "a-b"),
        (
            ["env.name=prompts", "data.train_files=[/data/my sums.jsonl]", "policy.preset=numbers-1m"],
            "my-sums-numbers-1m",
        ),
        (["sft={}", "data.train_files=[chats.jsonl]"], "sft-chats"),
        (["sft={}", "data.train_files=[chats.jsonl]", "sft.path=runs/words/model"], "sft-chats-words"),
        (["sft.path=/hub/models--org--small/snapshots/0a1b", "data.train_files=[c.jsonl]"], "sft-c-small"),
        (["sft={episodes: {}}"], "sft-frozenlake"),
        (["evaluation.path=stored/answers.jsonl"], "answers"),
        (["name=mine", "env.name=sokoban"], "mine"),
    ],
)
def test_a_run_without_a_name_is_named_after_its_task_and_model(overrides: list[str], name: str) -> None:
    composed = load_experiment(None, overrides)
    assert composed.experiment.name == name
    assert composed.provenance["name"] == ("command line" if name == "mine" else "default")


def test_a_name_in_a_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: frozenlake\nenv: {name: sokoban}\n")
    assert load_experiment(str(tmp_path / "run.yaml")).experiment.name == "frozenlake"
