"""If these fail, a policy is tuned on prompts that it never meets in play, or is measured on games that it learnt."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quintet.config import load_experiment
from quintet.config.native import Experiment
from quintet.envs.catalogue import make_world
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.sft_data import Encoder
from quintet.pipelines.sft_games import play_held_out, solved_games
from quintet.policies.causal_lm import load_tokenizer
from quintet.rollout.dialogue import ChatFormat, Dialogue
from quintet.tracking.progress import NullProgress


def experiment(tmp_path: Path, *words: str) -> Experiment:
    given = [f"sft.games.directory={tmp_path}/data", "sft.games.games=12", "sft.games.validation_games=4"]
    return load_experiment(None, [*given, *words]).experiment


@pytest.mark.parametrize("window", ["1", "2", "null"])
def test_a_row_is_what_the_policy_would_have_seen(tmp_path: Path, policy_directory: Path, window: str) -> None:
    """Token by token, for every move of every game."""
    config = experiment(tmp_path, f"rollout.window_size={window}")
    tokenizer = load_tokenizer(policy_directory)
    train, _ = solved_games(config, NullProgress())
    encode, chat = Encoder(config, tokenizer, train), ChatFormat(tokenizer)
    dialogue = Dialogue.under(config.rollout, chat, "")
    moves = 0
    for number in range(len(train.rows)):
        row = train.rows[number]
        if row["extra_info"]["turn"] == 0:
            dialogue = Dialogue.under(config.rollout, chat, make_world(config.world).instruction())
        moves += row["extra_info"]["turn"] > 1
        prompt, _, _ = dialogue.observe(row["prompt"][-1]["content"])
        reply = (*chat.encode(row["response"]), chat.end_id)
        dialogue.reply(reply)
        (passage,) = encode(number)
        assert passage.tokens == prompt + reply
        assert passage.own == (False,) * len(prompt) + (True,) * len(reply)
    assert moves > 5


def test_text_forms_have_the_template_applied(tmp_path: Path, policy_directory: Path) -> None:
    tokenizer = load_tokenizer(policy_directory)
    config = experiment(tmp_path, "rollout.window_size=null", "sft.games.form=base")
    train, _ = solved_games(config, NullProgress())
    (passage,) = Encoder(config, tokenizer, train)(0)
    row = train.rows[0]
    assert tokenizer.decode(passage.tokens) == f"{row['prompt']}{row['response']}<|im_end|>"
    with pytest.raises(ConfigError, match="whole conversations") as error:
        solved_games(experiment(tmp_path, "sft.games.form=base"), NullProgress())
    assert error.value.key == "rollout.window_size"


def test_games_are_solved_once_and_anew_where_something_changed(tmp_path: Path) -> None:
    shelf = tmp_path / "data/frozenlake"
    splits = solved_games(experiment(tmp_path), NullProgress())
    seeds = [{split.rows[i]["extra_info"]["index"] for i in range(len(split.rows))} for split in splits]
    assert [len(one) for one in seeds] == [12, 4]
    assert not seeds[0] & seeds[1]
    before = {path.name: path.stat().st_mtime_ns for path in shelf.iterdir()}
    solved_games(experiment(tmp_path, "sft.games.processes=4", "sft.epochs=9"), NullProgress())
    assert {path.name: path.stat().st_mtime_ns for path in shelf.iterdir()} == before
    solved_games(experiment(tmp_path, "sft.games.seed=5"), NullProgress())
    assert json.loads((shelf / "made_of.json").read_text())["games"]["seed"] == 5


def test_rows_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    shelf = tmp_path / "data/frozenlake"
    shelf.mkdir(parents=True)
    (shelf / "train.parquet").write_text("mine")
    with pytest.raises(MachineError, match="is there already") as error:
        solved_games(experiment(tmp_path), NullProgress())
    assert "sft.games.directory" in str(error.value)
    assert (shelf / "train.parquet").read_text() == "mine"


def test_a_world_with_too_few_games_is_refused_by_our_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begin differently") as error:
        solved_games(experiment(tmp_path, "world.size=2", "sft.games.games=99"), NullProgress())
    assert error.value.key == "sft.games.max_depth"


def test_what_several_processes_taught_plays_held_out_games_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it has no layers to split, and on a GPU is refused shards in main memory: after all the training."""
    given: list[Experiment] = []

    def build(config: Experiment, model: Path) -> None:
        given.append(config)
        raise InterruptedError

    monkeypatch.setattr("quintet.runtime.local.build", build)
    config = experiment(tmp_path, "actor.parallel.tensor=2", "actor.memory.sharded_offload=true")
    with pytest.raises(InterruptedError):
        play_held_out(cast(Any, SimpleNamespace(config=config)), tmp_path / "model", 3)
    (alone,) = given
    assert alone.policy.path == str(tmp_path / "model")
    assert (alone.actor.parallel.tensor, alone.actor.memory.sharded_offload) == (1, False)
