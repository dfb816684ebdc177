"""If these fail, the shell completes nothing, or keys that do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cli.completion import complete_config, complete_key
from quintet.config.schema import is_key


def test_keys_are_completed_section_by_section() -> None:
    assert complete_key("training.ste") == ["training.steps="]
    assert "training." in complete_key("tr")
    assert "name=" in complete_key("na")
    assert complete_key("nothing.like.this") == []
    assert all(is_key(key.removesuffix("=")) for key in complete_key("validation.") if key.endswith("="))


def test_files_of_configurations_are_completed_with_their_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs_of_today").mkdir()
    for name in ("run.yaml", "run.sh", "run.py", "runs_of_today/first.yaml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert complete_config("run") == ["run.sh", "run.yaml", "runs_of_today/"]
    assert complete_config("runs_of_today/") == ["runs_of_today/first.yaml"]
    assert complete_config("") == ["run.sh", "run.yaml", "runs_of_today/"]


def test_bash_gets_the_completions_of_the_command() -> None:
    environment = os.environ | {
        "_QUINTET_COMPLETE": "complete_bash",
        "COMP_WORDS": "quintet train x.yaml training.ste",
        "COMP_CWORD": "3",
    }
    script = "import sys; sys.argv = ['quintet']; from quintet.cli.main import app; app(prog_name='quintet')"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["training.steps="]
