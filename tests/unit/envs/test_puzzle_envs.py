"""If these fail, the puzzles of RAGEN have other rules or rewards than they say, or cannot be solved."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quintet.config.native.puzzle_envs import Game2048Config, PocketCubeConfig, SudokuConfig
from quintet.envs.env import UnsolvableError
from quintet.envs.puzzles import sudoku
from quintet.envs.puzzles.game_2048 import Game2048, slide
from quintet.envs.puzzles.pocket_cube import PocketCube
from quintet.envs.puzzles.sudoku import Sudoku, draw_puzzle, parse_placement
from quintet.envs.start_states import layout_split, split_of

SOLUTION = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
PUZZLE = [[0, 0, 3, 4], [3, 4, 1, 2], [0, 0, 4, 3], [4, 3, 2, 1]]
"""1 and 2 may also be exchanged in its empty cells."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sudoku, "draw_puzzle", lambda *_: (PUZZLE, SOLUTION))


def build_sudoku(**options: Any) -> Sudoku:
    env = Sudoku(SudokuConfig(size=4, **options))
    env.reset(0)
    return env


def test_numbers_of_a_sudoku_pay_by_whether_they_are_right(small: None) -> None:
    """The right ones pay 1, others that fit a half, and the last one 10 more."""
    env, other = build_sudoku(), build_sudoku()
    steps = [env.step(f"place {n} at row {r} col {c}") for n, r, c in ((1, 1, 1), (2, 1, 2), (2, 3, 1), (1, 3, 2))]
    assert [step.reward for step in steps] == [1.0, 1.0, 1.0, 11.0]
    assert [step.terminated for step in steps] == [False, False, False, True]
    assert (steps[3].info["success"], steps[2].info["success"]) == (True, False)
    rewards = [other.step(action).reward for action in ("1,1,2", "1,2,1", "3,1,1", "3,2,2")]
    assert rewards == [0.5, 0.5, 0.5, 10.5]


def test_a_sudoku_pays_what_is_configured(small: None) -> None:
    env = build_sudoku(correct_reward=2.0, invalid_reward=-0.5, solved_reward=20.0)
    rewards = [env.step(action).reward for action in ("3,1,3", "1,1,1", "1,2,2", "3,1,2", "3,2,1")]
    assert rewards == [-0.5, 2.0, 2.0, 2.0, 22.0]


@pytest.mark.parametrize("action", ["place 5 at row 1 col 1", "3,1,3", "1,3,4", "place 2", "0,1,1", "1,1,1 no, 1,1"])
def test_an_action_that_is_refused_changes_nothing_and_costs_a_tenth(small: None, action: str) -> None:
    """Out of range, in conflict, on a given number, without a cell, outside; the last one is accepted."""
    env = build_sudoku()
    before = env.step("nothing").observation.text.splitlines()[:5]
    step = env.step(action)
    if "no" in action:
        assert step.reward == 1.0
    else:
        assert (step.reward, step.terminated) == (-0.1, False)
        assert step.observation.text.splitlines()[:5] == before


def test_numbers_of_earlier_actions_can_be_replaced_and_given_ones_cannot(small: None) -> None:
    env = build_sudoku()
    assert env.step("1,1,2").reward == 0.5
    assert env.step("1,1,2").reward == -0.1
    assert env.step("1,1,1").reward == 1.0
    assert env.step("place 3 at (1,3)").reward == -0.1


@pytest.mark.parametrize(
    "action",
    [
        "place 5 at row 2 col 3",
        "Place 5 at (2, 3)",
        "place 5 at 2,3",
        "5 at 2,3",
        "(2,3,5)",
        "so 2, 3, 5",
        "5 at row 2 col 3",
    ],
)
def test_all_forms_of_an_action_are_understood(action: str) -> None:
    assert parse_placement(action) == (2, 3, 5)


def test_a_sudoku_is_shown_as_its_form_says(small: None) -> None:
    plain, marked, hints = (build_sudoku(observation=form) for form in ("plain", "marked", "hints"))
    assert plain.step("1,1,1").observation.text == "1 . | 3 4\n3 4 | 1 2\n---------\n. . | 4 3\n4 3 | 2 1"
    rows = " 1   .  | [3] [4]\n[3] [4] | [1] [2]\n-----------------\n .   .  | [4] [3]\n[4] [3] | [2] [1]"
    text = f"{rows}\n1 at (1,1) is right."
    assert marked.step("1,1,1").observation.text == text
    listed = "Fitting at (1,2): 2\nFitting at (3,1): 2\nFitting at (3,2): 1, 2"
    assert hints.step("1,1,1").observation.text == f"{text}\n{listed}\n13 of 16 cells filled, step 1 of 81"
    without = build_sudoku(list_candidates=False)
    assert without.step("1,1,1").observation.text == f"{text}\n13 of 16 cells filled, step 1 of 81"


