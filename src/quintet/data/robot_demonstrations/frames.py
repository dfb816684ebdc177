"""Decoding of the frames of robot demonstrations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO

import numpy as np

from quintet.data.robot_demonstrations.dataset import InvalidDatasetError
from quintet.data.row_images import FORMATS, MAX_FILE_PIXELS, rgb_pixels


def decode_frame(content: bytes | memoryview, location: str) -> np.ndarray:
    """Return the pixels of a PNG or JPEG file, RGB uint8 [height, width, 3].

    Raises:
        InvalidDatasetError: it cannot be decoded, or has too many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > MAX_FILE_PIXELS:
                    raise ValueError(f"{image.width} × {image.height} pixels, more than {MAX_FILE_PIXELS:,}")
                return rgb_pixels(image)
    except UnidentifiedImageError as error:
        raise InvalidDatasetError("the image cannot be decoded: it is not a PNG or JPEG file", location) from error
    except Exception as error:  # Pillow raises errors of many types for damaged files
        raise InvalidDatasetError(f"the image cannot be decoded: {error}", location) from error


def stack_frames(frames: Sequence[np.ndarray], shape: tuple[int, int], location: str) -> np.ndarray:
    """Return frames as one array, uint8 [T, height, width, 3].

    Raises:
        InvalidDatasetError: one has another height or width than `shape`.
    """
    for index, frame in enumerate(frames):
        if frame.shape[:2] != shape:
            problem = f"the image has {frame.shape[0]} × {frame.shape[1]} pixels, the data set {shape[0]} × {shape[1]}"
            raise InvalidDatasetError(problem, f"{location}, time step {index}")
    return np.stack(frames) if frames else np.zeros((0, *shape, 3), dtype=np.uint8)


def stack_cameras(cameras: Sequence[np.ndarray], num_frames: int) -> np.ndarray:
    """Return the frames of all cameras, uint8 [T, cameras, height, width, 3].

    Raises:
        InvalidDatasetError: the cameras have different resolutions.
    """
    if not cameras:
        return np.zeros((num_frames, 0, 0, 0, 3), dtype=np.uint8)
    sizes = {frames.shape[1:3] for frames in cameras}
    if len(sizes) > 1:
        text = " and ".join(f"{height} × {width}" for height, width in sorted(sizes))
        raise InvalidDatasetError(
            f"the cameras have different resolutions: {text}", hint="select cameras of one resolution"
        )
    return np.stack(cameras, axis=1)
