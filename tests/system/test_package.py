"""If these fail, the package lacks files, or does not train where it is installed without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.system.conftest import SMALL

ROOT = Path(__file__).parents[2]
DATA = {".yaml", ".txt", ".cpp", ".hpp", ".js", ".css", ".html", ".svg", ".typed"}


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True, timeout=120)
    pip("wheel", "--no-deps", "--wheel-dir", folder, *folder.glob("*.tar.gz"))
    return next(folder.glob("*.whl"))


def test_every_file_that_the_code_reads_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [Path(name).relative_to("src") for name in tracked.split() if (ROOT / name).exists()]
    assert len(files) > 500
    assert {str(file) for file in files if file.suffix in DATA | {".py"}} <= names


def test_the_wheel_has_the_examples(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "examples"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert {f"quintet/{name}" for name in tracked.split()} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_an_installed_wheel_trains_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", site, wheel)
    (tmp_path / "small.yaml").write_text(SMALL)
    without_compiler = {"CXX": "/nonexistent", "PATH": str(Path(sys.executable).parent)}
    environment = os.environ | {"PYTHONPATH": str(site), **without_compiler}
    where = [sys.executable, "-c", "import quintet; print(quintet.__file__)"]
    shown = subprocess.run(where, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert Path(shown.strip()).is_relative_to(site)
    command = [sys.executable, "-m", "quintet", "train", "small.yaml", "training.steps=1"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=240)
    assert (tmp_path / "runs/small/report.html").exists()
    for words in (["plan", "examples/native/sokoban.yaml"], ["diagnose", "examples/native/stuck_run"]):
        command = [sys.executable, "-m", "quintet", *words]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60)
