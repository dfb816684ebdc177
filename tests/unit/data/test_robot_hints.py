"""If these fail, a hint about demonstrations of robots leads nowhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hint_cases import HintCase, case, name_of
from robot_datasets import KEY, STEPS, episode, example, lerobot, record, rlds, steps

from quintet.config.native.envs import SimulatorConfig
from quintet.data.robot_demonstrations.dataset import FeatureNames
from quintet.data.robot_demonstrations.expert import RecordedDataset, collect_expert_episodes
from quintet.data.robot_demonstrations.open_dataset import open_robot_dataset
from quintet.data.robot_demonstrations.windows import ChunkWindows
from quintet.data.robot_demonstrations.writer import LeRobotWriter
from quintet.envs.simulators.registry import build_simulator


def opened(names: FeatureNames) -> None:
    if not Path("robots").is_dir():
        lerobot(Path("robots"), [episode(2, cameras=2)])
    open_robot_dataset(Path("robots"), KEY, names).episode(0)


def opened_directory(name: str) -> None:
    opened(FeatureNames())
    open_robot_dataset(Path(name), KEY)


def described(content: Mapping[str, Any]) -> None:
    """Read a LeRobot data set with other entries in its description."""
    lerobot(Path("robots"), [episode(2)], overwrite=True)
    info = json.loads(Path("robots/meta/info.json").read_text())
    Path("robots/meta/info.json").write_text(json.dumps({**info, **content}))
    open_robot_dataset(Path("robots"), KEY)


def described_rlds(content: Mapping[str, Any]) -> None:
    """Read an RLDS data set with other features, or another format."""
    rlds(Path("rlds"), [record(example(steps(2)))], {**STEPS, **content.get("steps", {})}, content.get("info"))
    open_robot_dataset(Path("rlds"), KEY)


def copied(size: int | None) -> None:
    file = rlds(Path("rlds"), [record(example(steps(2)))])
    file.write_bytes(file.read_bytes()[:size])
    open_robot_dataset(Path("rlds"), KEY)


def removed(name: str | None) -> None:
    lerobot(Path("robots"), [episode(2)], overwrite=True)
    if name is not None:
        Path("robots", name).unlink()
    open_robot_dataset(Path("robots"), KEY).episode(0)


def chunked(dims: tuple[int, ...]) -> None:
    ChunkWindows([RecordedDataset(str(dim), [episode(3, dim=dim)]) for dim in dims], 2, 0, KEY)


def solved(settings: Mapping[str, Any]) -> None:
    env = SimulatorConfig(simulator="arm", camera_height=8, camera_width=8, options={"renderer": "numpy"})
    simulator = build_simulator(env, 4, 0)
    if not settings.get("expert", True):
        simulator.expert_actions = None  # type: ignore[attr-defined]
    list(collect_expert_episodes(simulator, lambda _, count: np.arange(count), 2, max_steps=settings["steps"]))


def written(settings: tuple[str, bool]) -> None:
    Path("full").mkdir(exist_ok=True)
    Path("full/notes.txt").write_text("")
    LeRobotWriter(Path(settings[0]), frames_per_second=10, robot="arm", overwrite=settings[1])


ZLIB = {"steps": {"action": {"tensor": {"encoding": "zlib", "shape": {"dimensions": ["2"]}}}}}
PARTS = {"steps": {"action": {"featuresDict": {"features": {"grip": {"tensor": {"shape": {}}}}}}}}
CASES = [
    case(opened_directory, "gone", "name a directory with meta/info.json (LeRobot), or with ", "robots"),
    case(
        opened,
        FeatureNames(cameras=("front",)),
        "valid: observation.images.camera0, observation.images.camera1",
        FeatureNames(cameras=("observation.images.camera1",)),
    ),
    case(opened, FeatureNames(state="joints"), "valid: observation.state", FeatureNames(state="observation.state")),
    case(
        described,
        {"codebase_version": "v1.6"},
        "convert it with LeRobot to one of v2.0, v2.1, v3.0",
        {"codebase_version": "v2.0"},
    ),
    case(described_rlds, {"info": {"fileFormat": "riegeli"}}, "write it again with file_format=tfrecord", {}),
    case(described_rlds, ZLIB, "write the data set without that encoding", {}),
    case(described_rlds, PARTS, "convert the data set, with one tensor of actions per step", {}),
    case(copied, 50, "copy the file again, or leave its data set out", None),
    case(removed, "meta/tasks.jsonl", "copy the file again, or leave its data set out", None),
    case(chunked, (2, 3), "name data sets of one robot", (2,)),
    case(solved, {"steps": 1}, "increase env.max_steps, or make the task easier", {"steps": 60}),
    case(
        solved,
        {"steps": 60, "expert": False},
        "name a simulator with an expert, or data sets: warm_start.files=[DIRECTORY]",
        {"steps": 60},
    ),
    case(written, ("full", False), "use another directory, or --overwrite to replace it", ("x", False), ("full", True)),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_demonstrations_of_robots_removes_its_error(entry: HintCase) -> None:
    entry.check()
