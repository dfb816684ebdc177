"""If these fail, episodes can't be won, aren't reproducible, or leak from training into validation."""

from __future__ import annotations

import random

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sokoban_levels import parse_level

from quintet.config.native.envs import ENVS, FrozenLakeConfig, SokobanConfig
from quintet.envs import frozenlake, grid
from quintet.envs.factory import build_env
from quintet.envs.frozenlake import FrozenLake, _generate_map, _is_solvable, _tiles
from quintet.envs.sokoban import Sokoban, _pushes, solve
from quintet.envs.start_states import Split, layout_split, split_of, split_seed, start_state
from quintet.errors import ConfigError
from quintet.records import Step


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_splits_share_no_seed(first: int, second: int) -> None:
    seeds = {split: split_seed(split, index) for split, index in zip(Split, (first, second, first), strict=True)}
    assert len(set(seeds.values())) == 3
    assert all(split_of(seed) is split for split, seed in seeds.items())


@pytest.mark.parametrize("env", [FrozenLakeConfig(size=2, floor_density=1.0), SokobanConfig(width=5, height=4)])
def test_splits_share_no_map_even_where_there_are_few(env: FrozenLakeConfig | SokobanConfig) -> None:
    """On a 2×2 lake there are a dozen maps: by seeds alone, training would see them all."""
    seen = {split: {_start(env, split_seed(split, i)) for i in range(60)} for split in Split}
    assert all(seen.values())
    for one in Split:
        for other in Split:
            assert one is other or not seen[one] & seen[other]


def _start(config: FrozenLakeConfig | SokobanConfig, seed: int) -> str:
    return build_env(config).reset(seed).text


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 8), st.floats(0.3, 1.0))
def test_every_lake_can_be_crossed(seed: int, size: int, density: float) -> None:
    rows = _generate_map(FrozenLakeConfig(size=size, floor_density=density), seed)
    assert _is_solvable(rows)
    assert "".join(rows).count("S") == "".join(rows).count("G") == 1
    assert layout_split("\n".join(rows)) is split_of(seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 2))
def test_every_level_is_solvable_and_not_solved_at_the_start(seed: int, boxes: int) -> None:
    env = Sokoban(SokobanConfig(boxes=boxes))
    level = parse_level(env.reset(seed).text)
    assert not level.solved
    assert level.boxes.bit_count() == level.targets.bit_count() == boxes
    plan = solve(level)
    assert plan
    steps = [env.step(action) for action in plan]
    assert steps[-1].terminated
    assert steps[-1].info["success"]
    assert not any(step.terminated for step in steps[:-1])
    total = sum(step.reward for step in steps)
    assert total == pytest.approx(-0.1 * len(plan) + boxes - _placed(level) + 10.0)


def _placed(level: object) -> int:
    return (level.boxes & level.targets).bit_count()  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", [FrozenLakeConfig(slippery=True), SokobanConfig()])
def test_the_same_seed_gives_the_same_episode(config: FrozenLakeConfig | SokobanConfig) -> None:
    def episode() -> list[str]:
        env = build_env(config)
        texts = [env.reset(12).text]
        for number in range(10):
            step = env.step(env.actions[number % 4])
            texts.append(step.observation.text)
            if step.terminated:
                break
        return texts

    assert episode() == episode()


@pytest.mark.parametrize("config", [FrozenLakeConfig(slippery=True), SokobanConfig()])
def test_envs_do_not_change_the_global_random_state(config: FrozenLakeConfig | SokobanConfig) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = build_env(config)
    env.reset(3)
    env.step(env.actions[0])
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize(("slippery", "rate"), [(False, 1 / 3), (True, 0.7)])
def test_dynamics_match_gymnasium(slippery: bool, rate: float) -> None:
    config = FrozenLakeConfig(slippery=slippery, success_rate=rate)
    for seed in range(12):
        env = FrozenLake(config)
        env.reset(seed)
        peer = gymnasium.make(
            "FrozenLake-v1",
            desc=_generate_map(config, seed),
            is_slippery=slippery,
            success_rate=rate,
            max_episode_steps=500,
        )
        peer.reset(seed=seed)
        for number in range(20):
            ours, (state, reward, terminated, _, _) = env.step(env.actions[number % 4]), peer.step(number % 4)
            assert (ours.reward, ours.terminated, env._position) == (reward, terminated, divmod(state, 4))
            if terminated:
                break


