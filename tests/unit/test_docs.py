"""If these fail, the reference pages say what isn't so any more."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cli.configuration import compose

ROOT = Path(__file__).parents[2]


def test_the_reference_is_made_from_the_code_as_it_is() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/write_reference.py", "--check"], check=True, timeout=60)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def commands() -> list[str]:
    found = (re.findall(r"^\$ quintet (.+?)(?:\s+#.*)?$", page.read_text(), re.M) for page in pages())
    return list(dict.fromkeys(line for lines in found for line in lines))


@pytest.mark.parametrize("line", [line for line in commands() if not line.startswith("train")])
def test_a_command_of_the_docs_does_what_it_says(line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quintet", *shlex.split(line)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("train")])
def test_a_training_command_of_the_docs_would_begin(line: str) -> None:
    """`train` itself runs in tests/system."""
    words = shlex.split(line)[1:]
    config = next((word for word in words if "=" not in word), None)
    compose(config and str(ROOT / config), [word for word in words if "=" in word], None, "refuse")
