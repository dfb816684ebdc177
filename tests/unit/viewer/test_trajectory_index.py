"""If these fail, the viewer lists wrong episodes, or misses those written while it is open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.unit.viewer.conftest import episode, turn

from quintet.records import Failure, Outcome
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import write_trajectories
from quintet.viewer.trajectory_index import TrajectoryIndex


def complete(path: Path) -> TrajectoryIndex:
    index = TrajectoryIndex(path)
    index.refresh(10.0)
    return index


def test_episodes_are_listed_with_their_numbers_newest_step_first(run_path: Path) -> None:
    episodes = complete(run_path).episodes()
    assert [(each.split, each.step, each.line) for each in episodes] == [
        *(("validation", 3, line) for line in range(3)),
        *(("train", 2, line) for line in range(2)),
        *(("validation", 0, line) for line in range(3)),
    ]
    sampled = episodes[3]
    assert (sampled.seed, sampled.group, sampled.sample, sampled.success) == (7, 1, 0, True)
    assert (sampled.turns, sampled.response_tokens, sampled.stop_reason, sampled.reward) == (2, 7, "stop", 2.0)


def test_text_of_the_policy_cannot_forge_the_numbers_of_a_turn(tmp_path: Path) -> None:
    forged = '"finish_reason": "length", "prompt_tokens": 1, "response_tokens": 9999, "turns": ['
    path = RunDirectory(tmp_path).trajectories("train", 1)
    write_trajectories(path, 1, "train", [episode(0, turn(forged, tokens=3))])
    (summary,) = complete(tmp_path).episodes()
    assert (summary.turns, summary.response_tokens, summary.stop_reason) == (1, 3, "stop")


def test_a_failed_episode_is_listed_with_its_error(tmp_path: Path) -> None:
    failed = replace(episode(0), outcome=Outcome.FAILED, failure=Failure("step", "Timeout", "took 60 s"))
    write_trajectories(RunDirectory(tmp_path).trajectories("train", 1), 1, "train", [failed, replace(failed, turns=())])
    first, second = complete(tmp_path).episodes()
    assert (first.failure, first.outcome) == ("step: Timeout", "failed")
    assert (second.turns, second.response_tokens, second.stop_reason) == (0, 0, "")


def test_files_that_are_written_or_removed_later_are_noticed(run_path: Path) -> None:
    index = complete(run_path)
    before = index.version
    run = RunDirectory(run_path)
    write_trajectories(run.trajectories("train", 4), 4, "train", [episode(5)])
    run.trajectories("validation", 0).unlink()
    index.refresh(10.0)
    assert index.version > before
    assert {each.step for each in index.episodes()} == {2, 3, 4}


def test_files_of_earlier_versions_are_listed(tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).trajectories("train", 1)
    write_trajectories(path, 1, "train", [episode(3, turn(tokens=4))])
    line = json.loads(path.read_text())
    line["world"] = line.pop("env")
    line["turns"][0]["stop"] = line["turns"][0].pop("finish_reason")
    path.write_text(json.dumps(line) + "\n")
    (summary,) = complete(tmp_path).episodes()
    assert (summary.env, summary.seed, summary.response_tokens, summary.stop_reason) == ("frozenlake", 3, 4, "stop")


def test_a_damaged_file_does_not_hide_the_others(run_path: Path) -> None:
    RunDirectory(run_path).trajectories("train", 9).write_text('{"step": 9, "half\n')
    index = complete(run_path)
    assert len(index.episodes()) == 8
