"""Robot demonstrations: episodes with observations, actions and an instruction, from files or from an expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from quintet.embodied_records import RobotObservation
from quintet.errors import ConfigError

MAX_EPISODE_BYTES: Final = 8 << 30
"""Largest size of the decoded images of an episode."""
MAX_EPISODE_FRAMES: Final = 1_000_000
"""Largest number of time steps of an episode."""
COPY_AGAIN: Final = "copy the file again, or leave its data set out"


@dataclass(frozen=True, slots=True)
class RobotDemonstration:
    """An episode of T time steps."""

    observations: RobotObservation
    """Before each action; the first dimension of its arrays is the time step, T."""
    actions: np.ndarray
    """In the units of the data set, float32 [T, D]."""


@dataclass(frozen=True, slots=True)
class FeatureNames:
    """Features of a data set that become observations."""

    cameras: tuple[str, ...] = ()
    """Image features in the order of the policy's images, by their whole name or its last part; empty takes all."""
    state: str | None = None
    """Feature with the proprioception; None takes `state`, if there is one."""


class RobotDataset(Protocol):
    """Episodes with random access; only one of them has to be in memory."""

    name: str
    lengths: tuple[int, ...]
    """Time steps of each episode."""
    action_dim: int
    cameras: tuple[str, ...]
    """Names of the images of an observation."""

    def episode(self, index: int, *, with_images: bool = True) -> RobotDemonstration:
        """Return an episode; without images their array has 0 cameras.

        Raises:
            ConfigError: the files are damaged; the message names file and place.
        """


class InvalidDatasetError(Exception):
    """A file of a data set cannot be read."""

    def __init__(self, problem: str, location: str = "", hint: str = COPY_AGAIN) -> None:
        """`place` is where in the file, such as `byte 12`."""
        super().__init__(problem)
        self.problem, self.location, self.hint = problem, location, hint


@contextmanager
def reading(path: Path, key: str) -> Iterator[None]:
    """Translate errors that are raised while a file is read.

    Raises:
        ConfigError: the file cannot be read; the message names it, and the place in it.
    """
    try:
        yield
    except InvalidDatasetError as error:
        location = f", {error.location}" if error.location else ""
        message = f"{key}: {path}{location}: {error.problem}"
        raise ConfigError(message, key=key, value=str(path), source=str(path), hint=error.hint) from error
    except OSError as error:
        message = f"{key}: cannot read {path}: {error.strerror or error}"
        raise ConfigError(message, key=key, value=str(path), hint=COPY_AGAIN) from error


def iter_episodes(datasets: Sequence[RobotDataset], *, with_images: bool = True) -> Iterator[RobotDemonstration]:
    """Yield the episodes of all data sets."""
    for dataset in datasets:
        for index in range(len(dataset.lengths)):
            yield dataset.episode(index, with_images=with_images)


def select_cameras(available: Sequence[str], requested: Sequence[str]) -> tuple[str, ...]:
    """Return the names of image features.

    Raises:
        InvalidDatasetError: one does not exist, or is named ambiguously.
    """
    if not requested:
        return tuple(available)
    return tuple(_match(name, available, "image feature") for name in requested)


def select_state(available: Sequence[str], requested: str | None) -> str | None:
    """Return the name of the feature with the proprioception; None if there is none.

    Raises:
        InvalidDatasetError: the requested one does not exist.
    """
    if requested is not None:
        return _match(requested, available, "tensor feature")
    return next((name for name in available if _last_part(name) == "state"), None)


def _match(name: str, available: Sequence[str], kind: str) -> str:
    matches = [available_name for available_name in available if name in (available_name, _last_part(available_name))]
    if len(matches) == 1:
        return matches[0]
    problem = f"{len(matches)} {kind}s are named {name!r}"
    raise InvalidDatasetError(problem, hint=f"valid: {', '.join(available) or 'none'}")


def _last_part(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]


def check_size(frames: int, image_bytes: int, location: str) -> None:
    """
    Raises:
        InvalidDatasetError: an episode with so many frames, and so many bytes of images per frame, is too large.
    """
    if frames > MAX_EPISODE_FRAMES or frames * image_bytes > MAX_EPISODE_BYTES:
        size = f"{frames:,} frames with {image_bytes:,} bytes of images each"
        limit = f"more than {MAX_EPISODE_FRAMES:,} frames or {MAX_EPISODE_BYTES >> 30} GiB"
        raise InvalidDatasetError(f"an episode of {size} is too large: {limit}", location)


def finite_rows(values: np.ndarray, width: int, location: str) -> np.ndarray:
    """Return values as float32 [T, width].

    Raises:
        InvalidDatasetError: their number is not a multiple of `width`, or one is not finite.
    """
    if width < 1 or values.size % width:
        raise InvalidDatasetError(f"{values.size} numbers are not a multiple of {width}", location)
    rows = values.reshape(-1, width).astype(np.float32)
    if not np.isfinite(rows).all():
        row = int(np.argmin(np.isfinite(rows).all(axis=1)))
        raise InvalidDatasetError("a value is not finite", f"{location}, time step {row}")
    return rows
