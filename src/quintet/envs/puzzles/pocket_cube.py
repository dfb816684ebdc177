"""The 2×2×2 cube, scrambled by random turns, with the rewards of RAGEN's environment."""

from __future__ import annotations

import random
from itertools import product

import numpy as np

from quintet.config.native.puzzle_envs import PocketCubeConfig
from quintet.envs.bandit import text_image
from quintet.envs.env import Env, UnsolvableError
from quintet.records import Observation, Step

Vector = tuple[int, int, int]
FACES: dict[str, tuple[Vector, Vector, Vector]] = {
    "U": ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "L": ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "F": ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
    "R": ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
    "B": ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
    "D": ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
}
"""Normal of each face, and its directions to the right and down, seen from outside; x is right, y up, z to the
front."""
NAMES = {"U": "Up", "L": "Left", "F": "Front", "R": "Right", "B": "Back", "D": "Down"}
COLORS = "WOGRBY"
"""Colors of the faces of a solved cube, in the order of `FACES`."""


def _stickers() -> list[tuple[Vector, Vector]]:
    """Return the corner and the normal of each sticker, four of each face row by row."""
    corners_and_normals = []
    for normal, right, down in FACES.values():
        for vertical, horizontal in product((-1, 1), repeat=2):
            corner = tuple(n + horizontal * r + vertical * d for n, r, d in zip(normal, right, down, strict=True))
            corners_and_normals.append((corner, normal))
    return corners_and_normals  # type: ignore[return-value]


def _turned(vector: Vector, axis: Vector) -> Vector:
    """Return a vector after a quarter turn around the axis, clockwise as seen from its end: v × a + a (a · v)."""
    (x, y, z), (a, b, c) = vector, axis
    projection = a * x + b * y + c * z
    return y * c - z * b + a * projection, z * a - x * c + b * projection, x * b - y * a + c * projection


def _turns() -> dict[str, list[int]]:
    """Return, for each action, the sticker that each place gets."""
    stickers = _stickers()
    number = {sticker: index for index, sticker in enumerate(stickers)}
    turns = {}
    for name, (axis, _, _) in FACES.items():
        source = list(range(len(stickers)))
        for corner, normal in stickers:
            if sum(a * c for a, c in zip(axis, corner, strict=True)) > 0:
                source[number[_turned(corner, axis), _turned(normal, axis)]] = number[corner, normal]
        turns[name] = source
        inverse = [0] * len(source)
        for target, sticker in enumerate(source):
            inverse[sticker] = target
        turns[f"{name}'"] = inverse
    return turns


TURNS = _turns()


class PocketCube(Env):
    """Cube scrambled by the seed, never solved at the start. It is solved if each face has one color."""

    actions = tuple(f"{face}{prime}" for face in "UDLRFB" for prime in ("", "'"))

    def __init__(self, config: PocketCubeConfig) -> None:
        self._config = config

    def instruction(self) -> str:
        return (
            "Solve a 2×2×2 cube: each face has to have one color. The observation shows the four stickers of each face,"
            " two rows as seen from outside. U, D, L, R, F and B turn the upper, lower, left, right, front and back"
            " face a quarter clockwise; with ' they turn it counterclockwise. Answer with turns."
        )

    def reset(self, seed: int) -> Observation:
        # text as seed: close numbers give unrelated draws
        rng = random.Random(f"cube/{seed}")  # noqa: S311 - a game, no secret
        self._steps, self._stickers = 0, [color for color in COLORS for _ in range(4)]
        self._path: list[str] = []
        while self._is_solved:
            self._path = []
            for action in rng.choices(self.actions, k=self._config.scramble_depth):
                self._turn(action)
        return Observation(self._text())

    @property
    def _is_solved(self) -> bool:
        return all(len({*self._stickers[start : start + 4]}) == 1 for start in range(0, 24, 4))

    def _turn(self, action: str) -> None:
        """Turn a face, and record the turn, or remove the last recorded turn if this one undoes it."""
        self._stickers = [self._stickers[sticker] for sticker in TURNS[action]]
        if self._path and self._path[-1] == _inverse(action):
            self._path.pop()
        else:
            self._path.append(action)

    def step(self, action: str) -> Step:
        """See `Env.step`; the reward is 1 for the solved cube."""
        self._turn(action)
        self._steps += 1
        solved = self._is_solved
        truncated = not solved and self._steps >= self._config.max_steps
        return Step(Observation(self._text()), float(solved), solved, truncated, {"success": solved})

    def render(self) -> np.ndarray:
        return text_image(self._text())

    def expert_action(self) -> str:
        """Return the turn that undoes the last one of scramble and episode, not always on a shortest way.

        Raises:
            UnsolvableError: all turns are undone.
        """
        if not self._path:
            raise UnsolvableError("the cube is solved")
        return _inverse(self._path[-1])

    def expert_thought(self) -> str:
        """Return the number of turns to undo."""
        return f"{len(self._path)} to undo"

    def _text(self) -> str:
        rows = [" ".join(self._stickers[start : start + 2]) for start in range(0, 24, 2)]
        lines = [f"{NAMES[face]} ({face}): {rows[2 * i]} / {rows[2 * i + 1]}" for i, face in enumerate(FACES)]
        return "\n".join([*lines, f"Turn {self._steps} of {self._config.max_steps}"])


def _inverse(action: str) -> str:
    return action.removesuffix("'") if action.endswith("'") else f"{action}'"
