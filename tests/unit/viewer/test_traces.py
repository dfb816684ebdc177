"""If these fail, the timeline shows other spans than a step had, or files of another directory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quintet import trace
from quintet.errors import MachineError
from quintet.runtime.http_service.address import Address
from quintet.trace import TraceRecorder
from quintet.tracking.run_directory import RunDirectory
from quintet.viewer import traces
from quintet.viewer.app import build_app
from quintet.viewer.run_catalog import RunCatalog
from quintet.viewer.traces import list_traces, read_trace


def spans_of(read: dict[str, Any], track: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Name, row and details of the spans of a track."""
    (actual,) = (each for each in read["tracks"] if each["name"] == track)
    return [(read["names"][name], row, details) for _, _, row, name, details in actual["spans"]]


@pytest.fixture
def run_with_trace(run_path: Path) -> Path:
    """A run with a trace of step 2."""
    recorder = TraceRecorder(0, "rank 0")
    recorder.start()
    with trace.span("step"):
        with trace.span("gen", episodes=2):
            trace.start_request(0, "requests of engine 0", prompt_tokens=9)
            trace.start_request(1, "requests of engine 0")
            time.sleep(0.002)
            trace.add_span("forward", time.perf_counter_ns() - 1_000_000, "engine 0", running=2)
            trace.end_request(0, tokens=4)
            time.sleep(0.002)
            trace.start_request(2, "requests of engine 0")
            trace.end_request(1)
        with trace.span("update_actor"):
            time.sleep(0.001)
    recorder.add_counter("memory, MiB", {"resident": 7.5})
    recorder.stop()
    recorder.write(run_path / "profile/step_000002_rank_0.json", step=2, rank=0)
    return run_path


def test_spans_are_nested_and_requests_beside_each_other(run_with_trace: Path) -> None:
    read = read_trace(RunDirectory(run_with_trace), 2, 0)
    assert [track["name"] for track in read["tracks"]] == ["MainThread", "engine 0", "requests of engine 0"]
    assert spans_of(read, "MainThread") == [("step", 0, {}), ("gen", 1, {"episodes": 2}), ("update_actor", 1, {})]
    assert spans_of(read, "engine 0") == [("forward", 0, {"running": 2})]
    # the third gets the row of the first, which has ended, and has no end itself
    requests = [(0, {"prompt_tokens": 9, "tokens": 4}), (1, {}), (0, {"ended": False})]
    assert spans_of(read, "requests of engine 0") == [("request", *request) for request in requests]
    (counter,) = read["counters"]
    assert (counter["name"], counter["values"]) == ("memory, MiB", {"resident": [7.5]})
    begins = [span[0] for track in read["tracks"] for span in track["spans"]]
    assert min(begins) == 0
    assert 5_000 <= read["duration"] < 1_000_000


def test_the_viewer_serves_the_traces_of_a_run(run_with_trace: Path) -> None:
    app = build_app(RunCatalog([run_with_trace]), Address())
    client = TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)
    (run_with_trace / "profile/step_000003_rank_1.json").write_text("[]")
    (run_with_trace / "profile/step_000002_rank_0.torch.json.gz").write_text("of torch.profiler")
    (run_with_trace / "step_000009_rank_0.json").write_text("elsewhere")
    actual = client.get("/api/traces", params={"run": "lake"}).json()
    assert actual == [{"step": 2, "rank": 0}, {"step": 3, "rank": 1}]
    assert client.get("/api/trace", params={"run": "lake", "step": 2, "rank": 0}).json()["names"][0] == "forward"
    for step, rank, message in ((3, 1, "is no trace"), (9, 0, "is missing")):
        answer = client.get("/api/trace", params={"run": "lake", "step": step, "rank": rank})
        assert (answer.status_code, message in answer.json()["error"]) == (404, True)
    assert client.get("/api/trace", params={"run": "lake", "step": "../../9", "rank": 0}).status_code == 422


def test_a_trace_that_would_stop_the_browser_is_refused(run_with_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_BYTES", 100)
    with pytest.raises(MachineError, match=r"more than 0 MiB[\s\S]*perfetto"):
        read_trace(RunDirectory(run_with_trace), 2, 0)


def test_a_run_without_profiles_has_no_traces(tmp_path: Path) -> None:
    assert list_traces(tmp_path / "profile") == []


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "MainThread"}}]])
def test_an_empty_trace_has_no_tracks(tmp_path: Path, events: list[Any]) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/step_000001_rank_0.json").write_text(json.dumps({"traceEvents": events}))
    assert read_trace(RunDirectory(tmp_path), 1, 0)["tracks"] == []
