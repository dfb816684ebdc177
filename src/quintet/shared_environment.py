"""Whether a package that is not installed can share the environment with those that are."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from quintet import hardware
from quintet.package_files import read_yaml


def installation(packages: Collection[str]) -> str:
    """Return the command that installs packages here, or how to make a separate environment with Quintet for them if
    they contradict a package that is installed. Packages are written as for pip: `swanlab<0.11,>=0.10`."""
    conflicts = [conflict for package in packages for conflict in find_conflicts(package)]
    if not conflicts:
        return hardware.install_command(packages)
    return f"a separate environment, because {', '.join(conflicts)}: {_recipe(packages)}"


def find_conflicts(package: str) -> list[str]:
    """Return recorded requirements of a package that installed packages do not meet, such as `swanlab 0.10.3 needs
    protobuf<7,>=6.31.1 (installed: 7.36.2)`."""
    from packaging.requirements import Requirement

    name = Requirement(package).name
    release = _recorded_requirements().get(name)
    if release is None:
        return []
    unmet = list(compare([line for line in release["requires"] if hardware.package_version(Requirement(line).name)]))
    return [f"{name} {release['version']} needs {', '.join(unmet)}"] if unmet else []


def compare(lines: Collection[str]) -> Iterator[str]:
    """Yield the requirements that are not met, such as `torch==2.14.1 (installed: 2.13.0)`."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = hardware.package_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier} (installed: {version or 'none'})"


@cache
def _recorded_requirements() -> dict[str, Any]:
    recorded: dict[str, Any] = read_yaml(__file__)
    return recorded


def _recipe(packages: Collection[str]) -> str:
    """Return the commands that make an environment with Quintet and the packages, for which pip finds versions that
    suit both."""
    from packaging.requirements import Requirement

    folder = f".venv-{Requirement(next(iter(packages))).name}"
    install = hardware.install_command([_source(), *packages])
    return f"python3 -m venv {folder} && {folder}/bin/{install}"


def _source() -> str:
    """Return what pip installed Quintet from: a directory or a URL; its name if pip did not record it."""
    try:
        recorded = importlib.metadata.distribution("quintet").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        recorded = None
    url = str(json.loads(recorded)["url"]) if recorded else "quintet"
    return url2pathname(urlsplit(url).path) if url.startswith("file:") else url
