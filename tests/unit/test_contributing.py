"""If these fail, the table of `CONTRIBUTING.md` sends a newcomer to the wrong file."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<question>[^|]+) \| `(?P<file>src/[^`]+)` \| `(?P<command>[^`]+)` \|$", re.MULTILINE)
ROWS = [row.groupdict() for row in ROW.finditer((ROOT / "CONTRIBUTING.md").read_text())]


def test_the_table_has_fifteen_questions() -> None:
    assert len(ROWS) == 15


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["question"])
def test_each_command_finds_the_file(row: dict[str, str]) -> None:
    result = subprocess.run(shlex.split(row["command"]), cwd=ROOT, capture_output=True, text=True, timeout=60)
    found = {line.partition(":")[0] for line in result.stdout.splitlines()}
    assert row["file"] in found
    assert len(found) <= 5
