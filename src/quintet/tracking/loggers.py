"""Local loggers (JSON lines, TensorBoard, console), and a thread for each other one, so that a service that fails or
hangs neither ends nor slows a run. Metrics without a definition in `metrics.yaml` are rejected."""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from quintet.contained_files import lines_of, open_contained
from quintet.envs.service.png import encode_png
from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.generations import TABLE, GenerationLogger, LoggedGeneration
from quintet.tracking.image_files import write_image
from quintet.tracking.logger import LOCAL_LOGGERS, LOGGERS, Logger, LoggerContext, VideoLogger
from quintet.tracking.metrics import describe
from quintet.tracking.run_facts import flat_facts

GENERATIONS_FILE = "generations.jsonl"


class JsonlLogger:
    """Logger of one JSON line per step: `step`, `time_seconds`, then the metrics by name. On disk before `log` returns.

    Values that are not finite are written as null, because JSON cannot express them. Generations are lines of
    `generations.jsonl`, with the names of PNG files in `images`.
    """

    def __init__(self, context: LoggerContext) -> None:
        self._directory = context.directory
        self._path = context.directory / context.filename
        with translate_os_errors(self._path):
            self._file = self._path.open("ab", buffering=0)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        line: dict[str, Any] = {"step": step, "time_seconds": round(time_seconds, 3)}
        line.update((name, _finite(metrics[name])) for name in sorted(metrics))
        with translate_os_errors(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            os.fsync(self._file.fileno())

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        lines = [
            {"step": step, "input": generation.input, "output": generation.output, "score": _finite(generation.score)}
            | {"images": [write_image(self._directory, image) for image in generation.images]}
            for generation in generations
        ]
        path = self._directory / GENERATIONS_FILE
        with translate_os_errors(path), path.open("ab") as file:
            file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode())

    def close(self) -> None:
        self._file.close()


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


class TensorboardLogger:
    """Logger of one scalar per metric, written with TensorBoard's event writer.

    On resume a session mark tells TensorBoard to hide later events of the interrupted run. The mark covers a whole
    directory, so metrics files other than `metrics.jsonl` get their own directory.
    """

    def __init__(self, context: LoggerContext) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        stem = Path(context.filename).stem
        self._path, self._key = context.files / "tensorboard" / ("" if stem == "metrics" else stem), context.files_key
        with translate_os_errors(self._path, self._key):
            self._path.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._path))
        if context.resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=context.resume_step + 1, session_log=start)
        if context.facts:
            from tensorboard.compat.proto.summary_pb2 import Summary

            lines = (f"| {name} | {_cell(value)} |" for name, value in flat_facts(context.facts))
            table = _text_value("configuration", "\n".join(["| key | value |", "| --- | --- |", *lines]))
            self._add(step=context.resume_step or 0, summary=Summary(value=[table]))

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=metrics[name]) for name in sorted(metrics)]
        self._add(step=step, summary=Summary(value=values))
        with translate_os_errors(self._path, self._key):
            self._writer.flush()

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        for row, generation in enumerate(generations, 1):
            text = f"**score {generation.score:g}**\n\n{_quoted(generation.input)}\n\n{_quoted(generation.output)}"
            tag = f"{TABLE}/{row}"
            values.append(_text_value(tag, text))
            for number, image in enumerate(generation.images, 1):
                height, width, channels = image.shape
                png = Summary.Image(
                    height=height, width=width, colorspace=channels, encoded_image_string=encode_png(image)
                )
                values.append(Summary.Value(tag=f"{tag}/image_{number}", image=png))
        self._add(step=step, summary=Summary(value=values))

    def log_video(self, step: int, name: str, path: Path) -> None:
        """Show a GIF; TensorBoard plays no MP4, of which it shows the path."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if path.suffix == ".gif":
            from PIL import Image

            with Image.open(path) as gif:
                width, height = gif.size
            with translate_os_errors(path):
                data = path.read_bytes()
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
            value = Summary.Value(tag=name, image=image)
        else:
            value = _text_value(name, str(path.resolve()))
        self._add(step=step, summary=Summary(value=[value]))

    def close(self) -> None:
        with translate_os_errors(self._path, self._key):
            self._writer.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        with translate_os_errors(self._path, self._key):
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), **fields))


def _quoted(text: str) -> str:
    """Return text as a code block of Markdown, in which it is not interpreted."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cell(value: object) -> str:
    """Return a value as the cell of a Markdown table: of one line."""
    return str(value).replace("|", "\\|").replace("\n", "\\n")


def _text_value(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.text.metadata import create_summary_metadata

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode(errors="backslashreplace")], tensor_shape=shape)
    return Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=tensor)


