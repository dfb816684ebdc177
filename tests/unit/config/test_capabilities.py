"""If these fail, the documentation names a missing capability that no setting waits for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quintet
from quintet.config.capabilities import Capability

SOURCE = Path(quintet.__file__).parent
PYTHON = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
KEY_FILES = "\n".join(path.read_text() for path in SOURCE.glob("config/dialects/*/keys/*.yaml"))


@pytest.mark.parametrize("capability", Capability, ids=lambda capability: capability.name)
def test_each_capability_is_required_by_a_key_a_value_or_a_check(capability: Capability) -> None:
    in_checks = re.search(rf"Capability\.{capability.name}\b", PYTHON)
    in_keys = re.search(rf"(requires|capability): {capability.name.lower()}\b", KEY_FILES)
    assert in_checks or in_keys
