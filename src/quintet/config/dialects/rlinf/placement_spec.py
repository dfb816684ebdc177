"""Parser of the values of RLinf's `cluster.component_placement`, such as `0-3,5` or `0-1:0-3`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DEVICES = 1 << 16


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a component and its devices; several processes may share one device."""

    rank: int
    devices: tuple[int, ...]


def parse_placement(components: str, spec: object, num_devices: int) -> Mapping[str, tuple[Process, ...]]:
    """Return the processes of each component, whose names are joined by commas.

    A placement is `all`, `3`, `0,2,3`, `0-3` or `0-3,5,14`. After `:` come the ranks: `0-1:0-3` puts processes 0 to 3
    on devices 0 and 1, two on each, and `0-3:0` gives four devices to one process. Devices count over all nodes.

    >>> parse_placement("actor,rollout", "0-1", 8)["rollout"]
    (Process(rank=0, devices=(0,)), Process(rank=1, devices=(1,)))

    Raises:
        ValueError: the text is not such a placement.
    """
    names = [name.strip() for name in components.split(",")]
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(f"{components!r} must name components, each once")
    if isinstance(spec, bool) or not isinstance(spec, int | str):
        raise ValueError(f"{spec!r} is not a placement")
    processes: list[Process] = []
    for part in filter(None, (part.strip() for part in str(spec).split(","))):
        added = _parse_part(part, len(processes), num_devices)
        if processes and added[0].devices[0] <= processes[-1].devices[-1]:
            raise ValueError(f"{spec!r}: devices must be in ascending order, each once")
        processes += added
    return dict.fromkeys(names, tuple(processes))


def _parse_part(part: str, first_rank: int, num_devices: int) -> list[Process]:
    left, colon, right = (text.strip() for text in part.partition(":"))
    devices = range(num_devices) if left.lower() == "all" else _parse_range(left, part)
    if devices.stop > num_devices:
        raise ValueError(f"{part!r}: there are {num_devices} devices, the last is {num_devices - 1}")
    ranks = _parse_range(right, part) if colon else range(first_rank, first_rank + len(devices))
    if ranks.start != first_rank:
        raise ValueError(f"{part!r}: its ranks must continue at {first_rank}")
    if len(ranks) % len(devices) == 0:
        per_device = len(ranks) // len(devices)
        return [Process(rank, (devices[number // per_device],)) for number, rank in enumerate(ranks)]
    if len(devices) % len(ranks) == 0:
        size = len(devices) // len(ranks)
        return [Process(rank, tuple(devices[n * size : (n + 1) * size])) for n, rank in enumerate(ranks)]
    raise ValueError(f"{part!r}: {len(ranks)} processes cannot share {len(devices)} devices evenly")


def _parse_range(text: str, part: str) -> range:
    match = re.fullmatch(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", text)
    if match is None:
        raise ValueError(f"{part!r} is not a rank or a range of ranks")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if high < low:
        raise ValueError(f"{part!r} is a range in descending order")
    return range(low, high + 1)
