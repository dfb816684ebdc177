"""Tables of the converters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import capabilities_by_pattern, tables
from quintet.config.dialects.registry import DIALECTS

PACKAGES = Path(__file__).parents[4] / "src" / "quintet" / "config" / "dialects"


@pytest.mark.parametrize("framework", DIALECTS)
def test_every_table_is_read_and_every_table_that_is_read_exists(framework: str) -> None:
    text = "".join(path.read_text() for path in (PACKAGES / framework).glob("*.py"))
    assert set(re.findall(r'TABLES\["(\w+)"\]', text)) == set(tables(framework))


def test_a_capability_that_does_not_exist_is_refused_when_the_table_is_read() -> None:
    ((pattern, capability),) = capabilities_by_pattern([[r"trainer\..*", "recipes"]])
    assert pattern.fullmatch("trainer.x")
    assert capability is Capability.RECIPES
    with pytest.raises(KeyError):
        capabilities_by_pattern([["x", "no_such_capability"]])
