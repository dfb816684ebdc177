"""Relations to the player that a description of a state names: in sentences, as JSON, or as a grid of symbols."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.config.native.relations import RelationScoring
from quintet.package_files import read_yaml
from quintet.relations import PLAYER, Relation, relations_to_player

WORDS = read_yaml(__file__)
SYNONYMS: Mapping[str, str] = WORDS["synonyms"]
"""Regular expressions of the names of objects."""
DIRECTIONS: Mapping[str, str] = WORDS["directions"]
AGAIN = "another|other"
"""Stands for one more object of the kind before."""
_SENTENCE_END = re.compile(r"[.;!?\n]+")
_JSON = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)
_OPPOSITE = {"above": "below", "below": "above", "left": "right", "right": "left"}
_VERTICAL, _HORIZONTAL = ("above", "below", "same"), ("left", "right", "same")
_GRID_CELLS = {"#", "_"}


def extract_relations(text: str, scoring: RelationScoring, names: Iterable[str] = ()) -> list[Relation]:
    """Return the relations of a description; `names` are objects besides those that `scoring` weighs.

    >>> scoring = RelationScoring({"target": 1.0, "box": 1.0})
    >>> extract_relations("The player is left of and above the target. The box is right of the player.", scoring)
    ... # doctest: +NORMALIZE_WHITESPACE
    [Relation(name='target', vertical='below', horizontal='right'),
     Relation(name='box', vertical=None, horizontal='right')]
    """
    if (parsed := relations_from_json(text)) is not None:
        return parsed
    if (relations := _grid_relations(text, scoring)) is not None:
        return relations
    pattern = _word_pattern([*scoring.weights, *names])
    return [
        relation for sentence in _SENTENCE_END.split(text.lower()) for relation in _Sentence(pattern).read(sentence)
    ]


def relations_from_json(text: str) -> list[Relation] | None:
    """Return the relations in `[{"object_id": …, "vertical_relation": …, "horizontal_relation": …}]` or in positions
    `{"player": [row, column], "box": [[row, column]]}`, wherever they are in a text; None if there are neither."""
    match = _JSON.search(text)
    if match is None:
        return None
    try:
        value = json.loads(match[0].replace("(", "[").replace(")", "]"))
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list):
        relations = [_json_relation(item) for item in value if isinstance(item, dict) and "object_id" in item]
        return relations if relations or not value else None
    objects = [(str(name), position) for name, item in value.items() for position in _positions(item)]
    to_player = relations_to_player(objects)
    return None if to_player is None else list(to_player)


def _json_relation(item: Mapping[str, Any]) -> Relation:
    vertical, horizontal = item.get("vertical_relation"), item.get("horizontal_relation")
    return Relation(
        str(item["object_id"]).lower().rstrip("0123456789"),
        vertical if vertical in _VERTICAL else None,
        horizontal if horizontal in _HORIZONTAL else None,
    )


def _positions(value: Any) -> Iterator[tuple[float, float]]:
    """Yield the positions of one object, or of several of a kind."""
    match value:
        case [int() | float() as row, int() | float() as column]:
            yield row, column
        case [*items]:
            for item in items:
                yield from _positions(item)


def _grid_relations(text: str, scoring: RelationScoring) -> list[Relation] | None:
    """Return the relations in lines of symbols; None if a line has something else, or there is no player."""
    rows = ["".join(line.split()) for line in text.strip().splitlines()]
    cells = scoring.symbols.keys() | _GRID_CELLS
    if len(rows) < 2 or not all(rows) or set("".join(rows)) - cells:
        return None
    relations = scoring.grid_relations(rows)
    return None if relations is None else list(relations)


def _word_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern with a group for each object and direction, and the group `exact` for `directly`."""
    objects = {name: SYNONYMS.get(name, re.escape(name.lower())) for name in dict.fromkeys([PLAYER, *names])}
    # the longest directions first: `on top of` is no `top`
    forms = {**{name: rf"(?:{form})\d*" for name, form in objects.items()}, "again": AGAIN, "exact": "directly"}
    forms = {**{name: DIRECTIONS[name] for name in ("row", "column", "place")}, **forms, **DIRECTIONS}
    return re.compile("|".join(rf"(?P<{_group(name)}>\b(?:{form})\b)" for name, form in forms.items()))


def _group(name: str) -> str:
    return "_" + re.sub(r"\W", "_", name)


@dataclass(slots=True)
class _Sentence:
    """Reads the objects and directions of a sentence in their order: `SUBJECT … DIRECTIONS … REFERENCE`, or
    `DIRECTIONS … REFERENCE … SUBJECT`."""

    pattern: re.Pattern[str]
    relations: list[Relation] = field(default_factory=list)
    subjects: list[str] = field(default_factory=list)
    directions: list[str] = field(default_factory=list)
    is_complete: bool = False
    """Whether the subjects have been related to a reference."""
    is_inverted: bool = False
    """Whether the directions came first, so that `subjects` is the reference."""

    def read(self, sentence: str) -> list[Relation]:
        for match in self.pattern.finditer(sentence):
            word = (match.lastgroup or "").removeprefix("_")
            if word in DIRECTIONS or word == "exact":
                self.directions.append(word)
            else:
                self._object(self._last_kind() if word == "again" else word)
        self._end()
        return self.relations

    def _last_kind(self) -> str:
        return next((name for name in reversed(self.subjects) if name != PLAYER), PLAYER)

    def _object(self, name: str) -> None:
        if self.subjects and self.directions:
            # the subjects stay: `… and below the box`
            self._relate(name)
        elif self.is_complete or not self.subjects:
            self.subjects, self.is_complete, self.is_inverted = [name], False, bool(self.directions)
        else:
            self.subjects.append(name)

    def _relate(self, name: str) -> None:
        """Add the relation of each subject to a reference, if one of them is the player."""
        vertical, horizontal = _directions(self.directions)
        pairs = [(name, subject) if self.is_inverted else (subject, name) for subject in self.subjects]
        for subject, reference in pairs:
            if reference == PLAYER and subject != PLAYER:
                self.relations.append(Relation(subject, vertical, horizontal))
            elif subject == PLAYER and reference != PLAYER:
                opposite = _OPPOSITE.get(vertical or "", vertical), _OPPOSITE.get(horizontal or "", horizontal)
                self.relations.append(Relation(reference, *opposite))
        self.directions, self.is_complete = [], True
        if self.is_inverted:
            self.subjects, self.is_inverted = [name], False

    def _end(self) -> None:
        """Relate subjects without a reference to the player: `the target is above`."""
        if not self.directions or not self.subjects or self.is_inverted:
            return
        if not self.is_complete:
            self._relate(PLAYER)
        elif self.relations and PLAYER not in self.subjects:
            # `above the player, to the left`
            vertical, horizontal = _directions(self.directions)
            last = self.relations[-1]
            self.relations[-1] = replace(
                last, vertical=last.vertical or vertical, horizontal=last.horizontal or horizontal
            )


def _directions(names: Sequence[str]) -> tuple[str | None, str | None]:
    """Return vertical and horizontal direction."""
    vertical = next((name for name in names if name in _OPPOSITE and name in _VERTICAL), None)
    horizontal = next((name for name in names if name in _OPPOSITE and name in _HORIZONTAL), None)
    if "place" in names:
        return vertical or "same", horizontal or "same"
    if "row" in names or ("exact" in names and horizontal):
        vertical = vertical or "same"
    if "column" in names or ("exact" in names and vertical in _OPPOSITE):
        horizontal = horizontal or "same"
    return vertical, horizontal
