"""If this fails, simulators run behind a server with other versions of packages than it is tested with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_the_packages_of_the_server_have_the_versions_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    requirements = {*project["dependencies"], *project["optional-dependencies"]["service"]}
    script = (REPOSITORY / "scripts/install_simulator.sh").read_text()
    block = re.search(r"^server=\((.*?)\)$", script, re.DOTALL | re.MULTILINE)
    assert block is not None
    installed = set(re.findall(r'"([^"]+)"', block[1]))
    assert installed
    assert installed <= requirements