def test_success_rate_decides_how_often_a_move_succeeds() -> None:
    """RAGEN documents its `p` as this and passes it as floor density: here they are two options."""
    env = FrozenLake(FrozenLakeConfig(size=8, floor_density=1.0, slippery=True, success_rate=0.9))
    moved = 0
    for seed in range(300):
        env.reset(seed)
        row, column = env._position
        env.step("Down")
        moved += env._position == (min(row + 1, 7), column)
    assert 0.84 < moved / 300 < 0.96


@pytest.mark.parametrize("config", [FrozenLakeConfig(max_steps=3), SokobanConfig(max_steps=3)])
def test_the_env_ends_by_itself(config: FrozenLakeConfig | SokobanConfig) -> None:
    env = build_env(config)
    env.reset(3)
    steps = [env.step("Up") for _ in range(3)]
    assert [(step.truncated, step.terminated) for step in steps] == [(False, False), (False, False), (True, False)]


@pytest.mark.parametrize("config", [FrozenLakeConfig(), SokobanConfig()])
def test_frames_are_pictures_of_the_text(config: FrozenLakeConfig | SokobanConfig) -> None:
    env = build_env(config)
    rows = [line for line in env.reset(5).text.splitlines() if line.startswith(" ")]
    frame = env.render()
    assert frame.dtype == np.uint8
    assert frame.shape == (len(rows) * grid.TILE, len(rows[0].split()) * grid.TILE, 3)


def test_a_frame_shows_the_agent_in_the_hole() -> None:
    """gymnasium's own frame shows an empty hole, and a vision policy can't tell that it lost."""
    for seed in range(200):
        env = FrozenLake(FrozenLakeConfig(floor_density=0.6))
        env.reset(seed)
        for action in env.actions:
            row, column = env._position
            step = env.step(action)
            if step.terminated and not step.info["success"]:
                row, column = env._position
                cell = env.render()[row * 32 : (row + 1) * 32, column * 32 : (column + 1) * 32]
                assert not np.array_equal(cell, _tiles()["O"])
                assert " X" in step.observation.text
                return
    pytest.fail("nobody fell into a hole")


LEVEL = """\
 # # # # # #
 # _ _ _ _ #
 # _ X _ O #
 # _ _ _ _ #
 # P _ _ _ #
 # # # # # #"""


def test_an_observation_describes_the_neighbouring_cells() -> None:
    plain = FrozenLake(FrozenLakeConfig(observation="grid"))
    env = FrozenLake(FrozenLakeConfig())
    for seed in range(20):
        grid_text = plain.reset(seed).text
        rows = [line.split() for line in grid_text.splitlines()]
        text = env.reset(seed).text
        row, column = env._position
        tokens = text.splitlines()[-1].split()
        assert text.startswith(grid_text + "\n")
        for name, symbol in zip(tokens[::2], tokens[1::2], strict=True):
            r, c = {
                "Left": (row, column - 1),
                "Down": (row + 1, column),
                "Right": (row, column + 1),
                "Up": (row - 1, column),
            }[name]
            assert symbol == (rows[r][c] if 0 <= r < 4 and 0 <= c < 4 else "#")


def test_a_puzzle_by_hand() -> None:
    """Two steps up to stand left of the box, two pushes to the right."""
    level = parse_level(LEVEL)
    assert grid.grid_text(level.symbols()) == LEVEL
    assert solve(level) == ["Up", "Up", "Right", "Right"]
    assert (
        solve(parse_level(LEVEL.replace("_ X _ O", "_ _ _ O").replace("# _ _ _ _ #\n # _", "# X _ _ _ #\n # _")))
        is None
    )


