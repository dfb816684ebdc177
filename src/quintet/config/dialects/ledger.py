"""The ledger: every key that a dialect's reference documents, what it takes and what becomes of it here.

A key is either `honoured`, and a test shows it, or `pending`, and names the capability that it waits
for. There is no third state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.config.capability import Capability
from quintet.config.dialects.takes import Takes

__all__ = ["Capability", "Row", "by_key", "counts", "idle_for", "row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One documented key.

    >>> row("training.max_turns", POSITIVE, 5, "Replies of the policy in one game.",
    ...     native="rollout.max_turns", proof="tests/unit/config/dialects/test_ragen.py::test_turns")
    """

    key: str
    takes: Takes
    default: Any
    """The value that the reference shows; text with `${…}` where it follows another key."""
    effect: str
    """One sentence: what the run does because of it, with the unit where it has one."""
    native: tuple[str, ...] = ()
    """Keys of the native schema that it feeds."""
    pending: Capability | None = None
    noop: tuple[Any, ...] = ()
    """Values of a pending key that ask for nothing which isn't there; a `Takes` stands for all that it accepts."""
    proof: str | None = None
    """The test that shows a honoured key at work."""
    aliases: tuple[str, ...] = ()
    """Other spellings that the framework's source takes or took for it."""
    only_if: tuple[str, Any] | None = None
    """`("logging.log_images", True)`: it asks for something only where that key has that value, or one that a
    `Takes` accepts."""
    words: Mapping[Any, Any] = field(default_factory=dict)
    """The native value of each of its values that is called otherwise there: `{-1: 0}`."""
    computed: bool = False
    """What the native keys become follows from other keys too, in the dialect's module; else the one
    native key takes the value as it is, or by `words`."""
    unit: str | None = None
    """What its numbers count: `tokens`, `prompts`, `seconds`."""

    @property
    def direct(self) -> bool:
        """Whether its one native key takes its value, with nothing else to be known."""
        return len(self.native) == 1 and not self.computed

    @property
    def state(self) -> str:
        return "honoured" if self.pending is None else "pending"


def row(
    key: str,
    takes: Takes,
    default: Any,
    effect: str,
    *,
    native: str | Iterable[str] = (),
    pending: Capability | None = None,
    noop: Iterable[Any] = (),
    proof: str | None = None,
    aliases: Iterable[str] = (),
    only_if: tuple[str, Any] | None = None,
    words: Mapping[Any, Any] | None = None,
    computed: bool = False,
    unit: str | None = None,
) -> Row:
    """A `Row`, written short.

    Raises:
        ValueError: it is neither honoured with a proof nor pending, or its own default is illegal.
    """
    if (proof is None) == (pending is None):
        raise ValueError(f"{key}: a key is honoured, with a proof, or pending, with a capability")
    if not (isinstance(default, str) and "${" in default) and not takes.accepts(default):
        raise ValueError(f"{key}: its default {default!r} is not {takes.words}")
    fields = (native,) if isinstance(native, str) else tuple(native)
    return Row(
        key,
        takes,
        default,
        effect,
        fields,
        pending,
        tuple(noop),
        proof,
        tuple(aliases),
        only_if,
        words or {},
        computed,
        unit,
    )


def counts(row: Row, rows: Mapping[str, Row], value: Callable[[str], Any]) -> bool:
    """Whether a key asks for something beside the others, whose values `value` knows."""
    return idle_for(row, rows, value) is None


def idle_for(row: Row, rows: Mapping[str, Row], value: Callable[[str], Any]) -> tuple[str, Any] | None:
    """The key and the value that it would need for a key to ask for something; None where it does. A key that needs
    one which is idle itself is idle, too."""
    if row.only_if is None:
        return None
    other, needed = row.only_if
    there = value(other)
    if not (needed.accepts(there) if isinstance(needed, Takes) else there == needed):
        return row.only_if
    return idle_for(rows[other], rows, value) if other in rows else None


def by_key(rows: Iterable[Row]) -> Mapping[str, Row]:
    """Rows by their key.

    Raises:
        ValueError: a key is there twice.
    """
    table: dict[str, Row] = {}
    for one in rows:
        if one.key in table:
            raise ValueError(f"{one.key} is twice in the ledger")
        table[one.key] = one
    return table
