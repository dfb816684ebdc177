"""If these fail, a worker process imports other modules than the run that started it, and dies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quintet.sandbox.sandboxed_process import ForkServer

WORKER = """
import json
import known, pydantic

def work(connection, setup):
    connection.sendall(json.dumps([known.PLACE, setup]).encode())
"""


def test_it_imports_what_the_run_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # some libraries put copies of others' modules at the end of the search path while a run goes on
    for place in ("first", "late"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "known.py").write_text(f"PLACE = {place!r}")
    (tmp_path / "first" / "worker_of_a_test.py").write_text(WORKER)
    (tmp_path / "late" / "pydantic.py").write_text("raise ImportError('not the one that the run uses')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *sys.path, str(tmp_path / "late")])
    server = ForkServer("worker_of_a_test:work")
    try:
        with server.fork(1, {"of": "it"}) as connection:
            connection.settimeout(20)
            assert json.loads(connection.recv(1000)) == ["first", {"of": "it"}]
    finally:
        server.close()
