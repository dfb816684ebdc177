"""If these fail, `quintet doctor` calls programs confined that are not."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import pytest

from quintet.sandbox import landlock, protections, seccomp


def active(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, object], user: int = 1000) -> dict[str, bool]:
    monkeypatch.setattr(protections, "_probe", lambda: found)
    monkeypatch.setattr(os, "getuid", lambda: user)
    return {each.name: each.active for each in protections.protections()}


@pytest.mark.skipif(sys.platform != "linux", reason="programs run on Linux only")
def test_protections_of_this_machine_are_those_that_a_program_finds() -> None:
    actual = {each.name: each.active for each in protections.protections()}
    assert actual["system calls"]
    assert actual["files"] is (landlock.kernel_version() >= 1)
    assert actual["memory"] is seccomp.is_memory_hidden()


def test_what_a_program_can_do_is_not_called_prevented(monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"socket": False, "file": False, "user": 0, "threads": 256}
    assert not any(active(monkeypatch, works, user=0)[name] for name in ("system calls", "files", "threads"))
    without_landlock = {"socket": True, "file": False, "user": 1000, "threads": 600}
    assert active(monkeypatch, without_landlock) == active(monkeypatch, without_landlock) | {
        "system calls": True,
        "files": False,
        "threads": True,
    }


def test_where_no_program_runs_nothing_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "is_memory_hidden", lambda: False)
    assert active(monkeypatch, {}) == {"system calls": False, "memory": False}
