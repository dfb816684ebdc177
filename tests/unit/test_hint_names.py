"""If these fail, a hint names a package or a script that does not exist. Tests of each package follow the hints."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OWN_ENVIRONMENT = {"vllm": "docs/vllm.md", "sglang": "docs/sglang.md", "sglang-kernel": "docs/sglang.md"}
"""Engines that need other versions of torch than the extras, and the page that says how they are installed."""
OPTIONAL = {
    "liger-kernel": "src/quintet/policies/liger.py",
    "alfworld": "src/quintet/envs/alfworld_env.py",
    "ai2thor": "src/quintet/envs/navigation/thor.py",
    "mani_skill": "src/quintet/envs/primitive_skill/maniskill.py",
}
"""Packages that are used if they are there, and the module that imports them."""


def texts() -> Iterator[str]:
    """All texts of the source that contain a command."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_package_that_is_to_be_installed_is_an_extra_or_has_a_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {Requirement(line).name for line in (*extras, *project["dependencies"])}
    named = {name for text in texts() for name in re.findall(r"pip install '?([a-z][\w-]+)", text)}
    assert named
    assert named <= names | OWN_ENVIRONMENT.keys() | OPTIONAL.keys()
    for package, page in (OWN_ENVIRONMENT | OPTIONAL).items():
        assert package.partition("-")[0] in (ROOT / page).read_text().lower()


def test_every_script_and_page_in_a_message_exists() -> None:
    named = {name for text in texts() for name in re.findall(r"\b(?:docs|scripts)/[\w-]+\.\w+", text)}
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
