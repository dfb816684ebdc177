"""The environments of RAGEN's `config/envs.yaml`, for configurations without that file."""

from collections.abc import Mapping
from typing import Any

_SOKOBAN: dict[str, Any] = {"dim_x": 6, "dim_y": 6, "num_boxes": 1, "max_steps": 100}
_LETTERS = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}
_SYMBOL_NAMES = {
    "W": "wall",
    ".": "empty",
    "G": "target",
    "C": "box on target",
    "B": "box",
    "A": "player",
    "@": "player on target",
}


def _env(env_type: str, actions: int, config: Mapping[str, Any] | None = None, max_tokens: int = 100) -> dict[str, Any]:
    return {
        "env_type": env_type,
        "max_actions_per_traj": actions,
        "env_instruction": None,
        "max_tokens": max_tokens,
        "env_config": None if config is None else dict(config),
    }


CUSTOM_ENVS: Mapping[str, Any] = {
    "SimpleSokoban": _env("sokoban", 10, _SOKOBAN),
    "LargerSokoban": _env("sokoban", 10, _SOKOBAN | {"dim_x": 8, "dim_y": 8, "num_boxes": 2, "search_depth": 10}),
    "SokobanDifferentGridVocab": _env(
        "sokoban", 10, _SOKOBAN | {"search_depth": 30, "grid_lookup": _LETTERS, "grid_vocab": _SYMBOL_NAMES}
    ),
    "CoordSokoban": _env("sokoban", 10, _SOKOBAN | {"observation_format": "grid_coord"}, max_tokens=120),
    "VisualSimpleSokoban": _env("sokoban", 10, _SOKOBAN | {"render_mode": "rgb_array"}),
    "Countdown": _env("countdown", 1),
    "Bandit": _env("bandit", 1, {"lo_arm_name": "Phoenix", "hi_arm_name": "Dragon"}),
    "BanditTest": _env("bandit", 1, {"lo_arm_name": "Trader", "hi_arm_name": "Librarian"}),
    "FrozenLake": _env("frozen_lake", 10),
    "CoordFrozenLake": _env(
        "frozen_lake", 10, {"observation_format": "grid_coord", "success_rate": 0.8}, max_tokens=120
    ),
    "MetamathQA": _env("metamathqa", 1),
    "WebShop": _env("webshop", 9, {"dataset": "small"}, max_tokens=200),
    "SearchQA": _env("search", 10, max_tokens=300),
    "SearchQAMock": _env("search", 10, {"mock_mode": True}, max_tokens=300),
    "SimpleSudoku": _env("sudoku", 20, {"render_format": "with_feedback"}, max_tokens=150),
    "MediumSudoku": _env("sudoku", 30, {"render_format": "with_feedback", "difficulty": "medium"}, max_tokens=150),
    "game_2048": _env("game_2048", 700, max_tokens=8192),
    "rubikscube": _env("rubikscube", 20, {"scramble_depth": 1}, max_tokens=96),
}
