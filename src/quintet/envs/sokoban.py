"""Sokoban: puzzles made by playing backwards from their solution, so that each can be solved."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quintet.config.native import SokobanConfig
from quintet.envs import grid
from quintet.envs.seeds import layout_split, split_of
from quintet.envs.world import Unsolved
from quintet.errors import ConfigError
from quintet.records import Observation, Step

__all__ = ["Level", "Sokoban", "parse_level", "solve"]

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
"""As in gym-sokoban: each action, a box onto a target (and back off it), all boxes on targets."""
SEARCH_LIMIT = 500_000
"""States that the solver looks at before it gives a puzzle up."""
DRAWS = 20_000
"""Rooms tried for one puzzle before the options are held to be impossible."""


@dataclass(frozen=True, slots=True)
class Level:
    """A puzzle. Cells are numbered row by row; sets of cells are the bits of an integer."""

    width: int
    floor: int
    targets: int
    boxes: int
    player: int
    height: int

    @property
    def deltas(self) -> dict[str, int]:
        """How far each move goes in cell numbers; the outer wall keeps moves from wrapping round."""
        return {name: dy * self.width + dx for name, (dy, dx) in MOVES.items()}

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    def after(self, delta: int) -> Level:
        """The level one move later; the same level where something is in the way."""
        boxes, player = _moved(self.boxes, self.player, delta, self.floor)
        return Level(self.width, self.floor, self.targets, boxes, player, self.height)

    def symbols(self) -> list[list[str]]:
        """One symbol a cell: # wall, _ floor, O target, X box, √ box on target, P player, S player on target."""
        cells = [self._symbol(cell) for cell in range(self.width * self.height)]
        return [cells[start : start + self.width] for start in range(0, len(cells), self.width)]

    def _symbol(self, cell: int) -> str:
        bit = 1 << cell
        target = bool(self.targets & bit)
        if cell == self.player:
            return "S" if target else "P"
        if self.boxes & bit:
            return "√" if target else "X"
        if target:
            return "O"
        return "_" if self.floor & bit else "#"


def parse_level(text: str) -> Level:
    """The level that an observation shows."""
    rows = [row.split() for row in text.splitlines() if row.startswith(" ")]
    cells = [symbol for row in rows for symbol in row]

    def where(symbols: str) -> int:
        return sum(1 << i for i, symbol in enumerate(cells) if symbol in symbols)

    player = next(i for i, symbol in enumerate(cells) if symbol in "PS")
    return Level(len(rows[0]), where("_OX√PS"), where("O√S"), where("X√"), player, len(rows))


def _moved(boxes: int, player: int, delta: int, floor: int) -> tuple[int, int]:
    """Boxes and player after a move; unchanged where a wall or a second box is in the way."""
    ahead = 1 << (player + delta)
    if not floor & ahead:
        return boxes, player
    if boxes & ahead:
        behind = 1 << (player + 2 * delta)
        if not floor & behind or boxes & behind:
            return boxes, player
        boxes ^= ahead | behind
    return boxes, player + delta


def solve(level: Level, limit: int = SEARCH_LIMIT) -> list[str] | None:
    """A shortest solution as action words, by breadth-first search over packed states.

    None where there is none, or none was found among `limit` states. Boxes on cells from which no
    target can be reached are not looked at further; that changes no solution.
    """
    deltas = level.deltas
    lost = ~_useful(level)
    start = (level.boxes, level.player)
    if level.boxes & lost:
        return None
    came: dict[tuple[int, int], tuple[tuple[int, int], str] | None] = {start: None}
    queue = deque([start])
    while queue and len(came) < limit:
        state = queue.popleft()
        if state[0] == level.targets:
            return _way(came, state)
        for name, delta in deltas.items():
            new = _moved(*state, delta, level.floor)
            if new not in came and not new[0] & lost:
                came[new] = (state, name)
                queue.append(new)
    return None


def _useful(level: Level) -> int:
    """The cells from which a box, alone in the room, can be pushed onto some target."""
    useful, before = level.targets, 0
    while useful != before:
        before = useful
        for delta in level.deltas.values():
            stand = _shifted(level.floor, delta)
            useful |= _shifted(before, -delta) & level.floor & stand
    return useful


def _shifted(cells: int, delta: int) -> int:
    """Each cell of a set moved by `delta`."""
    return cells << delta if delta > 0 else cells >> -delta


def _way(came: dict[tuple[int, int], tuple[tuple[int, int], str] | None], state: tuple[int, int]) -> list[str]:
    actions: list[str] = []
    while (before := came[state]) is not None:
        state, action = before
        actions.append(action)
    return actions[::-1]


@lru_cache(maxsize=1)
def _tiles() -> dict[str, np.ndarray]:
    floor, wall = grid.plain((245, 240, 230)), grid.plain((100, 116, 139), (71, 85, 105))
    target = grid.disc(floor, (220, 38, 38), 0.14)
    return {
        "#": wall,
        "_": floor,
        "O": target,
        "X": grid.square(floor, (180, 120, 60), 0.7),
        "√": grid.square(target, (22, 163, 74), 0.7),
        "P": grid.agent(floor),
        "S": grid.agent(target),
    }


