"""CRC-32C (Castagnoli), with which TFRecord files are protected.

A CRC is linear over GF(2). So parts of the data are processed side by side by NumPy and then combined: appending n zero
bytes to the data is a linear map of the CRC's state, here stored as four tables of 256 entries.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

POLYNOMIAL: Final = 0x82F63B78
MASK_DELTA: Final = 0xA282EAD8
LOG_LANE_BYTES: Final = 9
"""Logarithm of the bytes that are processed one after another."""
MIN_LANE_BYTES: Final = 64
"""Size from which lanes are faster."""
_ALL_BITS: Final = 0xFFFFFFFF

ZeroBytes = np.ndarray
"""Map of the state to that after some zero bytes: uint32 [4, 256], the images of each byte of the state."""


@cache
def _table() -> np.ndarray:
    """Return the state after each byte, uint32 [256]."""
    states = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        states = (states >> np.uint32(1)) ^ np.where(states & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return states


def _apply(zeros: ZeroBytes, states: np.ndarray) -> np.ndarray:
    shifts = (states >> np.uint32(8 * byte) & np.uint32(0xFF) for byte in range(4))
    first, second, third, fourth = (zeros[byte][shift] for byte, shift in enumerate(shifts))
    result: np.ndarray = first ^ second ^ third ^ fourth
    return result


@cache
def _zero_bytes(log_count: int) -> ZeroBytes:
    """Return the map for 2^log_count zero bytes."""
    if log_count:
        half = _zero_bytes(log_count - 1)
        return np.stack([_apply(half, half[byte]) for byte in range(4)])
    values = np.arange(256, dtype=np.uint32)
    single = [values << np.uint32(8 * byte) for byte in range(4)]
    return np.stack([_table()[state & np.uint32(0xFF)] ^ (state >> np.uint32(8)) for state in single])


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of data."""
    values = np.frombuffer(data, dtype=np.uint8)
    if len(values) < MIN_LANE_BYTES:
        return _bytewise(values)
    lane = 1 << LOG_LANE_BYTES
    padding = -len(values) % lane
    padded = np.zeros(padding + len(values), dtype=np.uint8)
    padded[padding:] = values
    # an initial state of ones is the same as inverting the first four bytes; zeros before them do not change state 0
    padded[padding : padding + 4] ^= np.uint8(0xFF)
    columns = np.ascontiguousarray(padded.reshape(-1, lane).T)
    states, table = np.zeros(columns.shape[1], dtype=np.uint32), _table()
    for column in columns:
        states = table[(states ^ column) & np.uint32(0xFF)] ^ (states >> np.uint32(8))
    return int(_combine(states)) ^ _ALL_BITS


def _bytewise(values: np.ndarray) -> int:
    state, table = _ALL_BITS, _table()
    for value in values.tolist():
        state = int(table[(state ^ value) & 0xFF]) ^ (state >> 8)
    return state ^ _ALL_BITS


def _combine(states: np.ndarray) -> np.uint32:
    """Return the state after all lanes, from the states of the lanes."""
    log_bytes = LOG_LANE_BYTES
    while len(states) > 1:
        if len(states) % 2:
            states = np.concatenate([np.zeros(1, dtype=np.uint32), states])
        states = _apply(_zero_bytes(log_bytes), states[::2]) ^ states[1::2]
        log_bytes += 1
    result: np.uint32 = states[0]
    return result


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the CRC as TFRecord files store it: rotated, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & _ALL_BITS
