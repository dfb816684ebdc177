"""If these fail, a documented key isn't known, or what the ledger says of it isn't so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.config.dialects.dialect import DIALECTS, Reference
from quintet.config.dialects.ledger import Capability, Row, row
from quintet.config.dialects.takes import INTEGER, POSITIVE, Takes, choice, optional
from quintet.config.keys import keys
from quintet.config.source import FLOAT

DOCUMENTED = Path(__file__).parent / "keys"
REFERENCES = [reference for dialect in DIALECTS.values() for reference in dialect.references]
ROWS = [(reference.name, row) for reference in REFERENCES for row in reference.load()]


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            number = isinstance(value, str) and FLOAT.fullmatch(value)
            yield f"{prefix}{key}", float(value) if number else value


def test_every_document_has_a_ledger() -> None:
    assert sorted(reference.name for reference in REFERENCES) == sorted(p.stem for p in DOCUMENTED.glob("*.yaml"))
    assert len(ROWS) == 643


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda r: r.name)
def test_the_ledger_has_every_documented_key_with_the_value_shown(reference: Reference) -> None:
    documented = dict(leaves(yaml.safe_load((DOCUMENTED / f"{reference.name}.yaml").read_text())))
    ledger = {row.key: row.default for row in reference.load()}
    assert {k: (type(v), v) for k, v in ledger.items()} == {k: (type(v), v) for k, v in documented.items()}


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}:{row.key}" for name, row in ROWS])
def test_a_row_keeps_its_word(name: str, row: Row) -> None:
    assert all(isinstance(value, Takes) or row.takes.accepts(value) or "${" in str(value) for value in row.noop)
    assert set(row.native) <= {key.name for key in keys()}
    assert 20 <= len(row.effect) <= 260
    assert row.effect.endswith(".")
    assert not row.takes.accepts(object()) or row.takes.words == "anything"
    if row.proof:
        path, _, test = row.proof.partition("::")
        assert f"def {test.partition('[')[0]}(" in (Path(__file__).parents[4] / path).read_text()


def test_a_row_is_honoured_or_pending_and_its_default_is_legal() -> None:
    with pytest.raises(ValueError, match="proof"):
        row("a.b", INTEGER, 1, "Nothing.")
    with pytest.raises(ValueError, match="proof"):
        row("a.b", INTEGER, 1, "Nothing.", pending=Capability.VISION, proof="x")
    with pytest.raises(ValueError, match="not an integer"):
        row("a.b", POSITIVE, 0, "Nothing.", pending=Capability.VISION)


def test_types_are_strict() -> None:
    assert not INTEGER.accepts(True)
    assert not INTEGER.accepts(8.0)
    assert not INTEGER.accepts("8")
    assert not choice(1).accepts(True)
    assert optional(POSITIVE).accepts(None)
    assert not optional(POSITIVE).accepts(0)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}:{row.key}" for name, row in ROWS])
def test_a_row_says_of_itself_what_the_schema_says_of_its_native_keys(name: str, row: Row) -> None:
    """Honoured means that nothing it feeds waits; pending, that something does, or that nothing is fed yet."""
    ready = {key.name for key in keys() if key.waits is None or key.lacks}
    if row.proof:
        assert set(row.native) <= ready, f"{row.key} feeds {set(row.native) - ready}, which waits"
    elif row.native:
        lacking = {key.name for key in keys() if key.lacks}
        assert row.computed or set(row.native) - (ready - lacking), f"{row.key} feeds only what works: honour it"
