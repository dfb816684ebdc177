"""If these fail, a tracker that raises, hangs or has no network ends or slows a run, or nobody hears of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from quintet.errors import MachineError
from quintet.tracking import loggers as tracking_loggers
from quintet.tracking.logger import LOGGERS, Logger, LoggerContext
from quintet.tracking.loggers import BackgroundLogger, build_loggers
from quintet.tracking.progress import NullProgress

METRICS = {"critic/score/mean": 0.25}


class Notes(NullProgress):
    """Progress that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Recorder:
    """Logger that waits for `is_released`, and raises on odd steps."""

    def __init__(self, is_released: threading.Event) -> None:
        self.is_released, self.steps, self.is_closed = is_released, [0], False

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self.is_released.wait(20)
        self.steps.append(step)
        if step % 2:
            raise ConnectionError(f"no server for step {step}")

    def close(self) -> None:
        self.is_closed = True


def in_background(recorder: Recorder, directory: Path) -> tuple[BackgroundLogger, list[str]]:
    notes = Notes()
    return BackgroundLogger("mine", lambda context: recorder, LoggerContext(directory, reporter=notes)), notes.notes


def test_a_logger_that_raises_gets_the_next_steps_and_is_reported_once(tmp_path: Path) -> None:
    recorder = Recorder(threading.Event())
    recorder.is_released.set()
    logger, notes = in_background(recorder, tmp_path)
    for step in range(1, 6):
        logger.log(step, 0.5, METRICS)
    logger.close()
    assert (recorder.steps, recorder.is_closed) == ([0, 1, 2, 3, 4, 5], True)
    assert notes == ["logger mine: ConnectionError: no server for step 1"]


def test_a_logger_that_cannot_be_built_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    def factory(context: LoggerContext) -> Logger:
        raise SystemExit("log in first")

    notes = Notes()
    logger = BackgroundLogger("mine", factory, LoggerContext(tmp_path, reporter=notes))
    for step in range(5):
        logger.log(step, 0.5, METRICS)
    logger.close()
    assert notes.notes == ["logger mine: SystemExit: log in first"]


def test_a_logger_that_hangs_delays_neither_a_step_nor_for_long_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_loggers, "CLOSE_SECONDS", 0.3)
    recorder = Recorder(threading.Event())
    logger, notes = in_background(recorder, tmp_path)
    started = time.perf_counter()
    for step in range(tracking_loggers.MAX_WAITING_RECORDS + 10):
        logger.log(step, 0.5, METRICS)
    assert time.perf_counter() - started < 2
    logger.close()
    assert time.perf_counter() - started < 5
    recorder.is_released.set()
    assert notes == [
        "logger mine: 256 records wait for it; further ones are dropped",
        "logger mine: does not end within 0.3 s, 256 records are missing",
    ]


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    if LOGGERS.get("mlflow").missing():
        pytest.skip("mlflow is not installed: pip install 'quintet[mlflow]'")
    monkeypatch.setattr(tracking_loggers, "CLOSE_SECONDS", 0.3)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    notes = Notes()
    started = time.perf_counter()
    loggers = build_loggers(["jsonl", "mlflow"], LoggerContext(tmp_path, reporter=notes))
    loggers.log(1, 0.5, METRICS)
    loggers.close()
    assert time.perf_counter() - started < 5
    assert "mlflow: does not end within 0.3 s" in notes.notes[-1]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_the_file_logger_writes_verls_lines_and_resumes(tmp_path: Path) -> None:
    for resume_step in (None, 1):
        context = LoggerContext(
            tmp_path / "run", resume_step=resume_step, name="lake/8x8", project="mine", log_dir=tmp_path / "logs"
        )
        loggers = build_loggers(["file"], context)
        for step in (1, 2) if resume_step is None else (2,):
            loggers.log(step, 0.5, {"critic/score/mean": step / 4, "actor/entropy": float("nan")})
        loggers.close()
    lines = [json.loads(line) for line in (tmp_path / "logs/mine/lake_8x8.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["data"] == {"actor/entropy": None, "critic/score/mean": 0.5}


def test_tensorboard_writes_into_log_dir_and_an_unwritable_one_is_named(tmp_path: Path) -> None:
    context = LoggerContext(tmp_path / "run", log_dir=tmp_path / "logs")
    loggers = build_loggers(["tensorboard"], context)
    loggers.log(1, 0.5, METRICS)
    loggers.close()
    assert list((tmp_path / "logs/tensorboard").glob("events.*"))
    (tmp_path / "file").write_text("")
    for name in ("tensorboard", "file"):
        with pytest.raises(MachineError, match=r"tracking\.log_dir"):
            build_loggers([name], LoggerContext(tmp_path, log_dir=tmp_path / "file"))


def test_tensorboard_shows_a_gif_and_names_an_mp4(tmp_path: Path) -> None:
    import numpy as np
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    from quintet.tracking.video_files import open_video

    gif = tmp_path / "a.gif"
    with open_video(gif, 10.0) as file:
        file.add(np.zeros((4, 6, 3), np.uint8))
    loggers = build_loggers(["tensorboard"], LoggerContext(tmp_path))
    loggers.log_video(1, "train/video", gif)
    loggers.log_video(2, "train/video", tmp_path / "b.mp4")
    loggers.close()
    (path,) = (tmp_path / "tensorboard").glob("events.*")
    values = [value for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    assert values[0].tensor.string_val[2] == gif.read_bytes()
    assert values[1].tensor.string_val[0].endswith(b"b.mp4")
