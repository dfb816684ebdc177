"""Videos of robots, encoded in a background thread while the rollout goes on."""

from __future__ import annotations

import contextlib
import math
import queue
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quintet.config.native.tracking import TrackingConfig, VideoConfig
from quintet.embodied_records import ChunkResult
from quintet.records import Outcome
from quintet.tracking.video_files import VideoFile, open_video, video_suffix

FOLDER = "videos"
MAX_WAITING_BYTES = 256 << 20
"""Size of the frames that may wait for the encoder; if there are more, the video ends early."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for the encoder."""
VideoSplit = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class RobotCaption:
    """Caption below a frame of a robot's video: instruction, rewards and outcome."""

    instruction: str
    reward: float | None = None
    """Reward of the last action; None before the first."""
    episode_return: float = 0.0
    """Sum of rewards so far."""
    outcome: str = ""
    """`success`, `terminated`, `truncated` or `failed` from the end of the episode; empty before."""


_Frame = tuple[np.ndarray, tuple[RobotCaption, ...]]


@dataclass(frozen=True, slots=True)
class _Start:
    path: Path
    on_complete: Callable[[Path], None] | None


def video_path(run: Path, config: TrackingConfig, split: VideoSplit, *, step: int, number: int, seed: int) -> Path:
    """Return the file of a video without its suffix.

    Args:
        run: Run directory.
        config: With `directory` for the split, the file is named as RLinf's: `<directory>/seed_<seed>/<number>`; those
            of validations are below `<directory>/validation` if training has the same directory.
        split: Kind of the episodes.
        step: Number of training steps, or the step that is validated.
        number: Number of the rollout within the split, from 0.
        seed: Seed of the simulator.
    """
    videos, training = (config.validation_video if split == "validation" else config.video), config.video
    if videos is not None and videos.directory is not None:
        shares = split == "validation" and training is not None and training.directory == videos.directory
        return Path(videos.directory) / ("validation" * shares) / f"seed_{seed}" / str(number)
    return run / FOLDER / split / f"step_{step:06d}_rollout_{number}"


def find_videos(run: Path, config: TrackingConfig) -> list[Path]:
    """Return the videos of a run in the order of recording: of validations if they are recorded, otherwise of training.

    With `directory` these may include videos of other runs with the same directory.
    """
    splits: tuple[tuple[VideoSplit, VideoConfig | None], ...]
    splits = (("validation", config.validation_video), ("train", config.video))
    for split, videos in splits:
        if videos is not None:
            folder = video_path(run, config, split, step=0, number=0, seed=0).parent
            folder = folder if videos.directory is None else folder.parent
            files = [path for pattern in ("**/*.mp4", "**/*.gif") for path in folder.glob(pattern)]
            return sorted(files, key=lambda path: int(re.sub(r"\D", "", path.stem.split("_")[-1]) or -1))
    return []


