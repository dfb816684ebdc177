"""A working directory with a model and data."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

ROWS = '{"prompt": "1 + 1 = ?"}\n' * 6
FOR_USERS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
"""A chat template that refuses results of tools."""
DATASETS = """
class Texts(list):
    def __init__(self, files, tokenizer, config):
        super().__init__(["1 + 1 = ?"])

class Mappings(list):
    def __init__(self, files, tokenizer, config):
        super().__init__([{"prompt": "1 + 1 = ?"}])
"""


@pytest.fixture
def data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(policy_directory)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ? " * 20}) + "\n")
    (tmp_path / "users.jinja").write_text(FOR_USERS)
    (tmp_path / "sets.py").write_text(DATASETS)
    for name in ("data", "odd[1]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(ROWS)
    parquet.write_table(pyarrow.table({"prompt": ["1 + 1 = ?"]}), tmp_path / "data/train.parquet")
    return tmp_path
