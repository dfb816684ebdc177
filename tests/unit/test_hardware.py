"""If these fail, a command ends in a traceback where Quintet runs from a directory that is not installed."""

from __future__ import annotations

import importlib.metadata

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
