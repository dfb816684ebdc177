"""All dialects, and detection of the dialect of a configuration."""

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ragen.dialect import RAGEN
from quintet.config.dialects.rlinf.dialect import RLINF
from quintet.config.dialects.roll.dialect import ROLL
from quintet.config.dialects.vagen.dialect import VAGEN
from quintet.config.dialects.verl.dialect import VERL
from quintet.config.dotted import has_key

DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (RAGEN, VAGEN, VERL, RLINF, ROLL)}
FRAMEWORK_FILES: Mapping[str, Mapping[str, Any]] = {
    name: tree for dialect in DIALECTS.values() for name, tree in dialect.framework_files.items()
}
"""Configuration files that come with the frameworks, with the values in which they differ from the references."""


def detect(tree: Mapping[str, Any]) -> list[str]:
    """Return the dialects whose marks a configuration has, the one with the most first; none for a native one."""
    counts = {name: sum(has_key(tree, mark) for mark in dialect.marks) for name, dialect in DIALECTS.items()}
    return sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name])
