"""If these fail, a run of several worlds is another one than its file says, or a fault in it isn't told by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.config import dump_config, load_experiment, plan
from quintet.config.native.mixture import apportioned
from quintet.config.plan.survey import survey
from quintet.config.waiting import waiting_faults
from quintet.errors import ConfigError

LAKE = "worlds.lake.share=3"
BOXES = "worlds.boxes={world: {name: sokoban}, max_actions_per_turn: 2, start_states: 9}"


def test_one_world_is_played_as_before() -> None:
    (one,) = load_experiment(None, ["world.name=sokoban", "training.start_states=5"]).experiment.played
    assert (one.name, one.key, one.start_states, one.validation_games) == ("sokoban", "world", 5, 256)


def test_each_world_has_what_is_its_own_and_else_what_the_run_has() -> None:
    words = [LAKE, BOXES, "training.start_states=50", "validation.games=40", "rollout.max_turns=7"]
    run = load_experiment(None, words).experiment
    lake, boxes = run.played
    assert (lake.name, lake.config.name, lake.key) == ("lake", "frozenlake", "worlds.lake.world")
    assert (lake.start_states, boxes.start_states) == (50, 9)
    assert (lake.validation_games, boxes.validation_games, run.held_out_starts) == (30, 10, 40)
    assert (lake.rollout.max_actions_per_turn, boxes.rollout.max_actions_per_turn) == (1, 2)
    assert lake.rollout.max_turns == boxes.rollout.max_turns == 7


def test_a_number_of_validation_games_of_its_own_counts_before_the_share() -> None:
    run = load_experiment(None, [LAKE, BOXES, "validation.games=8", "worlds.boxes.validation_games=5"]).experiment
    assert [one.validation_games for one in run.played] == [6, 5]


def test_a_small_share_still_has_a_validation_game() -> None:
    run = load_experiment(None, ["worlds.a.share=1000", "worlds.b.share=1", "validation.games=4"]).experiment
    assert [one.validation_games for one in run.played] == [4, 1]


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [(10, [1, 1], [5, 5]), (10, [2, 1], [7, 3]), (3, [0.1, 0.1, 0.1], [1, 1, 1]), (1, [1, 3], [0, 1]), (0, [1], [0])],
)
def test_numbers_are_divided_whole(total: int, shares: list[float], parts: list[int]) -> None:
    assert apportioned(total, shares) == parts


def test_a_key_of_a_world_is_known_by_its_place_and_said_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("worlds:\n  lake:\n    world: {size: 5, slippery: true}\n  boxes: {world: {name: sokoban}}\n")
    composed = load_experiment(str(path), ["worlds.lake.share=2", "worlds.lake.world.size=6"])
    assert composed.provenance["worlds.lake.world.slippery"] == f"{path}:3"
    assert composed.provenance["worlds.lake.world.size"] == composed.provenance["worlds.lake.share"] == "command line"
    assert composed.experiment.worlds["lake"].world.model_dump()["size"] == 6


def test_another_kind_of_world_takes_none_of_the_old_ones_options(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("worlds: {lake: {world: {size: 5}}}\n")
    words = ["worlds.lake.world.boxes=2", "worlds.lake.world.name=sokoban"]
    run = load_experiment(str(path), words).experiment
    assert run.played[0].config.model_dump().items() >= {"name": "sokoban", "boxes": 2}.items()


def test_a_dumped_mixture_is_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "dumped.yaml"
    composed = load_experiment(None, [LAKE, BOXES])
    path.write_text(dump_config(composed))
    assert "\nworld:" not in path.read_text()
    assert load_experiment(str(path)).experiment == composed.experiment


FAULTS: list[tuple[list[str], tuple[str, ...]]] = [
    (["worlds.boxes.shaer=2"], ("unknown key worlds.boxes.shaer = 2", "did you mean worlds.boxes.share?")),
    (["worlds.lake.world.sise=2"], ("unknown key worlds.lake.world.sise", "worlds.lake.world.size")),
    (["worlds.boxes.world.size=2"], ("belongs to worlds.boxes.world.name=frozenlake", "is sokoban")),
    (["worlds.boxes.share=0"], ("worlds.boxes.share = 0 (command line): must be a number > 0",)),
    (["worlds.lake.world.size=1"], ("worlds.lake.world.size = 1", "an integer ≥ 2 and ≤ 32")),
    (["worlds.x.world.name=sokobn"], ("worlds.x.world.name = 'sokobn'", "did you mean sokoban?")),
    (["worlds.boxes=3"], ("worlds.boxes = 3", "must be a section", "worlds.boxes.world")),
    (["world.size=6"], ("world.size = 6 (command line)", "lake, boxes", "worlds.NAME.world.size")),
    (["worlds.all.share=1"], ("worlds.all (command line)", "another name")),
    (["worlds.s/t.share=1"], ("worlds.s/t (command line)", "letters, digits, - and _")),
    (["worlds.sums.world.name=prompts"], ("worlds.sums.world.name = 'prompts'", "can't be mixed", "of their own")),
    (["data.train_files=[x.parquet]"], ("lake, boxes make their own starts and read no files", "leave worlds out")),
]


@pytest.mark.parametrize(("words", "told"), FAULTS, ids=[words[0] for words, _ in FAULTS])
def test_what_is_wrong_in_a_mixture_is_told_by_its_key(words: list[str], told: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        load_experiment(None, [LAKE, BOXES, *words])
    for word in told:
        assert word in str(error.value)


def test_worlds_that_are_no_mapping_are_told() -> None:
    with pytest.raises(ConfigError, match=r"worlds = 3 .*must be a mapping"):
        load_experiment(None, ["worlds=3"])


def test_what_a_mixed_world_waits_for_is_told_by_its_own_key() -> None:
    composed = load_experiment(None, [LAKE, "worlds.lake.world.render=vision", "worlds.art.world.name=svg"])
    assert {fault.key for fault in waiting_faults(composed)} == {"worlds.lake.world.render", "worlds.art.world"}


def test_the_plan_says_every_worlds_part() -> None:
    composed = load_experiment(None, [LAKE, BOXES, "validation.games=40"])
    found = survey(composed, None).as_json()
    assert found["run"]["worlds"].startswith("lake (frozenlake, size 4): 0.75 of the groups, 30 held-out games; boxes")
    assert "validation_games" in str(found)
    assert plan(composed).games_per_step == 512
