"""If these fail, the reference pages say what isn't so any more."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cli.configuration import inspect_config, load_config
from quintet.config.plan.placement import check_placement

ROOT = Path(__file__).parents[2]


def test_the_reference_is_made_from_the_code_as_it_is() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/write_reference.py", "--check"], check=True, timeout=60)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def commands(page: Path) -> list[str]:
    return list(dict.fromkeys(re.findall(r"^\$ quintet (.+?)(?:\s+#.*)?$", page.read_text(), re.M)))


LONG = ("train", "sft")
"""Commands that tests/system runs; here they only have to begin."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    """One after another, in a directory that has the examples and nothing else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in commands(page):
        words = shlex.split(line)
        if words[0] in LONG:
            would_begin(words[1:])
            continue
        done = subprocess.run(
            [sys.executable, "-m", "quintet", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert done.stdout, line


def would_begin(words: list[str]) -> None:
    config = next((word for word in words if word.endswith((".yaml", ".sh"))), None)
    folder = next((path for path in (ROOT, ROOT / "examples/custom") if config and (path / config).exists()), ROOT)
    path, overrides = config and str(folder / config), [word for word in words if "=" in word]
    if "--ray" in words:
        check_placement(inspect_config(path, overrides, None, "refuse").composed)
    else:
        load_config(path, overrides, None, "refuse")
