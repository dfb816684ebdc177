"""Spans of a running process as Chrome trace events, which Perfetto and `chrome://tracing` show.

`span` and the other functions of this module record only while a `TraceRecorder` is active; otherwise they return at
once. Like `torch.profiler`, a recorder records everything that its process does, so there is one at a time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

Annotate = Callable[[str], AbstractContextManager[Any]]
Track = str | int
"""Name of a track, or the identifier of a thread."""
NO_SPAN = nullcontext()
_active: TraceRecorder | None = None


def span(name: str, track: str | None = None, **details: Any) -> AbstractContextManager[None]:
    """Record the time within the context as a span on a track. None is the track of the span that the calling thread is
    in, at first the thread's. Spans of a track are nested."""
    recorder = _active
    return NO_SPAN if recorder is None else _Span(recorder, name, track, details)


def is_recording() -> bool:
    """Return whether a recorder is active."""
    return _active is not None


def add_span(name: str, started: int, track: str, **details: Any) -> None:
    """Record the time since `started`, of `time.perf_counter_ns`, as a span on a track."""
    recorder = _active
    if recorder is not None:
        recorder.add_span(name, started, time.perf_counter_ns(), track, details)


def start_request(number: int, track: str, **details: Any) -> None:
    """Record the begin of a request to an engine; requests on a track overlap."""
    recorder = _active
    if recorder is not None:
        recorder.add_request_event("b", number, track, details)


def end_request(number: int, **details: Any) -> None:
    """Record the end of a request, if its begin was recorded."""
    recorder = _active
    if recorder is not None:
        recorder.add_request_event("e", number, None, details)


class _Span:
    """Context of one span."""

    __slots__ = ("_annotation", "_details", "_name", "_outer_track", "_recorder", "_started", "_track")

    def __init__(self, recorder: TraceRecorder, name: str, track: str | None, details: Mapping[str, Any]) -> None:
        self._recorder, self._name, self._track, self._details = recorder, name, track, details
        self._annotation = None if recorder.annotate is None else recorder.annotate(name)

    def __enter__(self) -> None:
        if self._annotation is not None:
            self._annotation.__enter__()
        self._outer_track = self._recorder.enter_track(self._track)
        self._started = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended = time.perf_counter_ns()
        if self._annotation is not None:
            self._annotation.__exit__(kind, error, traceback)
        self._recorder.add_span(self._name, self._started, ended, self._track, self._details)
        if self._track is not None:
            self._recorder.enter_track(self._outer_track)


class TraceRecorder:
    """Events of a process, of all its threads. Appending to a list is atomic, so that threads do not wait."""

    def __init__(self, process: int, process_name: str, annotate: Annotate | None = None) -> None:
        """`process` is the number under which viewers group the tracks; `annotate` returns a context that another
        profiler records under the name of a span."""
        self.annotate = annotate
        self._process, self._process_name = process, process_name
        self._spans: list[tuple[str, int, int, Track, Mapping[str, Any]]] = []
        self._request_events: list[tuple[str, int, int, str, Mapping[str, Any]]] = []
        self._counters: list[tuple[str, int, Mapping[str, float]]] = []
        self._requests: dict[int, str] = {}
        """Tracks of the requests whose begin was recorded, by number."""
        self._threads: dict[int, str] = {}
        """Names of the threads with spans, by identifier."""
        self._thread_tracks: dict[int, Track] = {}
        """Tracks of the spans that threads are in, by their identifiers."""
        self._started = self._ended = time.perf_counter_ns()
        self._epoch = time.time_ns() - self._started
        """Nanoseconds from 1970 to the zero of `time.perf_counter_ns`, so that traces of several ranks fit together."""

    def start(self) -> None:
        """Record from now on.

        Raises:
            RuntimeError: another recorder is active.
        """
        global _active
        if _active is not None:
            raise RuntimeError("a trace of this process is already being recorded")
        self._started = time.perf_counter_ns()
        _active = self

    def stop(self) -> None:
        """Record no further events."""
        global _active
        if _active is self:
            _active = None
            self._ended = time.perf_counter_ns()

    def enter_track(self, track: Track | None) -> Track:
        """Make a track, unless it is None, that of the calling thread's next spans; return the one before."""
        thread = threading.get_ident()
        before = self._thread_tracks.get(thread, thread)
        if track is not None:
            self._thread_tracks[thread] = track
        return before

    def add_span(self, name: str, started: int, ended: int, track: str | None, details: Mapping[str, Any]) -> None:
        """Add a span; its begin and end are of `time.perf_counter_ns`."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        track_of_span = self._thread_tracks.get(thread, thread) if track is None else track
        self._spans.append((name, max(started, self._started), ended, track_of_span, details))

    def add_request_event(self, phase: str, number: int, track: str | None, details: Mapping[str, Any]) -> None:
        """Add the begin (`b`) or the end (`e`) of a request."""
        if track is not None:
            if number in self._requests:
                return  # an engine has lost it, and another one gets it
            self._requests[number] = track
        elif (track := self._requests.pop(number, None)) is None:
            return
        self._request_events.append((phase, time.perf_counter_ns(), number, track, details))

    def add_counter(self, name: str, values: Mapping[str, float]) -> None:
        """Add the present values of a counter, which viewers draw over time."""
        self._counters.append((name, time.perf_counter_ns(), values))

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all events in Chrome's format, with times in microseconds."""
        numbers = self._track_numbers()
        process = {"pid": self._process}
        yield {"ph": "M", "name": "process_name", **process, "args": {"name": self._process_name}}
        yield {"ph": "M", "name": "process_sort_index", **process, "args": {"sort_index": self._process}}
        for track, number in numbers.items():
            name = self._threads[track] if isinstance(track, int) else track
            yield {"ph": "M", "name": "thread_name", **process, "tid": number, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **process, "tid": number, "args": {"sort_index": number}}
        for name, started, ended, track, details in sorted(self._spans, key=lambda each: (each[1], -each[2])):
            if ended >= self._started:
                times = {"ts": self._time(started), "dur": self._time(ended) - self._time(started)}
                yield {"ph": "X", "name": name, **times, **process, "tid": numbers[track], "args": dict(details)}
        for phase, at, number, track, details in self._request_events:
            identity = {"cat": track, "id": number, "name": track}
            yield {"ph": phase, **identity, "ts": self._time(at), **process, "tid": 0, "args": dict(details)}
        for name, at, values in self._counters:
            yield {"ph": "C", "name": name, "ts": self._time(at), **process, "args": dict(values)}

    def _track_numbers(self) -> dict[Track, int]:
        """Return the numbers of the tracks: first those of threads, in the order of their first span."""
        tracks = dict.fromkeys(each[3] for each in self._spans)
        threads = [track for track in tracks if isinstance(track, int)]
        names = sorted((track for track in tracks if isinstance(track, str)), key=lambda name: (len(name), name))
        ordered: list[Track] = [*threads, *names]
        return {track: number for number, track in enumerate(ordered, 1)}

    def _time(self, nanoseconds: int) -> int:
        """Return microseconds since 1970, rounded down: nested spans remain nested."""
        return (nanoseconds + self._epoch) // 1000

    def write(self, path: Path, **details: Any) -> None:
        """Write the trace as JSON, with `details` as its metadata. A file that exists is replaced when it is complete.

        Raises:
            OSError: the file cannot be written.
        """
        temporary = path.with_name(f".{path.name}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        # `json.dump` would not use the encoder in C
        content = json.dumps({"traceEvents": list(self.events()), "displayTimeUnit": "ms", "otherData": details})
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
