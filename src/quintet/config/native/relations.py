"""How descriptions of the positions of an environment's objects are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quintet.relations import Relation, relations_to_player


@dataclass(frozen=True, slots=True)
class RelationScoring:
    """Objects of an environment, and their weights in the score of a description."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each object by name; empty weighs all objects of a state equally."""
    partial: bool = False
    """A relation with one of both directions right counts half."""
    symbols: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Objects at a cell by its symbol in text observations; the player is `player`."""

    def grid_relations(self, rows: Sequence[Sequence[str]]) -> tuple[Relation, ...] | None:
        """Return the relations in a grid of symbols; None without a player."""
        objects = [
            (name, (row, column))
            for row, cells in enumerate(rows)
            for column, symbol in enumerate(cells)
            if symbol in self.symbols
            for name in self.symbols[symbol]
        ]
        return relations_to_player(objects)
