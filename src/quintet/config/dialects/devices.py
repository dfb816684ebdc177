"""Which devices a worker runs on, as ROLL and RLinf write it. Read by a grammar, never executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Process", "parse_device_mapping", "parse_placement"]

MOST = 1 << 16
"""Devices of the largest cluster that is believed."""


def parse_device_mapping(text: str) -> tuple[int, ...]:
    """ROLL's `device_mapping`: lists, `list(range(…))`, and sums of them.

    >>> parse_device_mapping("list(range(0,4)) + [6, 7]")
    (0, 1, 2, 3, 6, 7)

    Raises:
        ValueError: anything else, a negative or repeated device, or none at all.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no sum of lists and list(range(…))") from None
    devices = _devices(tree, text)
    if not devices or len(set(devices)) != len(devices) or min(devices) < 0:
        raise ValueError(f"{text!r} must name devices, from 0, each once")
    return devices


def _devices(node: ast.expr, text: str) -> tuple[int, ...]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _devices(node.left, text) + _devices(node.right, text)
    if isinstance(node, ast.List):
        return tuple(_number(item, text) for item in node.elts)
    if _is_call(node, "list", 1) and _is_call(node.args[0], "range", 3):  # type: ignore[attr-defined]
        bounds = [_number(bound, text) for bound in node.args[0].args]  # type: ignore[attr-defined]
        if len(bounds) == 3 and bounds[2] == 0:
            raise ValueError(f"{text!r}: a range can't go in steps of 0")
        found = range(*bounds)
        if len(found) > MOST:
            raise ValueError(f"{text!r} names {len(found)} devices")
        return tuple(found)
    raise ValueError(f"{text!r} is no sum of lists and list(range(…))")


def _is_call(node: ast.expr, name: str, most: int) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and not node.keywords
        and 1 <= len(node.args) <= most
    )


def _number(node: ast.expr, text: str) -> int:
    sign, value = (-1, node.operand) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else (1, node)
    if isinstance(value, ast.Constant) and isinstance(value.value, int) and not isinstance(value.value, bool):
        if value.value > MOST:
            raise ValueError(f"{text!r}: {value.value} is beyond any cluster, which has {MOST} devices at most")
        return sign * value.value
    raise ValueError(f"{text!r}: {ast.unparse(node)} is no whole number")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a component and the devices it has; several processes may share one device."""

    rank: int
    devices: tuple[int, ...]


def parse_placement(components: str, spec: object, devices: int) -> Mapping[str, tuple[Process, ...]]:
    """A line of RLinf's `component_placement`: components joined by commas, and where each runs.

    `all`, `3`, `0,2,3`, `0-3`, `0-3,5,14`; with `:` the processes too: `0-1:0-3` puts processes 0 to 3 on
    devices 0 and 1, two on each, and `0-3:0` gives all four to one. Ranks count over all nodes.

    >>> parse_placement("actor,rollout", "0-1", 8)["rollout"]
    (Process(rank=0, devices=(0,)), Process(rank=1, devices=(1,)))

    Raises:
        ValueError: the line doesn't say that; the message tells why.
    """
    names = [name.strip() for name in components.split(",")]
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(f"{components!r} must name components, each once")
    if isinstance(spec, bool) or not isinstance(spec, int | str):
        raise ValueError(f"{spec!r} is no placement")
    processes: list[Process] = []
    for part in filter(None, (part.strip() for part in str(spec).split(","))):
        found = _part(part, len(processes), devices)
        if processes and found[0].devices[0] <= processes[-1].devices[-1]:
            raise ValueError(f"{spec!r}: devices must be given once and in ascending order")
        processes += found
    return dict.fromkeys(names, tuple(processes))


def _part(part: str, first: int, devices: int) -> list[Process]:
    where, colon, who = (piece.strip() for piece in part.partition(":"))
    places = range(devices) if where.lower() == "all" else _span(where, part)
    if places.stop > devices:
        raise ValueError(f"{part!r}: there are {devices} devices, the last is {devices - 1}")
    ranks = _span(who, part) if colon else range(first, first + len(places))
    if ranks.start != first:
        raise ValueError(f"{part!r}: its processes must go on at {first}")
    if len(ranks) % len(places) == 0:
        each = len(ranks) // len(places)
        return [Process(rank, (places[number // each],)) for number, rank in enumerate(ranks)]
    if len(places) % len(ranks) == 0:
        each = len(places) // len(ranks)
        return [Process(rank, tuple(places[n * each : (n + 1) * each])) for n, rank in enumerate(ranks)]
    raise ValueError(f"{part!r}: {len(ranks)} processes and {len(places)} devices can't be shared out evenly")


def _span(text: str, part: str) -> range:
    match = re.fullmatch(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", text)
    if match is None:
        raise ValueError(f"{part!r} is no rank and no range of ranks")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if high < low:
        raise ValueError(f"{part!r} runs backwards")
    return range(low, high + 1)
