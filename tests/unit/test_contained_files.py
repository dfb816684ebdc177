"""If these fail, a directory from somebody else shows files of this machine, or reading it never ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quintet import contained_files
from quintet.contained_files import check_entries, is_contained, lines_of, open_contained, read_contained
from quintet.errors import MachineError
from quintet.tracking.atomic_files import write_atomic
from quintet.tracking.run_directory import RunDirectory

pytestmark = pytest.mark.attack


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run directory beside a file that is none of it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/file").write_text("content")
    return tmp_path


def test_files_and_links_to_them_are_read(place: Path) -> None:
    (place / "run/link").symlink_to("file")
    assert read_contained(place / "run", "link") == b"content"
    check_entries(place / "run")


@pytest.mark.parametrize("target", ["../outside/file", "/dev/zero", "loop"])
def test_links_out_of_a_directory_are_refused(place: Path, target: str) -> None:
    (place / "run/loop").symlink_to(target)
    assert not is_contained(place / "run", place / "run/loop")
    for check in (lambda: open_contained(place / "run", "loop"), lambda: check_entries(place / "run")):
        with pytest.raises(MachineError, match="loop leads out of"):
            check()


def test_files_below_a_linked_directory_are_refused(place: Path) -> None:
    (place / "run/logs").symlink_to(place / "outside")
    with pytest.raises(MachineError, match="logs/file leads out of"):
        open_contained(place / "run", "logs/file")
    with pytest.raises(MachineError, match="logs leads out of"):
        RunDirectory(place / "run").create()


def test_a_pipe_is_not_opened(place: Path) -> None:
    """Opening it would block until somebody writes to it."""
    os.mkfifo(place / "run/pipe")
    for check in (lambda: open_contained(place / "run", "pipe"), lambda: check_entries(place / "run")):
        with pytest.raises(MachineError, match="pipe is not a file"):
            check()
    with pytest.raises(MachineError, match="run is not a file"):
        open_contained(place, "run")


def test_a_file_of_a_terabyte_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contained_files, "MAX_LINE_BYTES", 1000)
    os.truncate(place / "run/file", 1 << 40)
    with pytest.raises(MachineError, match="has more than 16 MiB"):
        read_contained(place / "run", "file")
    with open_contained(place / "run", "file") as file:
        assert [len(line) for line in lines_of(file)] == [1000]


@pytest.mark.parametrize("target", ["../outside/file", "../outside/new"])
def test_nothing_is_written_through_a_link(place: Path, target: str) -> None:
    run = RunDirectory(place / "run")
    for name in (".run.json.partial", ".lock"):
        (place / "run" / name).symlink_to(target)
    write_atomic(run.state, b"{}")
    assert (run.state.read_bytes(), run.state.is_symlink()) == (b"{}", False)
    with pytest.raises(MachineError), run.lock():
        pass
    assert (place / "outside/file").read_text() == "secret"
    assert not (place / "outside/new").exists()
