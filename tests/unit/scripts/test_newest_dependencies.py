"""If these fail, versions that `pyproject.toml` allows are never tried, and users meet the first incompatible one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).parents[3]
SCRIPT = (REPOSITORY / "scripts/newest_dependencies.sh").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("embodied", "service")
DECLARED = [
    Requirement(line)
    for line in (
        *PROJECT["dependencies"],
        *(line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]),
    )
]


def printed(choice: str) -> dict[str, Requirement]:
    command = ["bash", "scripts/newest_dependencies.sh", "requirements", choice]
    environment = {**os.environ, "PYTHON": sys.executable}
    output = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout
    return {requirement.name: requirement for requirement in map(Requirement, output.splitlines())}


@pytest.mark.parametrize("choice", ["newest", "lowest"])
def test_every_package_of_the_project_but_torch_is_resolved(choice: str) -> None:
    assert set(printed(choice)) == {requirement.name for requirement in DECLARED} - {"torch"}


def test_the_newest_versions_are_within_the_bounds_of_the_project() -> None:
    newest = printed("newest")
    assert all(newest[requirement.name] == requirement for requirement in DECLARED if requirement.name != "torch")


def test_the_lowest_versions_are_the_lower_bounds_of_the_project() -> None:
    lowest = {name: str(requirement.specifier) for name, requirement in printed("lowest").items()}
    assert lowest["transformers"] == "==5.16.1"
    assert lowest["safetensors"] == "==0.8"
    for requirement in DECLARED:
        if requirement.name != "torch":
            version = Version(lowest[requirement.name].removeprefix("=="))
            assert requirement.specifier.contains(version)
            assert f">={version}" in map(str, requirement.specifier)


def test_the_chosen_tests_exist() -> None:
    """pytest fails for the whole environment if one of its arguments names nothing."""
    block = re.search(r"^tests=\((.*?)^\)$", SCRIPT, re.DOTALL | re.MULTILINE)
    assert block is not None
    chosen = block[1].split()
    assert chosen
    for test in chosen:
        path, _, name = test.partition("::")
        assert (REPOSITORY / path).exists()
        assert not name or f"def {name}(" in (REPOSITORY / path).read_text(encoding="utf-8")
