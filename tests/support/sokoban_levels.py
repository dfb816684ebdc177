"""Sokoban levels from text."""

from __future__ import annotations

from quintet.envs.sokoban import Level


def parse_level(text: str) -> Level:
    """Parse the level of an observation."""
    rows = [row.split() for row in text.splitlines() if row.startswith(" ")]
    cells = [symbol for row in rows for symbol in row]

    def where(symbols: str) -> int:
        return sum(1 << i for i, symbol in enumerate(cells) if symbol in symbols)

    player = next(i for i, symbol in enumerate(cells) if symbol in "PS")
    return Level(len(rows[0]), where("_OX√PS"), where("O√S"), where("X√"), player, len(rows))
