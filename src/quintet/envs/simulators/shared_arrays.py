"""Arrays of messages in shared memory: one process writes a message at a time, another one reads it before the next."""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

ALIGNMENT = 64
MIN_BYTES = 1 << 16
"""Size of the first segment."""
SHARED = frozenset({"dtype", "shape", "offset"})
DTYPES = frozenset({"bool", "uint8", "int64", "float32"})


class SharedArrayWriter:
    """Writes the arrays of messages to a segment, which is replaced by a larger one if it is too small."""

    def __init__(self) -> None:
        self._segment = mmap.mmap(-1, 1)
        self._end = 0

    def write(self, message: Any) -> tuple[Any, list[int]]:
        """Return the message with references in place of arrays, and the descriptor of the segment if it is a new one,
        which the caller closes."""
        size = sum(_aligned(array.nbytes) for array in _arrays(message))
        descriptors = self._replace(size) if size > len(self._segment) else []
        self._end = 0
        reference = self._reference(message)
        if descriptors:
            reference = {"segment": len(self._segment), **reference}
        return reference, descriptors

    def _replace(self, size: int) -> list[int]:
        descriptor = os.memfd_create("quintet-robots")
        os.ftruncate(descriptor, max(MIN_BYTES, size))
        self._segment.close()
        self._segment = mmap.mmap(descriptor, 0)
        return [descriptor]

    def _reference(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._put(value)
        if isinstance(value, Mapping):
            return {key: self._reference(item) for key, item in value.items()}
        return value

    def _put(self, array: np.ndarray) -> dict[str, Any]:
        if array.size:
            target = np.frombuffer(self._segment, array.dtype, array.size, self._end).reshape(array.shape)
            target[...] = array
        reference = {"dtype": str(array.dtype), "shape": list(array.shape), "offset": self._end}
        self._end += _aligned(array.nbytes)
        return reference


class SharedArrayReader:
    """Reads the arrays that `SharedArrayWriter` has written. The arrays are views, valid until the writer's next
    message."""

    def __init__(self) -> None:
        self._segment = mmap.mmap(-1, 1)

    def read(self, message: Any, descriptors: deque[int]) -> Any:
        """Return the message with its arrays; a new segment takes its descriptor from `descriptors`.

        Raises:
            ValueError: a reference is invalid.
        """
        if "segment" in message:
            if not descriptors:
                raise ValueError("a segment of shared memory without a descriptor")
            descriptor = descriptors.popleft()
            self._segment = mmap.mmap(descriptor, 0)
            os.close(descriptor)
        return self._value(message)

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() == SHARED:
            return self._array(**value)
        return {key: self._value(item) for key, item in value.items()}

    def _array(self, dtype: str, shape: list[int], offset: int) -> np.ndarray:
        if dtype not in DTYPES or not all(isinstance(size, int) and size >= 0 for size in (*shape, offset)):
            raise ValueError(f"an array of {dtype!r:.40} with shape {shape!r:.40}")
        size = math.prod(shape)
        return np.frombuffer(self._segment, dtype, size, offset).reshape(shape) if size else np.zeros(shape, dtype)


def _arrays(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _arrays(item)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
