"""Score of relations that were extracted from a description, against the relations of the environment's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quintet.config.native.relations import RelationScoring
from quintet.relations import Relation

Directions = tuple[str | None, str | None]
"""Vertical and horizontal."""


def relation_score(predicted: Sequence[Relation], true: Sequence[Relation], scoring: RelationScoring) -> float:
    """Return the weighted mean F1 over the kinds of objects that the description or the state has, 0 to 1.

    As in VAGEN (Wang et al. 2025, arXiv:2510.16907): relations of one kind are assigned to each other by maximum
    bipartite matching, F1 = 2·m / (predicted + true) with m the matched relations. Objects without a weight do not
    count.
    """
    weights = scoring.weights or dict.fromkeys((relation.name for relation in true), 1.0)
    present = {relation.name for relation in (*predicted, *true)} & weights.keys()
    if not present:
        return float(not predicted and not true)
    total = sum(weights[name] for name in present)
    scores = {
        name: _f1([r for r in predicted if r.name == name], [r for r in true if r.name == name], scoring.partial)
        for name in present
    }
    return sum(weights[name] * score for name, score in scores.items()) / total


def _f1(predicted: Sequence[Relation], true: Sequence[Relation], partial: bool) -> float:
    matched = matched_relations(predicted, true, partial=partial)
    return 2 * matched / (len(predicted) + len(true))


def matched_relations(predicted: Sequence[Relation], true: Sequence[Relation], *, partial: bool) -> float:
    """Return the weight of a maximum matching, in which equal relations count 1 and, with `partial`, relations with
    one equal direction ½.

    Some maximum matching has all pairs of equal relations: to separate such a pair loses 1, and its parts can gain ½
    each. The others form a maximum matching by augmenting paths.
    """
    unmatched: Counter[Directions] = Counter((r.vertical, r.horizontal) for r in true)
    others = []
    for relation in predicted:
        if unmatched[relation.vertical, relation.horizontal] > 0:
            unmatched[relation.vertical, relation.horizontal] -= 1
        else:
            others.append(relation)
    num_equal = len(predicted) - len(others)
    if not partial:
        return float(num_equal)
    remaining = [directions for directions, count in unmatched.items() for _ in range(count)]
    return num_equal + _half_matches(others, remaining) / 2


def _half_matches(predicted: Sequence[Relation], true: Sequence[Directions]) -> int:
    """Return the number of pairs with an equal direction, by Kuhn's algorithm."""
    partner: dict[int, int] = {}

    def augment(number: int, visited: set[int]) -> bool:
        relation = predicted[number]
        for other, (vertical, horizontal) in enumerate(true):
            if other in visited or (relation.vertical != vertical and relation.horizontal != horizontal):
                continue
            visited.add(other)
            if other not in partner or augment(partner[other], visited):
                partner[other] = number
                return True
        return False

    return sum(augment(number, set()) for number in range(len(predicted)))
