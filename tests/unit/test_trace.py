"""If these fail, a trace cannot be opened, spans are on the wrong track, or recording slows a run that has none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quintet import trace
from quintet.trace import NO_SPAN, TraceRecorder


@contextmanager
def recording(**options: Any) -> Iterator[TraceRecorder]:
    recorder = TraceRecorder(3, "rank 3", **options)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()


def by_track(recorder: TraceRecorder) -> dict[str, list[dict[str, Any]]]:
    """The spans of each track, by its name."""
    events = list(recorder.events())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return {name: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for tid, name in names.items()}


def test_without_a_recorder_a_span_is_one_shared_object_and_nothing_is_kept() -> None:
    assert trace.span("step", "engine 0", running=3) is NO_SPAN
    assert not trace.is_recording()
    trace.add_span("reset", 0, "env worker 1")
    trace.start_request(1, "requests")
    trace.end_request(1)


def test_a_trace_is_json_with_nested_spans_in_microseconds(tmp_path: Path) -> None:
    before = time.time()
    with recording() as recorder:
        with trace.span("gen"):
            with trace.span("forward", running=2):
                time.sleep(0.002)
            with trace.span("sample"):
                pass
        recorder.add_counter("memory, MiB", {"resident": 12.5})
    path = tmp_path / "new" / "trace.json"
    recorder.write(path, step=2)
    document = json.loads(path.read_text())
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
    assert document["otherData"] == {"step": 2}
    events = document["traceEvents"]
    assert events[0] == {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "rank 3"}}
    gen, forward, sample = (event for event in events if event["ph"] == "X")
    assert [gen["name"], forward["name"], sample["name"]] == ["gen", "forward", "sample"]
    assert forward["args"] == {"running": 2}
    assert forward["dur"] >= 2000
    assert before * 1e6 - 1e3 <= gen["ts"] <= forward["ts"]
    assert forward["ts"] + forward["dur"] <= sample["ts"]
    assert sample["ts"] + sample["dur"] <= gen["ts"] + gen["dur"]
    counter = events[-1]
    assert (counter["ph"], counter["name"], counter["args"]) == ("C", "memory, MiB", {"resident": 12.5})


def test_each_thread_and_each_named_track_has_its_own_row() -> None:
    def work() -> None:
        with trace.span("rollout"):
            pass

    with recording() as recorder:
        with trace.span("gen"), trace.span("step", "engine 10"), trace.span("forward"):
            pass
        with trace.span("step", "engine 2"):
            pass
        with trace.span("adv"):
            pass
        thread = threading.Thread(target=work, name="rollout thread")
        thread.start()
        thread.join()
    tracks = {name: [event["name"] for event in spans] for name, spans in by_track(recorder).items()}
    assert list(tracks) == ["MainThread", "rollout thread", "engine 2", "engine 10"]
    assert tracks["MainThread"] == ["gen", "adv"]
    assert tracks["engine 10"] == ["step", "forward"]  # what an engine does within its step is on its track


def test_a_span_that_began_before_the_recording_begins_with_it() -> None:
    started = time.perf_counter_ns()
    time.sleep(0.02)
    with recording() as recorder:
        trace.add_span("step", started, "env worker 1", episode=7)
    (span,) = by_track(recorder)["env worker 1"]
    assert span["dur"] < 10_000
    assert span["args"] == {"episode": 7}


def test_a_request_begins_and_ends_once_also_when_another_engine_takes_it_over() -> None:
    with recording() as recorder:
        trace.start_request(5, "requests of engine 0", prompt_tokens=9)
        trace.start_request(5, "requests of engine 1", prompt_tokens=9)
        trace.end_request(5, tokens=4)
        trace.end_request(6, tokens=1)
    events = [event for event in recorder.events() if event["ph"] in "be"]
    assert [(event["ph"], event["id"], event["cat"]) for event in events] == [
        ("b", 5, "requests of engine 0"),
        ("e", 5, "requests of engine 0"),
    ]
    assert events[1]["args"] == {"tokens": 4}


def test_another_profiler_sees_the_names_of_spans() -> None:
    names = []

    @contextmanager
    def annotate(name: str) -> Iterator[None]:
        names.append(name)
        yield

    with recording(annotate=annotate), trace.span("gen"), trace.span("step", "engine 0"):
        pass
    assert names == ["gen", "step"]


def test_an_error_in_a_span_ends_the_span_and_its_track() -> None:
    with recording() as recorder:
        with pytest.raises(ValueError, match="lost"), trace.span("step", "engine 0"):
            raise ValueError("lost")
        with trace.span("gen"):
            pass
    assert {name: len(spans) for name, spans in by_track(recorder).items()} == {"MainThread": 1, "engine 0": 1}


def test_two_recorders_do_not_record_at_once() -> None:
    with recording(), pytest.raises(RuntimeError, match="already being recorded"):
        TraceRecorder(0, "rank 0").start()
    assert not trace.is_recording()
