"""If these fail, people see no images of episodes, those of other episodes, or too many of them on their disk."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quintet.envs.service.png import decode_png, encode_png
from quintet.errors import MachineError
from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.episode_html import write_episode_pages
from quintet.tracking.image_files import read_png, write_image
from quintet.tracking.report import write_report
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import read_trajectories, write_trajectories


def image(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (8, 6, 3), dtype=np.uint8)


def turn(observation: str, images: Sequence[np.ndarray] = (), after: Sequence[np.ndarray] = ()) -> Turn:
    return Turn(
        prompt=(1,),
        tokens=(2,),
        logprobs=(-0.5,),
        finish_reason=FinishReason.STOP,
        weight_version=0,
        text="<answer> Right </answer><script>",
        observation=observation,
        continues=False,
        actions=("Right",),
        valid_format=True,
        reward=1.0,
        images=tuple(images),
        images_after=tuple(after),
        frames=("<image>",) if after else (),
    )


def episode(number: int, turns: Sequence[Turn], outcome: Outcome = Outcome.SUCCESS) -> Trajectory:
    return Trajectory("lake", number, number, 0, tuple(turns), outcome, env_type="frozenlake")


def seen(number: int) -> Trajectory:
    """An episode of two turns with the images `number`, 50, and 51 at its end."""
    turns = [turn("see <image>", [image(number)], [image(50)]), turn("<image>", [image(50)], [image(51)])]
    return episode(number, turns, Outcome.SUCCESS if number else Outcome.TERMINATED)


def test_a_text_episode_is_drawn_turn_by_turn(tmp_path: Path) -> None:
    played = episode(7, [turn(" P _\n O G"), turn(" P _\n O G")])
    write_episode_pages(tmp_path / "step_4", 4, [played, played])
    pages = sorted((tmp_path / "step_4").iterdir())
    assert [page.name for page in pages] == ["trajectory_data_0.html", "trajectory_data_1.html"]
    page = pages[0].read_text()
    assert page.count("<li>") == 2
    assert page.count('class="board"') == 2
    assert page.count("Model Response") == 2
    assert "&lt;answer&gt; Right" in page
    assert "<script>" not in page
    assert "solved" in page
    write_episode_pages(tmp_path / "step_4", 4, [played])
    assert [page.name for page in (tmp_path / "step_4").iterdir()] == ["trajectory_data_0.html"]


def test_a_page_has_the_images_before_each_response(tmp_path: Path) -> None:
    write_episode_pages(tmp_path, 4, [seen(3)])
    page = (tmp_path / "trajectory_data_0.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert page.count('class="board"') == 2
    assert "see" in page
    assert "&lt;image&gt;" not in page


def test_images_of_trajectories_are_stored_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "train/step_000010.jsonl"
    write_trajectories(path, 10, "train", [seen(3), seen(4), seen(5)], image_episodes=2)
    first, second, third = read_trajectories(path).by_line.values()
    assert not any("image_files" in played for played in third["turns"])
    (name,) = first["turns"][0]["image_files"]
    np.testing.assert_array_equal(decode_png(read_png(path.parent, name) or b""), image(3))
    assert first["turns"][0]["image_files_after"] == second["turns"][1]["image_files"]
    files = {each: each.stat().st_mtime_ns for each in (path.parent / "images").iterdir()}
    assert len(files) == 4  # 3, 4, 50 and 51
    write_trajectories(path, 10, "train", [seen(3), seen(4), seen(5)], image_episodes=2)
    assert {each: each.stat().st_mtime_ns for each in (path.parent / "images").iterdir()} == files


def test_an_image_file_that_a_power_failure_left_empty_is_written_again(tmp_path: Path) -> None:
    name = write_image(tmp_path, image(1))
    (tmp_path / name).write_bytes(b"")
    assert read_png(tmp_path, name) is None
    assert write_image(tmp_path, image(1)) == name
    np.testing.assert_array_equal(decode_png(read_png(tmp_path, name) or b""), image(1))


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "images/../../x.png", "images/a.png"])
def test_a_changed_trajectory_file_names_no_other_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(MachineError, match="no image of a trajectory"):
        read_png(tmp_path, name)


def test_without_stored_images_there_is_no_folder(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a.jsonl", 1, "train", [seen(3)])
    write_trajectories(tmp_path / "b.jsonl", 1, "train", [episode(1, [turn(" P G")])], image_episodes=5)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_the_report_shows_episodes_turn_by_turn_with_their_images(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (0, 4):
        path = run.trajectories("validation", step)
        write_trajectories(path, step, "validation", [seen(number) for number in range(4)], image_episodes=2)
    page = write_report(tmp_path, "lake", {}, []).read_text()
    assert page.count('class="chip"') == 2
    assert page.count("data:image/png;base64,") == 4  # 0, 1, 50 and 51
    for number in (0, 1, 50, 51):
        assert page.count(_base64(image(number))) == 1
    for file in (path.parent / "images").iterdir():
        file.write_bytes(b"\x89PNG")
    assert "data:image/png" not in write_report(tmp_path, "lake", {}, []).read_text()


def _base64(pixels: np.ndarray) -> str:
    return base64.b64encode(encode_png(pixels)).decode()


def test_trajectory_files_of_text_are_those_of_before(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a.jsonl", 1, "train", [episode(1, [turn(" P G")])], image_episodes=5)
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["turns"][0].keys().isdisjoint({"image_files", "image_files_after"})