def test_boxes_dont_go_through_walls_or_boxes() -> None:
    level = parse_level(" # # # # #\n # P X X #\n # O O _ #\n # # # # #")
    assert level.after(level.deltas["Right"]) == level
    assert level.after(level.deltas["Up"]) == level


def test_the_lakes_expert_walks_a_shortest_way() -> None:
    for seed in range(30):
        env = FrozenLake(FrozenLakeConfig(size=5))
        env.reset(seed)
        steps = [env.step(env.expert_action())]
        while not steps[-1].terminated:
            steps.append(env.step(env.expert_action()))
        assert steps[-1].info["success"]
        assert len(steps) == _shortest(_generate_map(FrozenLakeConfig(size=5), seed))


def _shortest(rows: list[str]) -> int:
    places = {(r, c) for r, row in enumerate(rows) for c, cell in enumerate(row) if cell == "S"}
    for length in range(100):
        if any(rows[r][c] == "G" for r, c in places):
            return length
        near = {(r + a, c + b) for r, c in places for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        places |= {(r, c) for r, c in near if 0 <= r < len(rows) and 0 <= c < len(rows) and rows[r][c] != "H"}
    raise AssertionError


@pytest.mark.parametrize("config", [SokobanConfig(width=4, height=4, boxes=4), SokobanConfig(min_solution_pushes=90)])
def test_an_impossible_puzzle_is_refused_not_searched_forever(config: SokobanConfig) -> None:
    with pytest.raises(ConfigError, match="gives a puzzle"):
        Sokoban(config).reset(0)


@pytest.mark.proves("vagen", "train_envs.env1.config.min_solution_steps")
def test_puzzles_have_solutions_of_the_length_that_is_asked_for() -> None:
    bounded = SokobanConfig(min_solution_steps=4, max_solution_steps=6, pull_steps=100)
    lengths = {len(solve(parse_level(_start(bounded, seed))) or ()) for seed in range(30)}
    assert min(lengths) >= 4
    assert max(lengths) <= 6
    with pytest.raises(ConfigError, match="a shortest solution of at least 99 actions"):
        Sokoban(SokobanConfig(width=4, height=4, min_solution_steps=99)).reset(0)


def test_a_room_has_the_configured_width_and_height() -> None:
    rows = _start(SokobanConfig(width=8, height=5, observation="grid"), 3).splitlines()
    assert [len(row.split()) for row in rows] == [8] * 5


def test_a_lake_whose_cells_are_all_frozen_has_no_hole() -> None:
    """With a density of 0.8, one of 4 lakes of 64 cells has holes but for a chance of 0.8^(4 × 62)."""
    assert all("O" not in _start(FrozenLakeConfig(size=8, floor_density=1.0), seed) for seed in range(4))


def test_pull_steps_and_pushes_decide_how_far_boxes_are_from_their_targets() -> None:
    """One pull moves the box by one cell; by default boxes are one or two cells away."""

    def distances(config: SokobanConfig) -> set[int]:
        return {_pushes(parse_level(_start(config, seed))) for seed in range(6)}

    assert distances(SokobanConfig(pull_steps=1)) == {1}
    assert min(distances(SokobanConfig(min_solution_pushes=3))) == 3


@pytest.mark.parametrize(("config", "reward"), [(FrozenLakeConfig(goal_reward=2.5), 2.5), (FrozenLakeConfig(), 1.0)])
def test_reaching_the_goal_pays_what_is_configured_and_nothing_else_does(
    config: FrozenLakeConfig, reward: float
) -> None:
    env = FrozenLake(config)
    env.reset(4)
    rewards = [step.reward for step in _solved(env)]
    assert rewards == [0.0] * (len(rewards) - 1) + [reward]


@pytest.mark.parametrize(
    ("config", "last", "sum_before"),
    [
        (SokobanConfig(step_reward=0.0, box_reward=0.0, solved_reward=1.5), 1.5, 0.0),
        (SokobanConfig(), 10.9, -0.1),  # of gym-sokoban: -0.1 + 1 + 10
    ],
)
def test_a_puzzle_pays_what_is_configured(config: SokobanConfig, last: float, sum_before: float) -> None:
    env = Sokoban(config)
    env.reset(4)
    rewards = [step.reward for step in _solved(env)]
    assert rewards[-1] == pytest.approx(last)
    assert rewards[:-1] == pytest.approx([sum_before] * (len(rewards) - 1))


def _solved(env: FrozenLake | Sokoban) -> list[Step]:
    """Let the expert end an episode."""
    steps = [env.step(env.expert_action())]
    while not steps[-1].terminated:
        steps.append(env.step(env.expert_action()))
    return steps


def test_an_unknown_env_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sokoban'"):
        ENVS.get("sokobann")


def test_a_limited_number_of_start_states_comes_again_in_another_order() -> None:
    passes = [[start_state(number, 50, seed=3) for number in range(first, first + 50)] for first in (0, 50)]
    assert [sorted(states) for states in passes] == [list(range(50))] * 2
    assert passes[0] != passes[1]
    assert passes[0] == [start_state(number, 50, seed=3) for number in range(50)]
    assert [start_state(number, None, seed=3) for number in (0, 7, 10**6)] == [0, 7, 10**6]


ROOM = ["#####", "#P√_#", "#_XO#", "#####"]
ROOM_COORDINATES = """Board size: 4 rows x 5 cols (zero-indexed).
Targets: (1, 2), (2, 3)
Boxes: (2, 2)
Boxes on target: (1, 2)
Player: (1, 1)"""


def test_coordinates_of_a_room_are_ragens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand; walls are not listed, and a box on a target is also a target. Then the player is on the free target."""
    level = parse_level(grid.grid_text(ROOM))
    monkeypatch.setattr("quintet.envs.sokoban._generate_level", lambda *_: level)
    shown = {
        form: Sokoban(SokobanConfig(width=5, height=4, observation=form)).reset(0).text
        for form in ("coordinates", "grid_coordinates")
    }
    assert shown["coordinates"] == ROOM_COORDINATES
    assert shown["grid_coordinates"] == f"Coordinates: \n{ROOM_COORDINATES}\nGrid Map: \n" + "\n".join(ROOM)
    env = Sokoban(SokobanConfig(width=5, height=4, observation="coordinates"))
    env.reset(0)
    for action in ("Down", "Right"):
        text = env.step(action).observation.text
    assert text.splitlines()[2:] == ["Boxes on target: (1, 2), (2, 3)", "Player: (2, 2)"]


def test_coordinates_of_a_lake_are_ragens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand; the start stays listed, and where the player stands is said in words."""
    monkeypatch.setattr("quintet.envs.frozenlake._generate_map", lambda *_: ["SF", "HG"])
    frozenlake._build_lake.cache_clear()
    env = FrozenLake(FrozenLakeConfig(size=2, observation="grid_coordinates"))
    size, ends = "Board size: 2 rows x 2 cols (zero-indexed).", "Start: (0, 0)\nGoal: (1, 1)"
    texts = [env.reset(0).text, *(env.step(action).observation.text for action in ("Right", "Down"))]
    assert texts[0] == f"Coordinates: \n{size}\n{ends}\nPlayer: (0, 0)\nHoles: (1, 0)\nGrid Map: \nP_\nOG"
    assert texts[2] == f"Coordinates: \n{size}\n{ends}\nPlayer on goal: (1, 1)\nHoles: (1, 0)\nGrid Map: \n__\nO√"
    env.reset(0)
    assert "\nPlayer in hole: (1, 0)\n" in env.step("Down").observation.text
    frozenlake._build_lake.cache_clear()


def test_instructions_explain_the_form_of_states() -> None:
    for config in (SokobanConfig, FrozenLakeConfig):
        plain, both = (
            build_env(config(observation=form)).instruction() for form in ("coordinates", "grid_coordinates")
        )
        assert "(row, column)" in plain
        assert "#" not in plain
        assert "√" in both
