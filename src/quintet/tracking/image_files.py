"""PNG files of the images in trajectories, named by their content, in a folder next to the trajectory file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from quintet.contained_files import read_contained
from quintet.envs.service.png import HEADER_END, encode_png
from quintet.errors import MachineError
from quintet.tracking.atomic_files import translate_os_errors, write_atomic

FOLDER = "images"
_NAME = re.compile(rf"{FOLDER}/[0-9a-f]{{24}}\.png")


def write_image(directory: Path, image: np.ndarray) -> str:
    """Write an image, uint8 [height, width, 3], into `directory/images` and return its path relative to `directory`.

    Equal images have one file, which is written once.

    Raises:
        MachineError: The file cannot be written.
    """
    shape = "x".join(map(str, image.shape)).encode()
    name = f"{FOLDER}/{hashlib.blake2b(image.tobytes(), digest_size=12, key=shape).hexdigest()}.png"
    path = directory / name
    with translate_os_errors(path):
        # after a power failure a file that was not flushed may be empty
        is_written = path.exists() and path.stat().st_size > 0
        path.parent.mkdir(parents=True, exist_ok=True)
    if not is_written:
        write_atomic(path, encode_png(image), flush=False)
    return name


def read_png(directory: Path, name: str) -> bytes | None:
    """Return the file of an image, None if it is missing or cut.

    Raises:
        MachineError: The file cannot be read, is a link out of `directory`, or `name` is not a name that `write_image`
            returns.
    """
    if not _NAME.fullmatch(name):
        raise MachineError(f"{directory}: {name!r:.60} is no image of a trajectory")
    with translate_os_errors(directory / name):
        data = read_contained(directory, name) if (directory / name).exists() else b""
    return data if len(data) > HEADER_END else None
