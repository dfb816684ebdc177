"""If these fail, a machine without a compiler can't train, or a broken one ends runs instead of slowing them."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.cache_directory import private_directories
from quintet.kernels import build


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.KERNELS_VARIABLE, raising=False)
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


def program(path: Path, code: str) -> str:
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
def test_it_is_compiled_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.load_library() is not None
    (made,) = (tmp_path / "cache" / "quintet").iterdir()
    build.load_library.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.load_library() is not None
    assert made.suffix == ".so"


def test_they_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.KERNELS_VARIABLE, "0")
    assert build.load_library() is None


def test_a_compiler_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", program(tmp_path / "broken", "echo this one is broken >&2; exit 1"))
    assert build.load_library() is None
    assert "this one is broken" in caplog.text


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
def test_flags_that_a_compiler_doesnt_know_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f'case "$*" in *march=native*) exit 1;; esac; exec {build.find_compiler()} "$@"'
    monkeypatch.setenv("CXX", program(tmp_path / "plain", code))
    assert build.load_library() is not None


needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")


@needs_compiler
@pytest.mark.parametrize("problem", ["full", "noexec"])
def test_a_cache_on_a_bad_file_system_is_replaced_by_a_temporary_one_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bad = tmp_path / "cache/quintet"
    compile_library, load = build._compile, ctypes.CDLL

    def compiled(command: str, source: Path, path: Path) -> None:
        if problem == "full" and path.parent == bad:
            raise OSError(errno.ENOSPC, "No space left on device")
        compile_library(command, source, path)

    def loaded(path: str) -> ctypes.CDLL:
        if Path(path).parent == bad:
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(build, "_compile", compiled)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    assert build.load_library() is not None
    (directory,) = tmp_path.glob("quintet-*")
    assert [path.suffix for path in directory.iterdir()] == [".so"]
    before = directory.stat().st_mtime_ns
    build.load_library.cache_clear()
    assert build.load_library() is not None
    assert directory.stat().st_mtime_ns == before, "compiled again"


@needs_compiler
def test_without_a_home_the_kernels_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert build.load_library() is not None
    assert [path.name for path in tmp_path.glob("quintet-*")] == [f"quintet-{os.getuid()}"]


def test_a_cache_that_others_can_write_isnt_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there would be run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = tmp_path / "cache/quintet"
    cache.mkdir(parents=True)
    assert cache in private_directories()
    cache.chmod(0o777)
    assert cache not in private_directories()
    cache.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert cache not in private_directories()


def test_without_a_compiler_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.load_library() is None
    assert "no C++ compiler" in caplog.text
