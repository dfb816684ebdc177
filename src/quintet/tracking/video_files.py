"""Video files: MP4 (H.264) with PyAV, GIF with Pillow where PyAV is missing. Frames are encoded as they arrive."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MAX_GIF_RATE = 50.0
"""Frames per second of a GIF; viewers show shorter delays than 20 ms as 100 ms."""


class VideoFile(Protocol):
    """A video that is being written."""

    def add(self, frame: np.ndarray) -> None:
        """Append a frame, RGB uint8 [height, width, 3]; all have the size of the first one."""

    def close(self) -> None:
        """Complete the file."""


def video_suffix() -> str:
    """Return `.mp4`, or `.gif` if PyAV is not installed."""
    return ".gif" if importlib.util.find_spec("av") is None else ".mp4"


@contextlib.contextmanager
def open_video(path: Path, frame_rate: float) -> Iterator[VideoFile]:
    """Open a video, `path` with the suffix `.mp4` or `.gif`, which appears under its name once it is complete.

    Args:
        path: The file; missing directories are created.
        frame_rate: Frames per second.

    Raises:
        OSError: The file cannot be written, or there is no encoder of H.264; no incomplete file is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        file = (_Mp4File if path.suffix == ".mp4" else _GifFile)(temporary, frame_rate)
        try:
            yield file
        finally:
            file.close()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class _Mp4File:
    """H.264 in an MP4 file, encoded by one thread."""

    def __init__(self, path: Path, frame_rate: float) -> None:
        import av

        self._av = av
        self._rate = Fraction(frame_rate).limit_denominator(1000)
        self._container = av.open(os.fspath(path), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream: Any = None

    def add(self, frame: np.ndarray) -> None:
        # H.264 halves the resolution of colours, so both sides must be even
        frame = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        if self._stream is None:
            self._stream = self._container.add_stream("libx264", rate=self._rate)
            self._stream.height, self._stream.width = frame.shape[:2]
            self._stream.pix_fmt = "yuv420p"
            self._stream.options = {"preset": "veryfast", "crf": "26"}
            self._stream.thread_count = 1
        self._container.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(frame, format="rgb24")))

    def close(self) -> None:
        with contextlib.closing(self._container):
            if self._stream is not None:
                self._container.mux(self._stream.encode())


class _GifFile:
    """Endless GIF whose frames have palettes of their own."""

    def __init__(self, path: Path, frame_rate: float) -> None:
        self._file = path.open("wb")
        self._stride = max(1, round(frame_rate / MAX_GIF_RATE))
        """Only every n-th frame is written, so that the video is not slower than the simulation."""
        self._milliseconds = round(1000 * self._stride / frame_rate)
        self._frames = 0

    def add(self, frame: np.ndarray) -> None:
        from PIL import GifImagePlugin, Image

        self._frames += 1
        if (self._frames - 1) % self._stride:
            return
        image = Image.fromarray(frame).quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        if self._frames == 1:
            blocks, _ = GifImagePlugin.getheader(image, info={"loop": 0})
            self._file.write(b"".join(blocks))
        blocks = GifImagePlugin.getdata(image, duration=self._milliseconds, include_color_table=True)
        self._file.write(b"".join(blocks))

    def close(self) -> None:
        with contextlib.closing(self._file):
            if self._frames:
                self._file.write(b";")
