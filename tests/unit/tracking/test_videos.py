"""If these fail, videos of robots show something else, cannot be played, or slow or end the run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quintet.config.native.tracking import TrackingConfig, VideoConfig
from quintet.embodied_records import ChunkResult, RobotEpisode, RobotObservation
from quintet.records import Failure, Outcome
from quintet.tracking import video_files, videos
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import build_loggers
from quintet.tracking.report import write_report
from quintet.tracking.summaries import summarize_robot_episodes, summarize_robot_validation
from quintet.tracking.videos import RobotCaption, VideoWriter, find_videos, tile_frames, video_path

INSTRUCTIONS = ("push the red block",) * 5
NO_OUTCOMES = ("",) * 5


def frames(value: int, robots: int = 5) -> np.ndarray:
    """Plain pictures; that of robot n has the value `value` + 10 n."""
    values = value + 10 * np.arange(robots, dtype=np.uint8)
    return np.broadcast_to(values[:, None, None, None], (robots, 160, 90, 3)).copy()


def write(config: VideoConfig, path: Path, count: int = 12, reports: list[str] | None = None) -> None:
    writer = VideoWriter(config, 10.0, (reports if reports is not None else []).append)
    writer.start(path, INSTRUCTIONS)
    for number in range(count):
        writer.add(frames(20 * number), np.full(5, 0.5), NO_OUTCOMES)
    writer.close()


def decoded(path: Path) -> tuple[list[np.ndarray], float]:
    """Return the frames of a video and its rate."""
    if path.suffix == ".gif":
        with Image.open(path) as image:
            pictures = [np.asarray((image.seek(n), image.convert("RGB"))[1]) for n in range(image.n_frames)]
            return pictures, 1000 / image.info["duration"]
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], rate


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_video_has_every_frame_of_the_first_robots_at_the_control_frequency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    if suffix == ".mp4":
        pytest.importorskip("av", reason="PyAV is not installed: pip install 'quintet[video]'")
    monkeypatch.setattr(videos, "video_suffix", lambda: suffix)
    reports: list[str] = []
    write(VideoConfig(robots=3, overlay=False), tmp_path / "new" / "video", reports=reports)
    assert not reports
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"video{suffix}"]
    pictures, rate = decoded(tmp_path / "new" / f"video{suffix}")
    assert (len(pictures), rate) == (12, 10.0)
    for number, picture in enumerate(pictures):
        assert picture.shape == (160, 270, 3)  # ⌊√3⌋ = 1 row
        means = [picture[:, 90 * robot + 8 : 90 * robot + 82].mean() for robot in range(3)]
        np.testing.assert_allclose(means, [20 * number + 10 * robot for robot in range(3)], atol=4)


def test_tiles_have_rows_as_in_rlinf_and_small_pictures_are_enlarged() -> None:
    assert tile_frames(frames(0), None).shape == (2 * 160, 3 * 90, 3)
    tiles = tile_frames(np.arange(2 * 8 * 4 * 3, dtype=np.uint8).reshape(2, 8, 4, 3), None)
    assert tiles.shape == (160, 2 * 80, 3)
    np.testing.assert_array_equal(tiles[:20, 80:100], np.broadcast_to(np.array([96, 97, 98]), (20, 20, 3)))


def test_captions_show_reward_return_outcome_and_instruction() -> None:
    shown = [
        RobotCaption("push", 0.0, 0.0),
        RobotCaption("push", 0.5, 0.0),
        RobotCaption("push", 0.0, 1.0),
        RobotCaption("push", 0.0, 0.0, "success"),
        RobotCaption("抓住 the block", 0.0, 0.0),
    ]
    picture = np.zeros((1, 160, 160, 3), np.uint8)
    strips = [tile_frames(picture, [caption])[160:].tobytes() for caption in shown]
    assert len(set(strips)) == len(shown)


def chunk(terminated: np.ndarray, episodes: tuple[RobotEpisode, ...], *, restarts: bool) -> ChunkResult:
    observation = RobotObservation(np.zeros((2, 0, 8, 8, 3), np.uint8), np.zeros((2, 1), np.float32), ("next", "push"))
    pictures = np.zeros((2, 3, 160, 90, 3), np.uint8)
    rewards = np.ones((2, 3), np.float32)
    no = np.zeros((2, 3), bool)
    final = observation if restarts else None
    return ChunkResult(observation, rewards, terminated, no, ~no, final, episodes, pictures)


def test_an_outcome_is_shown_from_the_action_that_ended_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[RobotCaption, ...]] = []
    monkeypatch.setattr(videos, "tile_frames", lambda pictures, captions: shown.append(captions) or pictures[0])
    solved = RobotEpisode(0, 7, "push", 1.0, 2, True, True, Outcome.SUCCESS)
    failure = Failure("step", "ProcessDied", "killed")
    lost = RobotEpisode(1, 8, "push", 1.0, 3, False, False, Outcome.FAILED, failure)
    terminated = np.array([[True, True, True], [False, False, False]])
    writer = VideoWriter(VideoConfig(), 10.0, [].append)
    writer.start(tmp_path / "video", ("push", "push"))
    writer.add_chunk(chunk(terminated, (solved, lost), restarts=True))
    writer.add_chunk(chunk(np.zeros((2, 3), bool), (), restarts=False))
    writer.close()
    assert [captions[0].outcome for captions in shown] == ["success"] * 3 + [""] * 3
    assert [captions[1].outcome for captions in shown] == ["", "", "failed"] + [""] * 3
    assert [captions[0].episode_return for captions in shown] == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    assert {captions[0].instruction for captions in shown[3:]} == {"next"}


def test_an_encoder_that_fails_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, frame: np.ndarray) -> None:
        raise MemoryError("no encoder")

    monkeypatch.setattr(videos, "video_suffix", lambda: ".gif")
    reports: list[str] = []
    writer = VideoWriter(VideoConfig(), 10.0, reports.append)
    with monkeypatch.context() as patch:
        patch.setattr(video_files._GifFile, "add", broken)
        for name in ("a", "b"):
            writer.start(tmp_path / name, INSTRUCTIONS)
            writer.add(frames(0), np.zeros(5), NO_OUTCOMES)
            writer.finish()
        deadline = time.monotonic() + 10
        while not writer._queue.empty() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
    complete: list[Path] = []
    writer.start(tmp_path / "c", INSTRUCTIONS, frames(0), complete.append)
    writer.start(tmp_path / "without_frames", INSTRUCTIONS, None, complete.append)
    writer.close()
    assert complete == [tmp_path / "c.gif"]
    assert len(reports) == 1
    assert "no encoder" in reports[0]
    assert [path.name for path in tmp_path.iterdir()] == ["c.gif"]


def test_a_slow_encoder_never_delays_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(videos, "video_suffix", lambda: ".gif")
    monkeypatch.setattr(videos, "tile_frames", lambda pictures, captions: release.wait(20) and pictures[0])
    monkeypatch.setattr(videos, "MAX_WAITING_BYTES", 5 * frames(0).nbytes)
    reports: list[str] = []
    writer = VideoWriter(VideoConfig(), 10.0, reports.append)
    writer.start(tmp_path / "video", INSTRUCTIONS)
    for _ in range(50):
        writer.add(frames(0), np.zeros(5), NO_OUTCOMES)
    assert len(reports) == 1
    assert "ends early" in reports[0]
    release.set()
    writer.close()
    assert 5 <= len(decoded(tmp_path / "video.gif")[0]) <= 6


def test_files_are_named_as_rlinf_names_them_in_a_given_directory(tmp_path: Path) -> None:
    tracking = TrackingConfig(video=VideoConfig(directory=str(tmp_path / "given")), validation_video=VideoConfig())
    assert video_path(tmp_path, tracking, "train", step=4, number=3, seed=7) == tmp_path / "given/seed_7/3"
    own = video_path(tmp_path, tracking, "validation", step=4, number=3, seed=7)
    assert own == tmp_path / "videos/validation/step_000004_rollout_3"


def test_training_and_validations_with_one_directory_do_not_replace_each_others_videos(tmp_path: Path) -> None:
    video = VideoConfig(directory=str(tmp_path))
    config = TrackingConfig(video=video, validation_video=video)
    for split, name in (("train", "seed_7/3.mp4"), ("validation", "validation/seed_7/3.mp4")):
        path = video_path(tmp_path, config, split, step=4, number=3, seed=7).with_suffix(".mp4")
        assert path == tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert find_videos(tmp_path, config) == [tmp_path / "validation/seed_7/3.mp4"]


def test_the_report_plays_the_first_and_the_last_video_of_validations(tmp_path: Path) -> None:
    for directory in (None, str(tmp_path / "given")):
        config = TrackingConfig(validation_video=VideoConfig(directory=directory))
        for number in (0, 2, 10):
            path = video_path(tmp_path, config, "validation", step=number, number=number, seed=1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".mp4").write_bytes(b"%d" % number)
        names = [path.stem.split("_")[-1] for path in find_videos(tmp_path, config)]
        assert names == ["0", "2", "10"]
    page = write_report(tmp_path, "arm", {}, [], videos=find_videos(tmp_path, config)).read_text()
    assert [page.count(f"data:video/mp4;base64,{text}") for text in ("MA==", "Mg==", "MTA=")] == [1, 0, 1]
    assert "media-src data:" in page
    assert "<video" not in write_report(tmp_path, "arm", {}, []).read_text()


def test_a_large_video_does_not_make_the_report_large(tmp_path: Path) -> None:
    path = tmp_path / "<b>.mp4"
    path.write_bytes(bytes(7 << 20))
    page = write_report(tmp_path, "arm", {}, [], videos=[path])
    assert page.stat().st_size < 1 << 20
    assert "&lt;b&gt;.mp4 is too large" in page.read_text()


def episodes() -> list[RobotEpisode]:
    solved = RobotEpisode(0, 0, "put the <bowl> down", 2.0, 4, True, False, Outcome.TRUNCATED)
    lost = RobotEpisode(1, 1, "open_drawer", 0.0, 8, False, False, Outcome.FAILED)
    return [solved, lost, lost]


def test_success_is_logged_by_task_and_shown_in_the_report(tmp_path: Path) -> None:
    training = summarize_robot_episodes(episodes())
    assert training["env/success_once"] == pytest.approx(1 / 3)
    assert (training["env/success_at_end"], training["env/failed"]) == (0.0, 2)
    assert training["env/reward"] == pytest.approx(0.5 / 3)
    assert training["env/episode_len"] == pytest.approx(20 / 3)
    assert training["env/task/put_the_bowl_down/success_once"] == 1.0
    assert training["env/task/open_drawer/success_once"] == 0.0
    assert summarize_robot_episodes([]) == {}
    lost = episodes()[1]
    loggers = build_loggers(["jsonl"], LoggerContext(tmp_path))
    loggers.log(0, 0.0, summarize_robot_validation("libero_10", [lost, replace(lost, task="put the <bowl> down")]))
    loggers.log(4, 1.0, summarize_robot_validation("libero_10", episodes()) | training)
    loggers.close()
    page = write_report(tmp_path, "arm", {}, []).read_text()
    assert "<dt>put_the_bowl_down</dt><dd>0 % → 100 %</dd>" in page
    assert "<dt>open_drawer</dt><dd>0 % → 0 %</dd>" in page