def test_a_sudoku_ends_after_its_steps(small: None) -> None:
    env = build_sudoku(max_steps=2)
    steps = [env.step("nothing"), env.step("nothing")]
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, True)]


def test_the_expert_corrects_numbers_and_solves_the_puzzle(small: None) -> None:
    env = build_sudoku()
    env.step("1,1,2")
    assert env.expert_action() == "place 1 at row 1 col 1"
    steps = [env.step(env.expert_action()) for _ in range(4)]
    assert [step.terminated for step in steps] == [False, False, False, True]
    env = build_sudoku()
    for action in ("1,1,2", "1,2,1", "3,1,1"):
        env.step(action)
    with pytest.raises(UnsolvableError):
        env.expert_action()


def test_a_hard_sudoku_begins_with_more_empty_cells() -> None:
    """0.6 × 16, rounded down."""
    assert sum(row.count(0) for row in build_sudoku(difficulty="hard")._grid) == 9


@pytest.mark.parametrize(
    ("size", "difficulty", "empty"), [(4, "easy", 6), (9, "medium", 40), (9, "hard", 48), (16, "easy", 102)]
)
def test_drawn_puzzles_have_a_solution_and_their_own_split(size: int, difficulty: str, empty: int) -> None:
    """Empty cells by hand: 0.4 × 16, 0.5 × 81, 0.6 × 81 and 0.4 × 256, rounded down."""
    box, numbers = math.isqrt(size), list(range(1, size + 1))
    seen = set()
    for seed in range(12):
        puzzle, solution = draw_puzzle(size, difficulty, seed)
        assert all(sorted(row) == numbers for row in solution)
        assert all(sorted(column) == numbers for column in zip(*solution, strict=True))
        for top in range(0, size, box):
            for left in range(0, size, box):
                assert sorted(n for row in solution[top : top + box] for n in row[left : left + box]) == numbers
        assert sum(row.count(0) for row in puzzle) == empty
        assert all(
            n in (0, s) for given, row in zip(puzzle, solution, strict=True) for n, s in zip(given, row, strict=True)
        )
        assert layout_split(str(puzzle)) is split_of(seed)
        seen.add(str(puzzle))
    assert len(seen) == 12


@pytest.mark.parametrize(
    ("action", "grid", "expected", "merged"),
    [
        ("Left", [[2, 2, 2, 2]], [[4, 4, 0, 0]], 8),
        ("Left", [[2, 2, 4, 0]], [[4, 4, 0, 0]], 4),
        ("Left", [[4, 0, 0, 4]], [[8, 0, 0, 0]], 8),
        ("Right", [[2, 2, 2, 0]], [[0, 0, 2, 4]], 4),
        ("Up", [[0, 2], [2, 2]], [[2, 4], [0, 0]], 4),
        ("Down", [[2, 4], [0, 0]], [[0, 0], [2, 4]], 0),
    ],
)
def test_tiles_slide_and_each_merges_once(action: str, grid: Any, expected: Any, merged: int) -> None:
    assert slide(grid, action) == (expected, merged)


def played(grid: list[list[int]], action: str, **options: Any) -> tuple[Game2048, Any]:
    env = Game2048(Game2048Config(size=len(grid), **options))
    env.reset(0)
    env._grid = grid
    return env, env.step(action)


