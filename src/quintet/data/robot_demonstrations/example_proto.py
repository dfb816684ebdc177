"""Parser of `tf.train.Example` and `tf.train.SequenceExample` messages.

    Example         { Features features = 1; }
    SequenceExample { Features context = 1; FeatureLists feature_lists = 2; }
    Features        { map<string, Feature> feature = 1; }
    FeatureLists    { map<string, FeatureList> feature_list = 1; }   FeatureList { repeated Feature feature = 1; }
    Feature         { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }, each with `repeated … value = 1`

Only requested features are parsed; others are skipped without being read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np

from quintet.data.robot_demonstrations.dataset import MAX_EPISODE_FRAMES, InvalidDatasetError

MAX_VALUES: Final = 1 << 26
"""Largest number of integers of a feature; each may take a single byte in the message, but eight in memory."""
Values = list[memoryview] | np.ndarray
"""Values of a feature: byte strings, float32 or int64."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types."""
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}


def parse_example(data: memoryview, names: Collection[str]) -> Mapping[str, Values]:
    """Return the values of the features `names` that an example has. The steps of a `SequenceExample` follow one
    another.

    Raises:
        InvalidDatasetError: the message is malformed; the text names the byte.
    """
    features: dict[str, Values] = {}
    for number, start, stop in _messages(data, 0, len(data)):
        for name, first, last in _entries(data, start, stop, names) if number in (1, 2) else ():
            features[name] = _feature(data, first, last) if number == 1 else _feature_list(data, first, last)
    return features


def _entries(data: memoryview, start: int, stop: int, names: Collection[str]) -> Iterator[tuple[str, int, int]]:
    """Yield name and value of the entries of a map that are requested."""
    for number, first, last in _messages(data, start, stop):
        if number != 1:
            continue
        key, value = "", (last, last)
        for part, begin, end in _messages(data, first, last):
            if part == 1:
                key = _text(data, begin, end)
            elif part == 2:
                value = (begin, end)
        if key in names:
            yield key, *value


def _text(data: memoryview, start: int, stop: int) -> str:
    try:
        return bytes(data[start:stop]).decode()
    except UnicodeDecodeError as error:
        raise _malformed(start, "the name of a feature is not UTF-8") from error


def _feature_list(data: memoryview, start: int, stop: int) -> Values:
    steps = [_feature(data, first, last) for number, first, last in _messages(data, start, stop) if number == 1]
    if all(isinstance(step, np.ndarray) for step in steps):
        return np.concatenate([np.asarray(step) for step in steps]) if steps else []
    if any(isinstance(step, np.ndarray) for step in steps):
        raise _malformed(start, "the steps of a feature have different types")
    return [value for step in steps for value in step]


def _feature(data: memoryview, start: int, stop: int) -> Values:
    values: Values = []
    for number, first, last in _messages(data, start, stop):
        if number == 1:
            values = _byte_strings(data, first, last)
        elif number == 2:
            values = _floats(data, first, last)
        elif number == 3:
            values = _integers(data, first, last)
    return values


def _byte_strings(data: memoryview, start: int, stop: int) -> list[memoryview]:
    values: list[memoryview] = []
    for number, first, last in _messages(data, start, stop):
        if number == 1:
            values.append(data[first:last])
        if len(values) > MAX_EPISODE_FRAMES:
            raise _malformed(first, f"a feature has more than {MAX_EPISODE_FRAMES:,} values")
    return values


def _floats(data: memoryview, start: int, stop: int) -> np.ndarray:
    parts: list[np.ndarray] = []
    for number, wire_type, first, last in _fields(data, start, stop):
        if number == 1 and wire_type in (_BYTES, _FIXED32):
            if (last - first) % 4:
                raise _malformed(first, "a list of floats is cut off")
            parts.append(np.frombuffer(data[first:last], dtype="<f4"))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _integers(data: memoryview, start: int, stop: int) -> np.ndarray:
    values: list[int] = []
    for number, wire_type, first, last in _fields(data, start, stop):
        while number == 1 and wire_type in (_BYTES, _VARINT) and first < last:
            value, first = _varint(data, first, last)
            values.append(value - (1 << 64) if value >> 63 else value)
            if len(values) > MAX_VALUES:
                raise _malformed(first, f"a feature has more than {MAX_VALUES:,} values")
    return np.asarray(values, dtype=np.int64)


def _messages(data: memoryview, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of fields with a length: messages and strings."""
    for number, wire_type, first, last in _fields(data, start, stop):
        if wire_type == _BYTES:
            yield number, first, last


def _fields(data: memoryview, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and end of the value of each field."""
    position = start
    while position < stop:
        first = position
        tag, position = _varint(data, position, stop)
        wire_type = tag & 7
        if wire_type == _VARINT:
            begin = position
            _, position = _varint(data, position, stop)
        elif wire_type == _BYTES:
            length, begin = _varint(data, position, stop)
            position = begin + length
        elif wire_type in _FIXED:
            begin, position = position, position + _FIXED[wire_type]
        else:
            raise _malformed(first, f"wire type {wire_type} does not occur in examples")
        if position > stop:
            raise _malformed(first, "a field is longer than its message")
        yield tag >> 3, wire_type, begin, position


def _varint(data: memoryview, position: int, stop: int) -> tuple[int, int]:
    """Return an integer of up to ten bytes, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= stop:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
    raise _malformed(position, "an integer is cut off")


def _malformed(position: int, problem: str) -> InvalidDatasetError:
    return InvalidDatasetError(f"{problem} (byte {position:,} of the message)")
