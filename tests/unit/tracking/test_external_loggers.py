"""If these fail, a tracker misses metrics, tables, images or videos, or sends what nobody allowed.

Each package writes to disk here: nobody is logged in.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet.envs.service.png import decode_png
from quintet.tracking.generations import LoggedGeneration
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import build_loggers
from quintet.tracking.progress import NullProgress
from quintet.tracking.video_files import open_video

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
GENERATIONS = [LoggedGeneration("where?", "there", 0.5, (PICTURE,)), LoggedGeneration("who?", "me", 1.0, ())]
METRIC = "critic/score/mean"
CREDENTIALS = (
    *("SWANLAB_API_KEY", "SWANLAB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
    *("CLEARML_API_ACCESS_KEY", "CLEARML_CONFIG_FILE", "CLEARML_OFFLINE_MODE", "TRACKIO_DIR", "CLEARML_CACHE_DIR"),
)


class Notes(NullProgress):
    """Progress that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def require(module: str, reason: str) -> None:
    """Skip the test without a package, which is not imported here: it reads the environment when it is."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: {reason}")


FACTS = {"policy": {"preset": "grid-1m"}, "seed": 7, "run": {"kind": "reinforcement learning", "commit": "abc"}}


def log_run(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log two processes of a run to `directory/files`, and return that directory."""
    for variable in CREDENTIALS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(directory / "home"))
    video = directory / "video.gif"
    with open_video(video, 10.0) as file:
        file.add(PICTURE)
    notes = Notes()
    for resume_step in (None, 1):
        files = directory / "files"
        context = LoggerContext(
            directory, "metrics.jsonl", resume_step, notes, "lake run", "mine", files, facts=FACTS, started=1000.0
        )
        loggers = build_loggers([name], context)
        step = (resume_step or 0) + 1
        loggers.log(step, 0.5 * step, {METRIC: 0.25 * step, "actor/entropy": float("nan")})
        if step == 1:
            assert loggers.log_generations(step, GENERATIONS)
            loggers.log_video(step, "validation/video", video)
        loggers.close()
    assert notes.notes == []
    return directory / "files"


def test_swanlab_keeps_metrics_tables_images_and_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("swanlab", "it requires protobuf < 7: pip install swanlab in another environment")
    files = log_run("swanlab", tmp_path, monkeypatch) / "swanlab"
    first, second = sorted(files.glob("run-*"), key=lambda path: path.stat().st_ctime)
    assert all(METRIC.encode() in next(run.glob("*.swanlab")).read_bytes() for run in (first, second))
    (table,) = first.glob("media/**/*.json")
    assert "there" in table.read_text()
    (image,) = first.glob("media/**/*.png")
    np.testing.assert_array_equal(decode_png(image.read_bytes()), PICTURE)
    (video,) = first.glob("media/**/*.gif")
    assert video.read_bytes() == (tmp_path / "video.gif").read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_its_run_with_metrics_artifacts_and_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("mlflow", "pip install 'quintet[mlflow]'")
    require("alembic", "pip install 'quintet[mlflow]'")
    files = log_run("mlflow", tmp_path, monkeypatch) / "mlflow"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{files}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("lake run", "FINISHED")
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, METRIC)]
    assert history == [(1, 0.25), (2, 0.5)]
    assert run.data.params == {"policy.preset": "grid-1m", "seed": "7"}
    assert (run.data.tags["kind"], run.data.tags["commit"]) == ("reinforcement learning", "abc")
    times = [each.timestamp for each in client.get_metric_history(run.info.run_id, METRIC)]
    assert (run.info.start_time, times) == (1_000_000, [1_000_500, 1_001_000])
    (rows,) = (json.loads(path.read_text()) for path in files.glob("artifacts/**/val_step1.json"))
    assert rows == [
        {"input": generation.input, "output": generation.output, "score": generation.score}
        for generation in GENERATIONS
    ]
    (image,) = files.glob("artifacts/**/val_step1/image_1_1.png")
    np.testing.assert_array_equal(decode_png(image.read_bytes()), PICTURE)
    assert list(files.glob("artifacts/**/validation/video/video.gif"))


def test_trackio_continues_its_run_with_metrics_tables_and_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("trackio", "it requires pillow < 13: pip install trackio in another environment")
    files = log_run("trackio", tmp_path, monkeypatch) / "trackio"
    from trackio.sqlite_storage import SQLiteStorage

    lines: list[dict[str, Any]] = SQLiteStorage.get_logs("mine", "lake run")
    assert [(line["step"], line[METRIC]) for line in lines if METRIC in line] == [(1, 0.25), (2, 0.5)]
    (table,) = (line["val/generations"] for line in lines if "val/generations" in line)
    assert [row["output"] for row in table["_value"]] == ["there", "me"]
    assert len(list(files.glob("media/**/*.png"))) == len(list(files.glob("media/**/*.gif"))) == 1


def test_clearml_keeps_metrics_tables_images_and_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("clearml", "pip install 'quintet[clearml]'")
    files = log_run("clearml", tmp_path, monkeypatch) / "clearml"
    text, names = "", []
    for session in files.glob("**/*.zip"):
        with zipfile.ZipFile(session) as archive:
            names += archive.namelist()
            text += archive.read("metrics.jsonl").decode()
            assert json.loads(archive.read("task.json"))["hyperparams"]["Configuration"]["seed"]["value"] == "7"
    assert '"score/mean"' in text
    assert "Validation generations" in text
    assert "there" in text
    assert [Path(name).suffix for name in names if "Validation" in name or "validation" in name]
