"""A working directory with a model and data."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
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


def fill(directory: Path, model: Path) -> None:
    """Put a model and data into a directory."""
    (directory / "model").symlink_to(model)
    (directory / "rows.jsonl").write_text(ROWS)
    (directory / "long.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ? " * 20}) + "\n")
    (directory / "users.jinja").write_text(FOR_USERS)
    (directory / "sets.py").write_text(DATASETS)
    for name in ("data", "odd[1]"):
        (directory / name).mkdir()
        (directory / name / "rows.jsonl").write_text(ROWS)
    parquet.write_table(pyarrow.table({"prompt": ["1 + 1 = ?"]}), directory / "data/train.parquet")
