"""If these fail, fine-tuning trains on other episodes than the expert solved, or validates another policy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.envs.factory import build_env
from quintet.envs.start_states import Split, split_seed
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.sft.episodes import build_solved_episodes, validate_in_episodes
from quintet.pipelines.sft.rows import RowEncoder
from quintet.policies.model_loading import load_tokenizer
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue
from quintet.tracking.progress import NullProgress


def experiment(tmp_path: Path, *overrides: str) -> Experiment:
    runs = [
        f"sft.episodes.directory={tmp_path}/data",
        "sft.episodes.episodes=12",
        "sft.episodes.validation_episodes=4",
    ]
    return load_experiment(None, [*runs, *overrides]).experiment


@pytest.mark.parametrize("window", ["1", "2", "null"])
def test_a_row_equals_the_policys_prompt_in_an_episode(tmp_path: Path, policy_directory: Path, window: str) -> None:
    """Token by token, for every move of every episode."""
    config = experiment(tmp_path, f"rollout.window_size={window}")
    tokenizer = load_tokenizer(policy_directory)
    train, _ = build_solved_episodes(config, NullProgress())
    encode, chat = RowEncoder(config, tokenizer, train), ChatFormat(tokenizer)
    dialogue = Dialogue.from_config(config.rollout, chat, "")
    moves = 0
    for number in range(len(train.rows)):
        row = train.rows[number]
        if row["extra_info"]["turn"] == 0:
            dialogue = Dialogue.from_config(config.rollout, chat, build_env(config.env).instruction())
        moves += row["extra_info"]["turn"] > 1
        prompt, _, _ = dialogue.observe(row["prompt"][-1]["content"])
        reply = (*chat.encode(row["response"]), chat.end_token_id)
        dialogue.add_response(reply)
        (passage,) = encode(number)
        assert passage.tokens == prompt + reply
        assert passage.loss_mask == (False,) * len(prompt) + (True,) * len(reply)
    assert moves > 5


def test_text_forms_have_the_template_applied(tmp_path: Path, policy_directory: Path) -> None:
    tokenizer = load_tokenizer(policy_directory)
    config = experiment(tmp_path, "rollout.window_size=null", "sft.episodes.form=base")
    train, _ = build_solved_episodes(config, NullProgress())
    (passage,) = RowEncoder(config, tokenizer, train)(0)
    row = train.rows[0]
    assert tokenizer.decode(passage.tokens) == f"{row['prompt']}{row['response']}<|im_end|>"
    with pytest.raises(ConfigError, match="whole conversations") as error:
        build_solved_episodes(experiment(tmp_path, "sft.episodes.form=base"), NullProgress())
    assert error.value.key == "rollout.window_size"


def test_episodes_are_solved_once_and_anew_where_something_changed(tmp_path: Path) -> None:
    shelf = tmp_path / "data/frozenlake"
    splits = build_solved_episodes(experiment(tmp_path), NullProgress())
    seeds = [{split.rows[i]["extra_info"]["index"] for i in range(len(split.rows))} for split in splits]
    assert [len(split) for split in seeds] == [12, 4]
    assert not seeds[0] & seeds[1]
    before = {path.name: path.stat().st_mtime_ns for path in shelf.iterdir()}
    build_solved_episodes(experiment(tmp_path, "sft.episodes.processes=4", "sft.epochs=9"), NullProgress())
    assert {path.name: path.stat().st_mtime_ns for path in shelf.iterdir()} == before
    train, _ = build_solved_episodes(experiment(tmp_path, "sft.episodes.seed=5"), NullProgress())
    assert train.rows[0]["extra_info"]["index"] == split_seed(Split.DEMONSTRATION, 5)
    assert json.loads((shelf / "made_of.json").read_text())["episodes"]["seed"] == 5


def test_no_solution_is_longer_than_the_configured_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shallow = ("sft.episodes.max_depth=1", "sft.episodes.episodes=3", "sft.episodes.validation_episodes=1")
    train, _ = build_solved_episodes(experiment(tmp_path, *shallow), NullProgress())
    assert [train.rows[number]["extra_info"]["turn"] for number in range(len(train.rows))] == [0, 0, 0]
    assert (tmp_path / "data/frozenlake/train.parquet").is_file()


def test_episodes_are_solved_in_the_configured_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(create: object, setup: object, processes: int) -> None:
        raise InterruptedError(processes)

    monkeypatch.setattr("quintet.data.demonstration_rows.WorkerPool", start)
    with pytest.raises(InterruptedError, match="3"):
        build_solved_episodes(experiment(tmp_path, "sft.episodes.processes=3"), NullProgress())


def test_existing_rows_of_other_runs_are_not_overwritten(tmp_path: Path) -> None:
    shelf = tmp_path / "data/frozenlake"
    shelf.mkdir(parents=True)
    (shelf / "train.parquet").write_text("mine")
    with pytest.raises(MachineError, match="exists already") as error:
        build_solved_episodes(experiment(tmp_path), NullProgress())
    assert "sft.episodes.directory" in str(error.value)
    assert (shelf / "train.parquet").read_text() == "mine"


def test_a_env_with_too_few_episodes_is_refused_by_our_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="different first observations") as error:
        build_solved_episodes(experiment(tmp_path, "env.size=2", "sft.episodes.episodes=99"), NullProgress())
    assert error.value.key == "sft.episodes.max_depth"


def test_what_several_processes_taught_plays_held_out_episodes_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it has no layers to split, and on a GPU is refused shards in host memory: after all the training."""
    runs: list[Experiment] = []

    def build(config: Experiment, model: Path) -> None:
        runs.append(config)
        raise InterruptedError

    monkeypatch.setattr("quintet.runtime.components.build_components", build)
    config = experiment(tmp_path, "actor.parallel.tensor=2", "actor.memory.sharded_offload=true")
    with pytest.raises(InterruptedError):
        validate_in_episodes(cast(Any, SimpleNamespace(config=config)), tmp_path / "model", 3)
    (alone,) = runs
    assert alone.policy.path == str(tmp_path / "model")
    assert (alone.actor.parallel.tensor, alone.actor.memory.sharded_offload) == (1, False)
