"""If these fail, a machine without a compiler can't train, or a broken one ends runs instead of slowing them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.load_library() is None


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


@pytest.mark.skipif(build.find_compiler() is None or os.getuid() == 0, reason="root may write everywhere")
def test_a_home_that_cant_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "closed"))
    assert build.load_library() is not None


def test_a_cache_of_somebody_else_isnt_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there would be run."""
    (tmp_path / "cache" / "quintet").mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert build._cache_directory() != tmp_path / "cache" / "quintet"
