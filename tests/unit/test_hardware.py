"""If these fail, a command ends in a traceback where Quintet runs from a directory that is not installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from quintet import hardware
from quintet.registry import Entry


def test_a_source_tree_that_is_not_installed_names_the_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert hardware.extra_packages("ray") == []
    entry = Entry("lake", "lakes:build", help="", requires=("module_that_is_missing",), extra="ray")
    assert entry.guide == "pip install module_that_is_missing"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/user/run\n", {"user/run/memory.max": "max", "user/memory.max": "1000"}, 1000),
        ("0::/user/run\n", {"user/run/memory.max": "700", "user/memory.max": "1000"}, 700),
        ("4:memory:/docker\n1:cpu:/other\n", {"memory/docker/memory.limit_in_bytes": "900"}, 900),
        ("0::/\n", {}, None),
        ("0::/user\n", {"../memory.max": "500"}, None),
    ],
)
def test_memory_is_that_of_the_control_groups_of_a_container(
    membership: str, files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has less than its host; a plan for the host's memory would be killed in it."""
    monkeypatch.setattr(hardware, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "groups")
    without = hardware.memory_bytes()
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert hardware.memory_bytes() == (limit or without)


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/box\n", {"box/cpu.max": "50000 100000"}, 1),
        ("0::/box\n", {"box/cpu.max": "150000 100000"}, 2),
        ("0::/box\n", {"box/cpu.max": "max 100000"}, 8),
        ("0::/outer/inner\n", {"outer/cpu.max": "300000 100000", "outer/inner/cpu.max": "max 100000"}, 3),
        (
            "3:cpu,cpuacct:/box\n",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "250000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            "3:cpu,cpuacct:/box\n",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "-1", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
            8,
        ),
    ],
)
def test_cores_are_those_that_the_control_groups_of_a_container_allow(
    membership: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More threads than that wait for each other."""
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(hardware, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "groups")
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert hardware.cpu_cores() == cores
