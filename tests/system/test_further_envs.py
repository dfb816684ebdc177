"""If these fail, an environment by name, a room or a table cannot be trained in, though each one alone behaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Command = Any

RUN = """\
name: {name}
envs:
{envs}
training: {{steps: 2, groups_per_step: {groups}, samples_per_group: 2, mini_batches: 1, threads: 1}}
rollout: {{max_turns: 2, think: false, window_size: 1, max_prompt_tokens: 1500, max_response_tokens: 24}}
validation: {{episodes: 3, every_steps: -1, before_training: false}}
checkpoint: {{every_steps: 2}}
tracking: {{trajectories_every_steps: 1}}
"""
WITH_EXPERT = """\
  house: {env: {name: navigation, render: text}, max_actions_per_turn: 5, response_format: strict}
  table: {env: {name: primitive_skill, render: text}, max_actions_per_turn: 2, action_separator: "|"}
  lake:
    env: {name: gymnasium, actions: [Left, Down, Right, Up], kwargs: {is_slippery: false}}
    max_actions_per_turn: 3"""
GAME = "  game: {env: {name: textarena, id: TicTacToe-v0}}"
WARM_START = "warm_start: {episodes: 30, updates: 30, turns_per_update: 32, until_success: null}\n"


def episodes(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "trajectories/train").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_two_steps_of_training_in_every_further_env(quintet: Command, tmp_path: Path) -> None:
    """The game has no expert: its policy is that of the other run."""
    (tmp_path / "expert.yaml").write_text(RUN.format(name="expert", envs=WITH_EXPERT, groups=3) + WARM_START)
    quintet("train", "expert.yaml")
    played = episodes(tmp_path / "runs/expert")
    assert {each["env"] for each in played} == {"house", "table", "lake"}
    assert not any(each["failure"] for each in played)
    model = tmp_path / "runs/expert/checkpoints/global_step_2/hf"
    (tmp_path / "game.yaml").write_text(RUN.format(name="game", envs=GAME, groups=2) + "warm_start: null\n")
    quintet("train", "game.yaml", "policy.preset=null", f"policy.path={model}")
    assert all(episode["turns"] for episode in episodes(tmp_path / "runs/game"))
    metrics = json.loads((tmp_path / "runs/game/metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["trajectory/failed"] == 0
