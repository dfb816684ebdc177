"""If these fail, the reference pages say what isn't so any more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cli.configuration import compose

ROOT = Path(__file__).parents[2]


def test_the_reference_is_made_from_the_code_as_it_is() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/write_reference.py", "--check"], check=True, timeout=60)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_example_loads(path: Path) -> None:
    compose(str(path), [], None, "refuse")


def test_links_and_pictures_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_commands_of_the_readme_are_commands() -> None:
    """Each `quintet …` line is parsed and its configuration composed; `train` itself runs in tests/system."""
    text = (ROOT / "README.md").read_text()
    for line in re.findall(r"^\$ quintet (.+?)(?:\s+#.*)?$", text, re.M):
        command, *rest = line.split()
        assert command in {"train", "plan", "explain", "list"}, line
        if command in {"train", "plan"}:
            config = next((word for word in rest if "=" not in word), None)
            compose(config and str(ROOT / config), [word for word in rest if "=" in word], None, "refuse")
