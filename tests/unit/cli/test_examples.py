"""If these fail, the README's lines with examples do not work for who installs the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quintet.cli.example_files import example_lines, examples_directory, with_installed_examples
from quintet.cli.main import app

ROOT = Path(__file__).parents[3]
PARTS = ("custom/*.py", "*/env_config.yaml", "rlinf/env/*", "native/stuck_run/*")
"""Files that belong to an example."""


def test_every_example_has_a_line() -> None:
    directory = ROOT / "examples"
    files = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    examples = {str(path) for path in files if not any(path.match(pattern) for pattern in PARTS)}
    assert {name for name in examples if "stuck_run" not in name} | {"native/stuck_run"} == set(example_lines())


def test_examples_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_installed_examples("examples/native/arm.yaml") == str(examples_directory() / "native/arm.yaml")
    answers = f"evaluation.path={examples_directory()}/native/stored_answers.jsonl"
    assert with_installed_examples("evaluation.path=examples/native/stored_answers.jsonl") == answers
    assert with_installed_examples("examples/mine.yaml") == "examples/mine.yaml"
    (tmp_path / "examples/native").mkdir(parents=True)
    (tmp_path / "examples/native/arm.yaml").write_text("name: mine")
    assert with_installed_examples("examples/native/arm.yaml") == "examples/native/arm.yaml"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("custom/square.yaml", {"square.yaml", "square.py"}),
        ("vagen/svg/run.sh", {"run.sh", "env_config.yaml"}),
        ("examples/rlinf/libero_10_eval.yaml", {"libero_10_eval.yaml", "env"}),
        ("native/stuck_run", {"stuck_run"}),
    ],
)
def test_an_example_is_copied_with_the_files_it_needs(tmp_path: Path, name: str, files: set[str]) -> None:
    done = CliRunner().invoke(app, ["examples", "copy", name, str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == files
    again = CliRunner().invoke(app, ["examples", "copy", name, str(tmp_path / "new")])
    assert "exists" in str(again.exception)


@pytest.mark.parametrize("name", ["custom/square.yaml", "native/stuck_run"])
@pytest.mark.parametrize("linked", ["missing", "directory"])
def test_an_example_is_not_written_through_a_link(tmp_path: Path, name: str, linked: str) -> None:
    """A link to a file that does not exist would create it; one to a directory would get the files."""
    outside, copies = tmp_path / "outside", tmp_path / "copies"
    copies.mkdir()
    if linked == "directory":
        outside.mkdir()
    (copies / Path(name).name).symlink_to(outside)
    done = CliRunner().invoke(app, ["examples", "copy", name, str(copies)])
    assert done.exit_code
    assert f"{copies / Path(name).name} exists" in str(done.exception)
    assert list(copies.iterdir()) == [copies / Path(name).name]
    assert not outside.exists() or not list(outside.iterdir())