class FileLogger:
    """Logger of one JSON line per step, `{"step": …, "data": {…}}`, in `<project>/<run name>.jsonl`: verl's `file`."""

    def __init__(self, context: LoggerContext) -> None:
        folder, name = context.files / _file_name(context.project), f"{_file_name(context.name)}.jsonl"
        self._path, self._key = folder / name, context.files_key
        with translate_os_errors(self._path, self._key):
            folder.mkdir(parents=True, exist_ok=True)
        truncate(folder, -1 if context.resume_step is None else context.resume_step, name)
        with translate_os_errors(self._path, self._key):
            self._file = self._path.open("ab", buffering=0)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        data = {name: _finite(metrics[name]) for name in sorted(metrics)}
        with translate_os_errors(self._path, self._key):
            self._file.write(json.dumps({"step": step, "data": data}, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _file_name(text: str) -> str:
    """Return text as the name of a file."""
    return text.replace("/", "_").lstrip(".") or "_"


class ConsoleLogger:
    """Logger that shows key metrics next to the progress bar."""

    def __init__(self, context: LoggerContext) -> None:
        self._reporter = context.reporter

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._reporter.report(step, metrics)

    def close(self) -> None:
        pass


class MetricLogger:
    """Logger that forwards defined metrics to several loggers."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        """Log to every logger.

        Raises:
            ValueError: A metric is not defined; nothing is written.
        """
        for name in metrics:
            try:
                describe(name)
            except KeyError as error:
                raise ValueError(f"{error.args[0]} Define it with quintet.tracking.metrics.define") from None
        for logger in self._loggers:
            logger.log(step, time_seconds, metrics)

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> bool:
        """Send generations to each logger that shows them; return whether there is one."""
        loggers = [logger for logger in self._loggers if _supports(logger, "log_generations")]
        for logger in loggers:
            cast(GenerationLogger, logger).log_generations(step, generations)
        return bool(loggers)

    def log_video(self, step: int, name: str, path: Path) -> None:
        """Send a video file to each logger that shows videos."""
        for logger in self._loggers:
            if _supports(logger, "log_video"):
                cast(VideoLogger, logger).log_video(step, name, path)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def _supports(logger: Logger, method: str) -> bool:
    return logger.supports(method) if isinstance(logger, BackgroundLogger) else hasattr(logger, method)


def build_loggers(names: Iterable[str], context: LoggerContext) -> MetricLogger:
    """Build the named loggers; those that are not local run in the background.

    Raises:
        ConfigError: A name is unknown or its package is not installed.
        MachineError: The run directory cannot be written.
    """
    factories = [(name, LOGGERS.get(name).load()) for name in names]
    return MetricLogger(
        factory(context) if name in LOCAL_LOGGERS else BackgroundLogger(name, factory, context)
        for name, factory in factories
    )


def parse_metrics(raw: bytes) -> dict[str, Any] | None:
    """Return a line of a metrics file; None if it is incomplete or damaged."""
    line = _parse_logged(raw)
    numbers = () if line is None else (value for value in line.values() if value is not None)
    are_finite = all(isinstance(value, int | float) and abs(value) <= sys.float_info.max for value in numbers)
    return line if are_finite else None


def _parse_logged(raw: bytes) -> dict[str, Any] | None:
    """Return a line of a logger's file, which has a step; None if it is incomplete or damaged."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def truncate(directory: Path, step: int, filename: str = "metrics.jsonl") -> None:
    """Remove lines after `step` and an incomplete last line from a metrics file.

    Remaining lines are unchanged byte for byte. A step must be logged before its checkpoint is saved, otherwise its
    line may be missing after a resume.

    Raises:
        MachineError: The file cannot be read or rewritten.
    """
    path = directory / filename
    if not path.exists():
        return
    with translate_os_errors(path), open_contained(path.parent, path.name) as file:
        parsed = ((raw, _parse_logged(raw)) for raw in lines_of(file))
        remaining = b"".join(raw for raw, line in parsed if line is not None and line["step"] <= step)
    write_atomic(path, remaining)


MAX_WAITING_RECORDS = 256
"""Records that wait for a logger; further ones are dropped."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for a logger."""


class BackgroundLogger:
    """Logger whose records are passed on by a thread. Its first problem of each kind is reported."""

    def __init__(self, name: str, factory: Callable[[LoggerContext], Logger], context: LoggerContext) -> None:
        """Start the thread, which builds the logger.

        Args:
            name: Name of the logger in messages.
            factory: Builds the logger; if that raises, records are discarded.
            context: Argument of `factory`, whose reporter shows problems.
        """
        self._name, self._factory, self._context = name, factory, context
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MAX_WAITING_RECORDS)
        """Methods of the logger and their arguments."""
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def supports(self, method: str) -> bool:
        """Return whether the logger has a method, such as `log_generations`."""
        return hasattr(self._factory, method)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._submit("log", step, time_seconds, dict(metrics))

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        self._submit("log_generations", step, generations)

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._submit("log_video", step, name, path)

    def close(self) -> None:
        """Wait until all records are passed on, at most `CLOSE_SECONDS`."""
        try:
            self._queue.put(("close", ()), timeout=CLOSE_SECONDS if self._thread.is_alive() else 0)
            self._thread.join(CLOSE_SECONDS)
        except queue.Full:
            pass
        if self._thread.is_alive():
            missing = f", {self._queue.qsize()} records are missing" if self._queue.qsize() else ""
            self._report("end", f"does not end within {CLOSE_SECONDS:g} s{missing}")

    def _submit(self, method: str, *arguments: Any) -> None:
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self._report("full", f"{MAX_WAITING_RECORDS} records wait for it; further ones are dropped")

    def _run(self) -> None:
        logger = self._call(lambda: self._factory(self._context))
        method = ""
        while method != "close":
            method, arguments = self._queue.get()
            if logger is not None:
                self._call(getattr(logger, method), *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call, None if it raises."""
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a logger's library raises must not end a run
            self._report("error", f"{type(error).__name__}: {error}")
            return None

    def _report(self, kind: str, problem: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._context.reporter.note(f"logger {self._name}: {problem}")
