"""Chunks of demonstrated actions in random order, with the observation before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from quintet.data.robot_demonstrations.dataset import RobotDataset, RobotDemonstration
from quintet.embodied_records import RobotObservation
from quintet.errors import ConfigError
from quintet.seeds import derive_seed

MAX_BLOCK_BYTES: Final = 1 << 30
"""Decoded episodes among which time steps are shuffled; at most twice as many are in memory."""


@dataclass(frozen=True, slots=True)
class DemonstratedChunks:
    """N observations, and the C actions after each."""

    observations: RobotObservation
    actions: np.ndarray
    """In the units of the data set, float32 [N, C, D]; after the end of an episode its last action."""
    mask: np.ndarray
    """bool [N, C], False after the end of an episode."""


class ChunkWindows:
    """A window begins at each time step of each episode, so that a policy also learns how episodes end.

    Windows are shuffled in each pass: episodes are put in random order, and the time steps of those that fit into a
    block of memory are mixed. The order follows from the seed.
    """

    def __init__(self, datasets: Sequence[RobotDataset], chunk: int, seed: int, key: str) -> None:
        """`chunk` is the number of actions, C; `key` names the data sets in messages.

        Raises:
            ConfigError: the data sets have actions of different dimensions.
        """
        self._episodes = [(dataset, number) for dataset in datasets for number in range(len(dataset.lengths))]
        self._lengths = [dataset.lengths[number] for dataset, number in self._episodes]
        self._chunk, self._seed = chunk, seed
        self._cache = OrderedDict[int, RobotDemonstration]()
        self._orders: dict[int, np.ndarray] = {}
        dims = {dataset.action_dim: dataset.name for dataset in datasets}
        if len(dims) > 1:
            text = ", ".join(f"{name} {dim}" for dim, name in dims.items())
            hint = "name data sets of one robot"
            raise ConfigError(f"{key}: actions of different dimensions: {text}", key=key, hint=hint)
        self.action_dim = next(iter(dims))
        first = self._read(next(index for index, length in enumerate(self._lengths) if length)).observations.images
        self._frame_bytes = max(1, first[:1].nbytes)
        self._block_frames = max(1, MAX_BLOCK_BYTES // self._frame_bytes)

    def __len__(self) -> int:
        """Number of windows."""
        return sum(self._lengths)

    def batch(self, number: int, size: int) -> DemonstratedChunks:
        """Return batch `number`, counted from 0, of `size` windows.

        Raises:
            ConfigError: a file is damaged, or its images have another resolution than the first ones.
        """
        windows = [self._window(position) for position in range(number * size, (number + 1) * size)]
        rows = [self._rows(self._read(episode), frame) for episode, frame in windows]
        observations, actions, masks = zip(*rows, strict=True)
        return DemonstratedChunks(_concatenate(observations), np.stack(actions), np.stack(masks))

    def _window(self, position: int) -> tuple[int, int]:
        """Return episode and time step of the window at a position of the order of all passes."""
        epoch, index = divmod(position, len(self))
        if epoch not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = self._order(epoch)
        episode, frame = self._orders[epoch][index]
        return int(episode), int(frame)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the windows of a pass in order, int64 [len(self), 2]: episode and time step."""
        rng = np.random.default_rng(derive_seed(self._seed, "demonstrations", epoch))
        blocks: list[np.ndarray] = []
        block: list[np.ndarray] = []
        frames = 0
        for episode in rng.permutation(len(self._episodes)):
            length = self._lengths[episode]
            if block and frames + length > self._block_frames:
                blocks.append(rng.permutation(np.concatenate(block)))
                block, frames = [], 0
            block.append(np.stack([np.full(length, episode), np.arange(length)], axis=1))
            frames += length
        return np.concatenate([*blocks, rng.permutation(np.concatenate(block))])

    def _read(self, index: int) -> RobotDemonstration:
        if index not in self._cache:
            dataset, number = self._episodes[index]
            self._cache[index] = dataset.episode(number)
            while len(self._cache) > 1 and sum(self._lengths[index] for index in self._cache) > 2 * self._block_frames:
                self._cache.popitem(last=False)
        self._cache.move_to_end(index)
        return self._cache[index]

    def _rows(self, episode: RobotDemonstration, frame: int) -> tuple[RobotObservation, np.ndarray, np.ndarray]:
        """Return a window's observation [1], actions [C, D] and mask [C]."""
        frames = np.arange(frame, frame + self._chunk)
        last = len(episode.actions) - 1
        observation = episode.observations.select(np.array([frame]))
        return observation, episode.actions[np.minimum(frames, last)], frames <= last


def _concatenate(observations: Sequence[RobotObservation]) -> RobotObservation:
    return RobotObservation(
        np.concatenate([observation.images for observation in observations]),
        np.concatenate([observation.state for observation in observations]),
        tuple(observation.instructions[0] for observation in observations),
    )


def shift_images(images: np.ndarray, cropped_share: float, rng: np.random.Generator) -> np.ndarray:
    """Return images, uint8 [N, cameras, height, width, 3], each moved by a random offset of whole pixels.

    A policy that crops the centers of images to `cropped_share` of their area then sees random crops of them, as in the
    training of OpenVLA; the moved edges are outside the crop.
    """
    height, width = images.shape[2:4]
    margins = np.floor((1 - np.sqrt(cropped_share)) / 2 * np.array([height, width])).astype(int)
    shifted = np.empty_like(images)
    for index, offsets in enumerate(rng.integers(-margins, margins + 1, size=(len(images), 2))):
        rows, columns = (
            np.clip(np.arange(size) + offset, 0, size - 1)
            for size, offset in zip((height, width), offsets, strict=True)
        )
        shifted[index] = images[index][:, rows[:, None], columns]
    return shifted
