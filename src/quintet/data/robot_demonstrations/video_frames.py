"""Frames of the videos of robot demonstrations, decoded by PyAV (H.264, AV1, …)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from quintet import hardware
from quintet.data.robot_demonstrations.dataset import InvalidDatasetError
from quintet.data.row_images import MAX_FILE_PIXELS

EXTRA: Final = "video"
"""Extra of this distribution with PyAV."""


def read_video_frames(path: Path, start: float, frequency: float, count: int) -> np.ndarray:
    """Return `count` frames from the time `start` in seconds on, at `frequency` frames per second, RGB uint8
    [T, height, width, 3].

    Raises:
        InvalidDatasetError: the video is damaged, has frames at other times, or PyAV is not installed.
    """
    if not hardware.is_installed("av"):
        command = hardware.install_command(hardware.extra_packages(EXTRA))
        raise InvalidDatasetError("videos are decoded by PyAV, which is not installed", hint=command)
    import av

    path.stat()
    try:
        with av.open(str(path), format="mp4") as container:
            return _select(_decode(container, start, frequency), start, frequency, count)
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise InvalidDatasetError(f"the video cannot be decoded: {error}") from error


def _decode(container: Any, start: float, frequency: float) -> Iterator[tuple[float, np.ndarray]]:
    """Yield times and frames, from the last key frame before `start` on."""
    stream = container.streams.video[0]
    if stream.width * stream.height > MAX_FILE_PIXELS:
        raise ValueError(f"{stream.width} × {stream.height} pixels, more than {MAX_FILE_PIXELS:,}")
    container.seek(max(0, int((start - 0.5 / frequency) / stream.time_base)), stream=stream)
    for frame in container.decode(stream):
        if frame.time is not None and frame.time > start - 0.5 / frequency:
            yield frame.time, frame.to_ndarray(format="rgb24")


def _select(frames: Iterator[tuple[float, np.ndarray]], start: float, frequency: float, count: int) -> np.ndarray:
    """Return the frames, each of which must be within half a period of its time."""
    selected: list[np.ndarray] = []
    while len(selected) < count:
        expected = start + len(selected) / frequency
        time, frame = next(frames, (None, None))
        if time is None or frame is None or abs(time - expected) > 0.5 / frequency:
            state = "the video ends" if time is None else f"the next frame is at {time:.3f} s"
            raise InvalidDatasetError(f"there is no frame at {expected:.3f} s: {state}", f"frame {len(selected)}")
        selected.append(frame)
    return np.stack(selected) if selected else np.zeros((0, 1, 1, 3), dtype=np.uint8)