class VideoWriter:
    """Writer of videos that show the first `config.robots` robots of a batch as tiles.

    A video is `start`, then `add_chunk` or `add`, then `finish`. These neither wait for the encoder nor raise because
    of it: a video that cannot be written is left out, and the first failure is reported.
    """

    def __init__(self, config: VideoConfig, frame_rate: float, report: Callable[[str], None]) -> None:
        """Start the thread that encodes.

        Args:
            config: What the videos show.
            frame_rate: Frames per second, the control frequency of the simulator.
            report: Called once with the first failure, by any thread.
        """
        self._config, self._frame_rate, self._report = config, frame_rate, report
        self._captions: tuple[RobotCaption, ...] = ()
        self._queue: queue.SimpleQueue[_Start | _Frame | None] = queue.SimpleQueue()
        """For each video its start, its frames and None; after the last video another None."""
        self._path: Path | None = None
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._is_cut = self._is_reported = False
        self._thread = threading.Thread(target=self._write_videos, name="videos", daemon=True)
        self._thread.start()

    def start(
        self,
        path: Path,
        instructions: Sequence[str],
        frames: np.ndarray | None = None,
        on_complete: Callable[[Path], None] | None = None,
    ) -> None:
        """Start a video after the current one.

        Args:
            path: File without its suffix, see `video_path`.
            instructions: Task of each robot [B].
            frames: First pictures, RGB uint8 [B, height, width, 3]; None if the video starts with the first action.
            on_complete: Called by the encoding thread with the complete file, for example to log it.
        """
        self.finish()
        self._captions = tuple(RobotCaption(text) for text in instructions[: self._config.robots])
        self._path, self._is_cut = path.with_name(path.name + video_suffix()), False
        self._queue.put(_Start(self._path, on_complete))
        if frames is not None:
            self._put(frames)

    def add_chunk(self, result: ChunkResult) -> None:
        """Append the frames of a chunk of actions, if they were recorded."""
        if result.frames is None:
            return
        outcomes = np.where(result.terminated, "terminated", np.where(result.truncated, "truncated", ""))
        for episode in result.episodes:
            ends = np.flatnonzero(outcomes[episode.robot] != "")
            if episode.success_once or episode.outcome is Outcome.FAILED:
                outcomes[episode.robot, ends[0] if len(ends) else -1] = "success" if episode.success_once else "failed"
        for action in range(result.frames.shape[1]):
            self.add(result.frames[:, action], result.rewards[:, action], outcomes[:, action])
        if result.final_observation is not None:
            self._restart_captions(
                {robot_episode.robot for robot_episode in result.episodes}, result.observation.instructions
            )

    def _restart_captions(self, robots: set[int], instructions: Sequence[str]) -> None:
        """Start the captions of new episodes."""
        self._captions = tuple(
            RobotCaption(instructions[robot]) if robot in robots else caption
            for robot, caption in enumerate(self._captions)
        )

    def add(self, frames: np.ndarray, rewards: np.ndarray, outcomes: Sequence[str] | np.ndarray) -> None:
        """Append the frame of one action.

        Args:
            frames: RGB uint8 [B, height, width, 3].
            rewards: float32 [B].
            outcomes: [B], `success`, `terminated`, `truncated` or `failed` for episodes that this action ended,
                otherwise empty; shown from then on.
        """
        self._captions = tuple(
            replace(
                caption,
                reward=float(reward),
                episode_return=caption.episode_return + float(reward),
                outcome=caption.outcome or outcome,
            )
            for caption, reward, outcome in zip(self._captions, rewards, outcomes, strict=False)
        )
        self._put(frames)

    def finish(self) -> None:
        """End the current video; its last frames are encoded in the background."""
        if self._path is not None:
            self._queue.put(None)
            self._path = None

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """End the current video and wait until all are written, at most `timeout_seconds`."""
        self.finish()
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._report_once(f"encoding continued for {timeout_seconds:g} s after the run")

    def _put(self, frames: np.ndarray) -> None:
        """Pass a copy of the frames to the encoder, unless too many wait for it."""
        if self._path is None or self._is_cut:
            return
        shown = np.array(frames[: len(self._captions)])
        with self._lock:
            self._is_cut = self._waiting_bytes + shown.nbytes > MAX_WAITING_BYTES
            self._waiting_bytes += 0 if self._is_cut else shown.nbytes
        if self._is_cut:
            self._report_once(f"{self._path} ends early, because encoding is slower than the simulation")
        else:
            self._queue.put((shown, self._captions))

    def _write_videos(self) -> None:
        while isinstance(start := self._queue.get(), _Start):
            frames = self._frames()
            if (problem := self._write_video(start, frames)) is not None:
                self._report_once(f"{start.path}: {problem}")
            for _ in frames:
                pass

    def _write_video(self, start: _Start, frames: Iterator[_Frame]) -> Exception | None:
        """Write a video; return the error, if any."""
        try:
            if self._write(start.path, frames) and start.on_complete:
                start.on_complete(start.path)
        except Exception as error:  # noqa: BLE001 - whatever an encoder raises must not end a run
            return error
        return None

    def _frames(self) -> Iterator[_Frame]:
        """Yield the remaining frames of the current video."""
        while isinstance(item := self._queue.get(), tuple):
            yield item
            with self._lock:
                self._waiting_bytes -= item[0].nbytes

    def _write(self, path: Path, frames: Iterator[_Frame]) -> bool:
        """Write a video, unless it has no frames; return whether it has."""
        with contextlib.ExitStack() as stack:
            file: VideoFile | None = None
            for images, captions in frames:
                file = file or stack.enter_context(open_video(path, self._frame_rate))
                file.add(tile_frames(images, captions if self._config.overlay else None))
        return file is not None

    def _report_once(self, message: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._report(f"videos are incomplete: {message}")


MIN_TILE_HEIGHT = 160
"""Pixels; smaller pictures are enlarged by a whole number, so that captions can be read."""
LINE_HEIGHT = 13
FONT_SIZE = 11
BACKGROUND, FOREGROUND = (24, 24, 27), (228, 228, 231)
OUTCOME_COLORS = {"success": (74, 222, 128), "failed": (248, 113, 113), "terminated": (248, 113, 113)}


def tile_frames(frames: np.ndarray, captions: Sequence[RobotCaption] | None) -> np.ndarray:
    """Return one picture of all robots, uint8 [rows · h, columns · w, 3], with ⌊√n⌋ rows as in RLinf.

    Args:
        frames: RGB uint8 [n, height, width, 3].
        captions: One per robot, shown below its picture; None shows the pictures only.
    """
    tiles = _enlarged(frames)
    if captions is not None:
        strips = np.stack([_caption(caption, tiles.shape[2]) for caption in captions])
        tiles = np.concatenate([tiles, strips], axis=1)
    count, height, width, _ = tiles.shape
    rows = math.isqrt(count)
    columns = math.ceil(count / rows)
    grid = np.zeros((rows * columns, height, width, 3), np.uint8)
    grid[:count] = tiles
    return grid.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def _enlarged(frames: np.ndarray) -> np.ndarray:
    factor = math.ceil(MIN_TILE_HEIGHT / frames.shape[1])
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def _caption(caption: RobotCaption, width: int) -> np.ndarray:
    """Return the strip below a picture: reward and return, outcome, and two lines of the instruction."""
    reward = "" if caption.reward is None else f"reward {caption.reward:.2f}  "
    numbers = f"{reward}return {caption.episode_return:.2f}"
    return _strip(numbers, caption.outcome, caption.instruction, width)


@lru_cache(maxsize=256)
def _strip(numbers: str, outcome: str, instruction: str, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, 4 * LINE_HEIGHT), BACKGROUND)
    draw, font = ImageDraw.Draw(image), _font()
    draw.text((3, 0), numbers, FOREGROUND, font)
    draw.text((3, LINE_HEIGHT), outcome, OUTCOME_COLORS.get(outcome, FOREGROUND), font)
    columns = max(8, int(width / draw.textlength("abcdefghij", font) * 10))
    for line, text in enumerate(textwrap.wrap(instruction, columns, max_lines=2, placeholder="…"), 2):
        draw.text((3, line * LINE_HEIGHT), text, FOREGROUND, font)
    return np.asarray(image)


@lru_cache(maxsize=1)
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(FONT_SIZE)
