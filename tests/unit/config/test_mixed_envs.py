"""If these fail, a run of several envs is another one than its file says, or a fault in it isn't told by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.config.checks.unsupported import run_problems
from quintet.config.compose import load_experiment
from quintet.config.native.mixed_envs import apportion
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.plan.run_plan import plan_run
from quintet.config.yaml_writer import dump_config
from quintet.errors import ConfigError

LAKE = "envs.lake.share=3"
BOXES = "envs.boxes={env: {name: sokoban}, max_actions_per_turn: 2, start_states: 9}"


def test_one_env_is_played_as_before() -> None:
    (one,) = load_experiment(None, ["env.name=sokoban", "training.start_states=5"]).experiment.run_envs
    assert (one.name, one.key, one.start_states, one.validation_episodes) == ("sokoban", "env", 5, 256)


def test_each_env_has_what_is_its_own_and_else_what_the_run_has() -> None:
    words = [LAKE, BOXES, "training.start_states=50", "validation.episodes=40", "rollout.max_turns=7"]
    run = load_experiment(None, words).experiment
    lake, boxes = run.run_envs
    assert (lake.name, lake.config.name, lake.key) == ("lake", "frozenlake", "envs.lake.env")
    assert (lake.start_states, boxes.start_states) == (50, 9)
    assert (lake.validation_episodes, boxes.validation_episodes, run.validation_start_states) == (30, 10, 40)
    assert (lake.rollout.max_actions_per_turn, boxes.rollout.max_actions_per_turn) == (1, 2)
    assert lake.rollout.max_turns == boxes.rollout.max_turns == 7


def test_a_number_of_validation_episodes_of_its_own_counts_before_the_share() -> None:
    run = load_experiment(None, [LAKE, BOXES, "validation.episodes=8", "envs.boxes.validation_episodes=5"]).experiment
    assert [one.validation_episodes for one in run.run_envs] == [6, 5]


def test_a_small_share_still_has_a_validation_episode() -> None:
    run = load_experiment(None, ["envs.a.share=1000", "envs.b.share=1", "validation.episodes=4"]).experiment
    assert [one.validation_episodes for one in run.run_envs] == [4, 1]


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [(10, [1, 1], [5, 5]), (10, [2, 1], [7, 3]), (3, [0.1, 0.1, 0.1], [1, 1, 1]), (1, [1, 3], [0, 1]), (0, [1], [0])],
)
def test_numbers_are_divided_whole(total: int, shares: list[float], parts: list[int]) -> None:
    assert apportion(total, shares) == parts


def test_a_key_of_a_env_is_known_by_its_place_and_said_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("envs:\n  lake:\n    env: {size: 5, slippery: true}\n  boxes: {env: {name: sokoban}}\n")
    composed = load_experiment(str(path), ["envs.lake.share=2", "envs.lake.env.size=6"])
    assert composed.provenance["envs.lake.env.slippery"] == f"{path}:3"
    assert composed.provenance["envs.lake.env.size"] == composed.provenance["envs.lake.share"] == "command line"
    assert composed.experiment.envs["lake"].env.model_dump()["size"] == 6


def test_another_kind_of_env_takes_none_of_the_old_ones_options(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("envs: {lake: {env: {size: 5}}}\n")
    words = ["envs.lake.env.boxes=2", "envs.lake.env.name=sokoban"]
    run = load_experiment(str(path), words).experiment
    assert run.run_envs[0].config.model_dump().items() >= {"name": "sokoban", "boxes": 2}.items()


def test_a_dumped_mixture_is_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "dumped.yaml"
    composed = load_experiment(None, [LAKE, BOXES])
    path.write_text(dump_config(composed))
    assert "\nworld:" not in path.read_text()
    assert load_experiment(str(path)).experiment == composed.experiment


FAULTS: list[tuple[list[str], tuple[str, ...]]] = [
    (["envs.boxes.shaer=2"], ("unknown key envs.boxes.shaer = 2", "did you mean envs.boxes.share?")),
    (["envs.lake.env.sise=2"], ("unknown key envs.lake.env.sise", "envs.lake.env.size")),
    (["envs.boxes.env.size=2"], ("belongs to envs.boxes.env.name=frozenlake", "is sokoban")),
    (["envs.boxes.share=-1"], ("envs.boxes.share = -1 (command line): must be a number ≥ 0",)),
    (["envs.lake.env.size=1"], ("envs.lake.env.size = 1", "an integer ≥ 2 and ≤ 32")),
    (["envs.x.env.name=sokobn"], ("envs.x.env.name = 'sokobn'", "did you mean sokoban?")),
    (["envs.boxes=3"], ("envs.boxes = 3", "must be a section", "envs.boxes.env")),
    (["env.size=6"], ("env.size = 6 (command line)", "lake, boxes", "leave `env` out")),
    (["envs.all.share=1"], ("envs.all (command line)", "rename it")),
    (["envs.s/t.share=1"], ("envs.s/t (command line)", "letters, digits, - and _")),
    (["envs.sums.env.name=prompts"], ("envs.sums.env.name = 'prompts'", "cannot be mixed", "separate run")),
    (["data.train_files=[x.parquet]"], ("lake, boxes make their own start states", "envs={} env.name=prompts")),
]


@pytest.mark.parametrize(("words", "told"), FAULTS, ids=[words[0] for words, _ in FAULTS])
def test_what_is_wrong_in_a_mixture_is_told_by_its_key(words: list[str], told: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        load_experiment(None, [LAKE, BOXES, *words])
    for word in told:
        assert word in str(error.value)


def test_envs_that_are_no_mapping_are_told() -> None:
    with pytest.raises(ConfigError, match=r"envs = 3 .*must be a mapping"):
        load_experiment(None, ["envs=3"])


def test_what_a_mixed_env_waits_for_is_told_by_its_own_key() -> None:
    composed = load_experiment(None, [LAKE, "envs.lake.env.render=vision", "envs.arm.env.name=simulator"])
    assert {fault.key for fault in run_problems(composed)} == {"envs.lake.env.render", "envs.arm.env"}


def test_the_plan_says_every_envs_part() -> None:
    composed = load_experiment(None, [LAKE, BOXES, "validation.episodes=40"])
    found = plan_run(composed, None).to_json()
    assert found["run"]["envs"].startswith("lake (frozenlake, size 4): 0.75 of the groups, 30 held-out episodes; boxes")
    assert "validation_episodes" in str(found)
    assert compute_batch_arithmetic(composed).episodes_per_step == 512
