"""Positions of objects relative to the player of an environment."""

from collections.abc import Iterable
from dataclasses import dataclass

PLAYER = "player"
Position = tuple[float, float]
"""Row and column."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Position of an object relative to the player; None is unknown."""

    name: str
    """Kind of object: `target`, `box`, …"""
    vertical: str | None
    """`above`, `below` or `same`."""
    horizontal: str | None
    """`left`, `right` or `same`."""


def relative_position(name: str, position: Position, player: Position) -> Relation:
    """Return the relation of an object to the player.

    >>> relative_position("target", (0, 3), (2, 3))
    Relation(name='target', vertical='above', horizontal='same')
    """
    down, right = position[0] - player[0], position[1] - player[1]
    vertical = "below" if down > 0 else "above" if down < 0 else "same"
    return Relation(name, vertical, "right" if right > 0 else "left" if right < 0 else "same")


def relations_to_player(objects: Iterable[tuple[str, Position]]) -> tuple[Relation, ...] | None:
    """Return the relations of named objects to the one called `player`; None without one."""
    objects = list(objects)
    player = next((position for name, position in objects if name == PLAYER), None)
    if player is None:
        return None
    return tuple(relative_position(name, position, player) for name, position in objects if name != PLAYER)