def test_merges_pay_their_sum_or_its_logarithm() -> None:
    """By hand: 0.1 × log2(8 + 8 + 1)."""
    grid = [[4, 4, 0, 0], [4, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert played(grid, "Left")[1].reward == pytest.approx(0.1 * math.log2(17))
    env, step = played(grid, "Left", log_reward=False)
    assert step.reward == 16.0
    assert step.observation.text.endswith("Score: 16")
    assert sum(number > 0 for row in env._grid for number in row) == 3


def test_a_move_that_changes_nothing_adds_no_tile() -> None:
    grid = [[2, 0], [4, 0]]
    for log, reward in ((True, 0.0), (False, -0.1)):
        env, step = played(grid, "Left", log_reward=log)
        assert (step.reward, step.terminated, env._grid) == (reward, False, grid)
    assert "Possible moves: Up" not in step.observation.text
    assert "Possible moves: Right" in step.observation.text


@pytest.mark.parametrize(("tile", "success"), [(1024, False), (2048, True)])
def test_the_game_ends_when_no_tile_can_move(tile: int, success: bool) -> None:
    """The new tile, 2 or 4, has neighbors 8 and the tile."""
    _, step = played([[8, 16], [tile, 0]], "Right")
    assert (step.terminated, step.truncated, step.info["success"]) == (True, False, success)
    assert "Possible moves: none" in step.observation.text


def test_a_game_has_the_configured_number_of_cells() -> None:
    env = Game2048(Game2048Config(size=3))
    assert env.reset(0).text.count("Row") == 3
    assert [len(row) for row in env._grid] == [3, 3, 3]


def test_a_game_begins_with_two_tiles_of_two_or_four() -> None:
    tiles = []
    for seed in range(300):
        env = Game2048(Game2048Config())
        env.reset(seed)
        numbers = [number for row in env._grid for number in row if number]
        assert len(numbers) == 2
        tiles += numbers
    assert set(tiles) == {2, 4}
    assert 0.86 < tiles.count(2) / 600 < 0.94


def test_the_configured_share_of_tiles_is_two() -> None:
    for share, numbers in ((0.0, {4}), (1.0, {2})):
        env = Game2048(Game2048Config(two_probability=share))
        drawn = set()
        for seed in range(20):
            env.reset(seed)
            drawn |= {number for row in env._grid for number in row if number}
        assert drawn == numbers


def cube(**options: Any) -> PocketCube:
    env = PocketCube(PocketCubeConfig(**options))
    env.reset(0)
    return env


def test_a_turn_of_the_front_moves_the_stickers_of_its_neighbors() -> None:
    """By hand: the left face's right column goes up, up goes right, right goes down, down goes left."""
    env = cube()
    env._stickers = [color for color in "WOGRBY" for _ in range(4)]
    lines = env.step("F").observation.text.splitlines()
    assert lines[:4] == ["Up (U): W W / O O", "Left (L): O Y / O Y", "Front (F): G G / G G", "Right (R): W R / W R"]
    assert lines[4:] == ["Back (B): B B / B B", "Down (D): R R / Y Y", "Turn 1 of 20"]


def test_turns_are_those_of_a_cube() -> None:
    """Four turns of a face change nothing, nor do six times R U R' U', the known order of this sequence."""
    env = cube(max_steps=100)
    start = list(env._stickers)
    for face in "UDLRFB":
        for _ in range(4):
            env.step(face)
        assert env._stickers == start
        env.step(face)
        env.step(f"{face}'")
        assert env._stickers == start
    for count in range(1, 7):
        for action in ("R", "U", "R'", "U'"):
            env.step(action)
        assert (env._stickers == start) is (count == 6)


def test_the_expert_solves_every_cube_and_only_then_it_pays() -> None:
    for seed in range(40):
        env = PocketCube(PocketCubeConfig(scramble_depth=1 + seed % 7))
        env.reset(seed)
        if env.step("L").terminated:
            continue
        rewards = []
        while True:
            step = env.step(env.expert_action())
            rewards.append(step.reward)
            if step.terminated:
                break
        assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
        assert step.info["success"]


def test_a_cube_of_one_scrambling_turn_is_solved_by_one_turn() -> None:
    env = cube(scramble_depth=1)
    assert env.step(env.expert_action()).terminated


def test_a_cube_is_given_up_after_its_turns() -> None:
    env = cube(max_steps=2, scramble_depth=5)
    steps = [env.step(action) for action in ("U", "U'")]
    assert [(step.terminated, step.truncated, step.reward) for step in steps] == [
        (False, False, 0.0),
        (False, True, 0.0),
    ]


@pytest.mark.parametrize("env", [Sudoku(SudokuConfig()), Game2048(Game2048Config()), PocketCube(PocketCubeConfig())])
def test_the_same_seed_gives_the_same_puzzle(env: Any) -> None:
    first = env.reset(7).text
    assert env.reset(8).text != first
    assert env.reset(7).text == first
    assert env.render().shape[2] == 3
    assert env.instruction()
