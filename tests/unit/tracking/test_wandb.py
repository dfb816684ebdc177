"""If these fail, a run that names wandb hangs at a question, sends what nobody allowed, or loses its steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quintet.envs.service.png import SIGNATURE, decode_png
from quintet.tracking.generations import LoggedGeneration
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import build_loggers

pytest.importorskip("wandb")


def test_without_an_api_key_wandb_logs_offline_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for resume_step in (None, 1):
        facts = {"policy": {"preset": "grid-1m"}, "run": {"kind": "reinforcement learning"}}
        context = LoggerContext(tmp_path, name="lake", project="mine", resume_step=resume_step, facts=facts)
        loggers = build_loggers(["wandb"], context)
        loggers.log(1, 0.5, {"critic/score/mean": 0.25})
        loggers.close()
    runs = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    identity = (tmp_path / "wandb_id").read_text()
    assert runs
    assert {path.name for path in runs} == {f"run-{identity}.wandb"}
    written = runs[0].read_bytes()
    assert b"critic/score/mean" in written
    assert b"grid-1m" in written
    assert b"reinforcement learning" in written


def test_generations_are_a_growing_table_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    picture = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    loggers = build_loggers(["wandb"], LoggerContext(tmp_path))
    for step, images in ((1, (picture,)), (2, ())):
        rows = [LoggedGeneration("where?", "there", 0.5, images), LoggedGeneration("who?", "me", 1.0, ())]
        loggers.log_generations(step, rows)
        loggers.log(step, 0.5, {"critic/score/mean": 0.25})
    loggers.close()
    # a table is an artifact, which waits here for `wandb sync`
    staged = {path.read_bytes() for path in (tmp_path / "home").glob("**/artifacts/staging/*")}
    tables = [json.loads(data) for data in staged if data.startswith(b"{")]
    assert sorted(len(table["data"]) for table in tables) == [1, 2]
    table = max(tables, key=lambda table: len(table["data"]))
    columns = ["input_1", "output_1", "score_1", "image_1_1", "input_2", "output_2", "score_2", "image_2_1"]
    assert table["columns"] == ["step", *columns]
    first, second = table["data"]
    assert first[:4] == [1, "where?", "there", 0.5]
    assert (first[4]["width"], first[4]["height"], first[8]) == (6, 4, None)
    assert second == [2, "where?", "there", 0.5, None, "who?", "me", 1.0, None]
    (file,) = {data for data in staged if data.startswith(SIGNATURE)}
    np.testing.assert_array_equal(decode_png(file), picture)
