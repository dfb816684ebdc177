"""If these fail, a run of several envs plays them by other shares than it was told, or a killed one goes on otherwise
than the run it was."""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paused_runs import stop_run

from quintet.tracking.metrics import describe, without_timing

Command = Any

MIXED = """\
name: mixed
envs:
  lake: {share: 2, env: {size: 3}}
  boxes: {env: {name: sokoban}, start_states: 3, validation_episodes: 3, max_actions_per_turn: 2}
training: {steps: 3, groups_per_step: 4, samples_per_group: 3, mini_batches: 2, threads: 1}
warm_start: {episodes: 20, updates: 6, turns_per_update: 32, until_success: null}
rollout: {max_turns: 3}
algorithm: {filter: {refill_rounds: 1}}
validation: {episodes: 6, every_steps: -1, before_training: true}
checkpoint: {every_steps: 1}
tracking: {trajectories_every_steps: 1}
"""
STREAMED = ("rollout.async_ratio=0.5", "rollout.partial=true")


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines that have to be equal in two runs of one experiment: times and memory left out."""
    return [without_timing(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, str]:
    directory = run / "checkpoints/global_step_3"
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.rglob("*.safetensors")}


def episodes(run: Path, split: str, step: int) -> list[dict[str, Any]]:
    lines = (run / f"trajectories/{split}/step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("overrides", [(), STREAMED], ids=["whole steps", "episodes outlast steps"])
def test_a_killed_run_of_two_envs_ends_as_one_that_never_stopped(
    quintet: Command, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    (tmp_path / "mixed.yaml").write_text(MIXED)
    quintet("train", "mixed.yaml", *overrides, "name=whole")
    command = ["train", "mixed.yaml", *overrides, "name=stopped"]
    status, _ = stop_run(command, tmp_path, "runs/stopped/checkpoints/global_step_2", signal.SIGKILL)
    assert status == -signal.SIGKILL
    again = quintet("train", "mixed.yaml", *overrides, "name=stopped")
    assert "resuming from" in again.stdout
    whole, stopped = tmp_path / "runs/whole", tmp_path / "runs/stopped"
    assert weights(whole) == weights(stopped)
    assert metrics(whole) == metrics(stopped)
    for step in (1, 2, 3):
        assert episodes(whole, "train", step) == episodes(stopped, "train", step)
    _check(whole, overrides)


def _check(run: Path, overrides: tuple[str, ...]) -> None:
    """Shares are held over all groups that were drawn, and every env has its own numbers."""
    lines = metrics(run)
    for name in {name for line in lines for name in line if name != "step"}:
        describe(name)
    assert {"val/all/success_rate", "val/lake/success_rate", "val/boxes/success_rate"} <= set(lines[0])
    assert {"train/lake/reward", "train/boxes/success_rate"} <= set(lines[1]) | set(lines[2]) | set(lines[3])
    assert Counter(episode["env"] for episode in episodes(run, "validation", 0)) == {"lake": 4, "boxes": 3}
    state = json.loads((run / "checkpoints/global_step_3/state.json").read_text())["starts"]
    drawn = dict(zip(state["envs"], state["drawn"], strict=True))
    assert abs(drawn["lake"] - 2 * drawn["boxes"]) <= 2, "of three groups, two are of the lake"
    if not overrides:
        assert sum(drawn.values()) == sum(line["training/groups_drawn"] for line in lines[1:])
    for step in (1, 2, 3):
        groups: dict[int, set[tuple[str, int]]] = {}
        for episode in episodes(run, "train", step):
            groups.setdefault(episode["group"], set()).add((episode["env"], episode["seed"]))
        assert all(len(starts) == 1 for starts in groups.values()), "a group is of one env and one start"
    assert (
        len(
            {
                episode["seed"]
                for step in (1, 2, 3)
                for episode in episodes(run, "train", step)
                if episode["env_type"] == "sokoban"
            }
        )
        <= 3
    )
