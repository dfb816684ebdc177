"""If these fail, `quintet data robots` writes or shows something else than it was asked for."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from robot_datasets import GOLDEN, episode, lerobot

from quintet.cli.data import app
from quintet.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs/embodied.md"
CAMERA = "observation.images.camera0"
ENV = ("simulator=arm", "camera_height=8", "camera_width=8", "max_steps=60", "options={renderer: numpy}")


def robots(*arguments: str | Path) -> None:
    app(["robots", *map(str, arguments)], standalone_mode=False)


def test_episodes_of_an_expert_are_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco")
    robots("make", tmp_path / "arm", *ENV, "--episodes", 3, "--epsilon", 0.1)
    assert f"{tmp_path / 'arm'}: 3 episodes, " in capsys.readouterr().out
    robots("show", tmp_path / "arm", "--statistics", tmp_path / "statistics.json", "--verify")
    out = capsys.readouterr().out
    assert out.startswith("arm: 3 episodes, ")
    assert "cameras: observation.images.camera0; 8 × 8 pixels" in out
    assert "3 × touch the ball" in out
    statistics = json.loads((tmp_path / "statistics.json").read_text())["arm"]
    assert statistics["num_trajectories"] == 3
    assert len(statistics["action"]["q99"]) == 2


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ quintet data robots (.*)$", PAGE.read_text(), re.M)
    assert [command.split()[0] for command in commands] == ["make", "show"]
    for command in commands:
        robots(*shlex.split(command))
    assert json.loads(Path("data/reach/dataset_statistics.json").read_text())["reach"]["num_trajectories"] == 20


def test_a_data_set_of_tensorflow_datasets_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    robots("show", GOLDEN / "rlds", "--camera", "wrist_image")
    out = capsys.readouterr().out
    assert "arm_reach: 3 episodes, 12 actions\nlength of episodes: 3 to 5 actions\n" in out
    assert "cameras: steps/observation/wrist_image; 16 × 16 pixels\nproprioception: 8 numbers\n" in out
    assert "2 × reach the red ball\n1 × reach the green ball" in out


def test_only_verification_reads_the_images_of_all_episodes(tmp_path: Path) -> None:
    lerobot(tmp_path, [episode(2), episode(2, 1)])
    file = tmp_path / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(file)
    damaged = pa.array([{"bytes": b"PNG", "path": ""}] * 2)
    pq.write_table(table.set_column(table.column_names.index(CAMERA), CAMERA, damaged), file)
    robots("show", tmp_path)
    with pytest.raises(ConfigError, match=rf"episode_000001.parquet, column {CAMERA}, row 0: the image cannot be"):
        robots("show", tmp_path, "--verify")


def test_an_unknown_key_of_the_simulator_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="env: unknown option camera_hight, did you mean camera_height"):
        robots("make", tmp_path, "simulator=arm", "camera_hight=8")
