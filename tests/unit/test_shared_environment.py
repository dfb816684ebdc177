"""If these fail, people break their environment by installing what Quintet recommends, or search for a version of a
package that cannot exist beside the others."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from quintet import hardware, shared_environment
from quintet.package_files import read_yaml
from quintet.registry import Entry
from quintet.tracking.logger import LOGGERS

RECORDED: dict[str, Any] = read_yaml(shared_environment.__file__)
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions = {"protobuf": "7.36.2", "pillow": "13.0.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
    monkeypatch.setattr(hardware, "package_version", versions.get)
    monkeypatch.setattr(shared_environment, "_source", lambda: "/src/my quintet")
    return versions


def test_a_package_that_contradicts_an_installed_one_is_not_recommended_for_this_environment(
    installed: dict[str, str],
) -> None:
    assert shared_environment.installation(["swanlab<0.11,>=0.10"]) == (
        "a separate environment, because swanlab 0.10.3 needs protobuf<7,>=6.31.1 (installed: 7.36.2): python3 -m venv "
        ".venv-swanlab && .venv-swanlab/bin/pip install '/src/my quintet' 'swanlab<0.11,>=0.10'"
    )
    assert shared_environment.find_conflicts("trackio<1,>=0.43") == [
        "trackio 0.43.0 needs pillow<13.0.0 (installed: 13.0.0)"
    ]
    assert shared_environment.find_conflicts("sglang==0.5.23") == [
        "sglang 0.5.23 needs torch==2.14.1 (installed: 2.13.0+cpu)"
    ]


def test_a_package_without_contradiction_is_recommended_for_this_environment(installed: dict[str, str]) -> None:
    """A local version such as +cpu meets a requirement of the release, and a package that is not installed is free."""
    assert shared_environment.installation(["vllm"]) == "pip install vllm"
    assert shared_environment.installation(["wandb>=0.19", "ray<3"]) == "pip install 'wandb>=0.19' 'ray<3'"
    installed["protobuf"] = "6.33.0"
    assert shared_environment.installation(["swanlab<0.11"]) == "pip install 'swanlab<0.11'"
    installed["transformers"] = "5.24.0"
    assert "vllm 0.32.0 needs transformers<5.20.0,>=5.16.1 (installed: 5.24.0)" in shared_environment.installation(
        ["vllm"]
    )


def test_the_error_of_a_run_recommends_the_separate_environment_too(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "is_installed", lambda name: False)
    monkeypatch.setattr(hardware, "extra_packages", {"trackio": ["trackio<1,>=0.43"], "wandb": ["wandb"]}.get)
    assert LOGGERS.get("trackio").guide.startswith("a separate environment, because trackio 0.43.0 needs pillow<13.0.0")
    assert LOGGERS.get("wandb").guide == "pip install wandb"
    entry: Entry[Any] = Entry("other", "other:open", "…", requires=("trackio",), how="ask the vendor")
    assert entry.guide == "ask the vendor"


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        ('{"url": "file:///home/me/my%20quintet", "dir_info": {}}', "/home/me/my quintet"),
        (
            '{"url": "https://example.org/quintet-0.1.0-py3-none-any.whl"}',
            "https://example.org/quintet-0.1.0-py3-none-any.whl",
        ),
        (None, "quintet"),
    ],
)
def test_a_separate_environment_gets_quintet_from_where_this_one_came(
    monkeypatch: pytest.MonkeyPatch, recorded: str | None, source: str
) -> None:
    """No package index has Quintet."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return recorded

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert shared_environment._source() == source


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_requirements_are_those_of_a_release_that_this_project_allows(name: str) -> None:
    lines = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    bounds = [requirement.specifier for requirement in map(Requirement, lines) if requirement.name == name]
    assert all(bound.contains(RECORDED[name]["version"]) for bound in bounds)
    assert all(Requirement(line).specifier for line in RECORDED[name]["requires"])
    if hardware.package_version(name) != RECORDED[name]["version"]:
        return
    lines = [line for line in importlib.metadata.requires(name) or () if "extra ==" not in line]
    actual = {requirement.name: requirement for requirement in map(Requirement, lines)}
    for requirement in map(Requirement, RECORDED[name]["requires"]):
        assert set(requirement.specifier) <= set(actual[requirement.name].specifier)