class Sokoban:
    """Rooms, boxes and targets are random by seed; every puzzle can be solved and none is at the start."""

    actions = tuple(MOVES)

    def __init__(self, config: SokobanConfig) -> None:
        self._config = config

    def instruction(self) -> str:
        """See `World.instruction`."""
        return (
            "Push every box X onto a target O. # is a wall, _ is floor, P is you, S is you on a target,"
            " √ is a box on a target. Answer with Up, Down, Left or Right."
        )

    def reset(self, seed: int) -> Observation:
        """See `World.reset`."""
        self._level = _draw_level(self._config, seed)
        self._steps = 0
        self._plan: list[str] | None = None
        return Observation(self._text())

    def step(self, action: str) -> Step:
        """See `World.step`; rewards are those of gym-sokoban."""
        before = self._level
        self._level = before.after(before.deltas[action])
        self._steps += 1
        if self._plan and self._plan[0] == action:
            self._plan = self._plan[1:]
        else:
            self._plan = None
        on_target = [(level.boxes & level.targets).bit_count() for level in (before, self._level)]
        solved = self._level.solved
        reward = STEP_REWARD + BOX_REWARD * (on_target[1] - on_target[0]) + SOLVED_REWARD * solved
        truncated = not solved and self._steps >= self._config.max_steps
        return Step(Observation(self._text()), reward, solved, truncated, {"success": solved})

    def render(self) -> np.ndarray:
        """See `World.render`."""
        return grid.paint(self._level.symbols(), _tiles())

    def close(self) -> None:
        """See `World.close`."""

    def expert_action(self) -> str:
        """The next action of a shortest solution.

        Raises:
            Unsolved: the boxes stand so that it can't be solved any more, or it takes longer to
                find out than `SEARCH_LIMIT` allows.
        """
        if not self._plan:
            self._plan = solve(self._level)
        if not self._plan:
            raise Unsolved(f"no solution from here among {SEARCH_LIMIT} states")
        return self._plan[0]

    def expert_thought(self) -> str:
        """Which moves do anything: nothing is in the way, or it is a box with room behind it."""
        level = self._level
        return " ".join(["free", *(name for name, delta in level.deltas.items() if level.after(delta) != level)])

    def _text(self) -> str:
        symbols = self._level.symbols()
        text = grid.grid_text(symbols)
        if self._config.observation == "grid":
            return text
        return f"{text}\n{grid.neighbors_text(symbols, *divmod(self._level.player, self._level.width), MOVES)}"


@lru_cache(maxsize=1024)
def _draw_level(config: SokobanConfig, seed: int) -> Level:
    """A puzzle of the split that the seed belongs to, made once for all games of its group."""
    rng = np.random.default_rng(seed)
    wanted = split_of(seed)
    for _ in range(DRAWS):
        level = _play_backwards(config, rng)
        if level is None or _pushes(level) < config.min_solution_pushes:
            continue
        if layout_split(grid.grid_text(level.symbols())) is wanted:
            return level
    raise ConfigError(
        f"no puzzle of {config.width}×{config.height} cells, {config.boxes} boxes and at least "
        f"{config.min_solution_pushes} pushes among {DRAWS} drawn",
        key="world",
        hint="make the room larger, or world.boxes or world.min_solution_pushes smaller",
    )


def _pushes(level: Level) -> int:
    """A lower bound of the pushes needed: each box's distance to its nearest target, in sum."""
    places = [divmod(c, level.width) for c in _cells(level.targets)]
    return sum(
        min(abs(row - r) + abs(column - c) for r, c in places)
        for row, column in (divmod(cell, level.width) for cell in _cells(level.boxes))
    )


def _cells(bits: int) -> list[int]:
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def _play_backwards(config: SokobanConfig, rng: np.random.Generator) -> Level | None:
    """Carve a room, put the boxes on their targets and pull them off by random moves."""
    floor = _carve(config, rng)
    cells = _cells(floor)
    if len(cells) < config.boxes + 2:
        return None
    chosen = [cells[i] for i in rng.permutation(len(cells))[: config.boxes + 1].tolist()]
    targets, player = sum(1 << cell for cell in chosen[:-1]), chosen[-1]
    boxes = targets
    deltas = [dy * config.width + dx for dy, dx in MOVES.values()]
    for move, grip in zip(
        rng.integers(4, size=config.pull_steps).tolist(), rng.random(config.pull_steps).tolist(), strict=True
    ):
        boxes, player = _pulled(boxes, player, deltas[move], floor, grip=grip < 0.8)
    if boxes == targets:
        return None
    return Level(config.width, floor, targets, boxes, player, config.height)


def _pulled(boxes: int, player: int, delta: int, floor: int, *, grip: bool) -> tuple[int, int]:
    """A move backwards: step away and, with `grip`, take along the box on the other side."""
    ahead = 1 << (player + delta)
    if not floor & ahead or boxes & ahead:
        return boxes, player
    behind = 1 << (player - delta)
    if grip and boxes & behind:
        boxes ^= behind | 1 << player
    return boxes, player + delta


def _carve(config: SokobanConfig, rng: np.random.Generator) -> int:
    """A connected room inside the outer wall, by a random walk that digs two cells broad."""
    width, height = config.width, config.height
    row, column = (int(rng.integers(1, side - 1)) for side in (height, width))
    floor, steps = 0, int(1.7 * (width + height))
    turns, directions = rng.random(steps).tolist(), rng.integers(4, size=steps).tolist()
    dy, dx = list(MOVES.values())[directions[0]]
    for turn, direction in zip(turns, directions, strict=True):
        if turn < 0.35:
            dy, dx = list(MOVES.values())[direction]
        row = min(max(row + dy, 1), height - 2)
        column = min(max(column + dx, 1), width - 2)
        for r, c in ((row, column), (row + (row < height - 2), column), (row, column + (column < width - 2))):
            floor |= 1 << (r * width + c)
    return floor
