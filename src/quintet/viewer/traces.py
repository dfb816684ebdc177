"""Traces of profiled steps, as tracks of spans: rows of a timeline."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quintet.contained_files import open_contained
from quintet.errors import MachineError
from quintet.tracking.run_directory import RunDirectory

FILE = re.compile(r"step_(\d{6,})_rank_(\d+)\.json")
MAX_BYTES = 200 << 20
REQUESTS = "requests of "
"""Beginning of the track of an engine's requests, which overlap."""
Event = Mapping[str, Any]
Span = tuple[int, int, str, Any]
"""Begin, duration, name and details."""
PlacedSpan = tuple[int, int, int, str, Any]
"""Begin, duration, row, name and details."""


def list_traces(directory: Path) -> list[dict[str, int]]:
    """Return step and rank of each trace in the directory of a run's profiles."""
    names = (FILE.fullmatch(path.name) for path in directory.glob("step_*_rank_*.json"))
    steps_and_ranks = sorted((int(name[1]), int(name[2])) for name in names if name is not None)
    return [{"step": step, "rank": rank} for step, rank in steps_and_ranks]


def read_trace(run: RunDirectory, step: int, rank: int) -> dict[str, Any]:
    """Return the tracks and counters of a trace of a run; times are microseconds since its begin.

    A track has spans `[begin, duration, row, name, details]`, where `name` is an index into `names`; spans of a row do
    not overlap. A counter has its times and, by name, its values.

    Raises:
        MachineError: there is no such trace; it is too large for a browser, or damaged.
    """
    path = run.profile / f"step_{step:06d}_rank_{rank}.json"
    try:
        with open_contained(run.path, path.relative_to(run.path)) as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise MachineError(f"{path} has more than {MAX_BYTES >> 20} MiB", "open it in https://ui.perfetto.dev")
        return _tracks(json.loads(data)["traceEvents"])
    except OSError:
        raise MachineError(f"{path} is missing", "reload the page") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MachineError(f"{path} is no trace", "record it again: tracking.profile={steps: [STEP]}") from None


def _tracks(events: list[Event]) -> dict[str, Any]:
    timed = [event for event in events if "ts" in event]
    begin = min((event["ts"] for event in timed), default=0)
    end = max((event["ts"] + event.get("dur", 0) for event in timed), default=0)
    titles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[Span]] = {title: [] for title in titles.values()}
    for event in events:
        if event["ph"] == "X":
            spans[titles[event["tid"]]].append((event["ts"], event["dur"], event["name"], event["args"]))
    rows = {title: list(_nested(spans_of_title)) for title, spans_of_title in spans.items()}
    for title, requests in _requests(events, end).items():
        rows[title] = list(_beside_each_other(requests))
    names = sorted({span[3] for spans_of_title in rows.values() for span in spans_of_title})
    numbers = {name: number for number, name in enumerate(names)}
    ordered = sorted(rows, key=lambda title: _place(title, list(spans)))
    return {
        "duration": end - begin,
        "names": names,
        "tracks": [
            {
                "name": title,
                "spans": [[ts - begin, dur, row, numbers[name], args] for ts, dur, row, name, args in rows[title]],
            }
            for title in ordered
            if rows[title]
        ],
        "counters": _counters(events, begin),
    }


def _place(title: str, tracks: list[str]) -> tuple[int, str]:
    """Return the place of a track; requests follow their engine."""
    owner = title.removeprefix(REQUESTS)
    return (tracks.index(owner) if owner in tracks else len(tracks), title)


def _nested(spans: list[Span]) -> Iterator[PlacedSpan]:
    """Yield the spans of a track with their depth."""
    ends: list[int] = []
    for ts, dur, name, args in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= ts:
            ends.pop()
        yield ts, dur, len(ends), name, args
        ends.append(ts + dur)


def _requests(events: Iterable[Event], end: int) -> dict[str, list[Span]]:
    """Return the requests of each engine; one that has not ended lasts until the end of the trace."""
    begun: dict[tuple[str, int], Event] = {}
    spans: dict[str, list[Span]] = {}
    for event in events:
        if event["ph"] == "b":
            begun[event["cat"], event["id"]] = event
        elif event["ph"] == "e" and (first := begun.pop((event["cat"], event["id"]), None)) is not None:
            details = first["args"] | event["args"]
            spans.setdefault(event["cat"], []).append((first["ts"], event["ts"] - first["ts"], "request", details))
    for (track, _), first in begun.items():
        spans.setdefault(track, []).append(
            (first["ts"], end - first["ts"], "request", first["args"] | {"ended": False})
        )
    return spans


def _beside_each_other(spans: list[Span]) -> Iterator[PlacedSpan]:
    """Yield spans that overlap, each in the first row that is free."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for ts, dur, name, args in sorted(spans, key=lambda span: span[0]):
        while busy and busy[0][0] <= ts:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ts + dur, row))
        yield ts, dur, row, name, args


def _counters(events: Iterable[Event], begin: int) -> list[dict[str, Any]]:
    counters: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ph"] == "C":
            counter = counters.setdefault(event["name"], {"name": event["name"], "times": [], "values": {}})
            counter["times"].append(event["ts"] - begin)
            for name, value in event["args"].items():
                counter["values"].setdefault(name, []).append(value)
    return list(counters.values())
