"""If these fail, a run that names wandb hangs at a question, sends what nobody allowed, or loses its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import build_loggers

pytest.importorskip("wandb")


def test_without_an_api_key_wandb_logs_offline_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for resume_step in (None, 1):
        context = LoggerContext(tmp_path, name="lake", project="mine", resume_step=resume_step)
        loggers = build_loggers(["wandb"], context)
        loggers.log(1, 0.5, {"critic/score/mean": 0.25})
        loggers.close()
    runs = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    identity = (tmp_path / "wandb_id").read_text()
    assert runs
    assert {path.name for path in runs} == {f"run-{identity}.wandb"}
    assert b"critic/score/mean" in runs[0].read_bytes()
