"""Best moves on a lake, read off gymnasium's transition table.

A table is `env.P`: for each state and action a list of `(probability, next state, reward, terminated)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["Table", "shortest_policy", "slippery_policy"]

Branch = tuple[float, int, float, bool]
Table = Mapping[int, Mapping[int, Sequence[Branch]]]


def shortest_policy(table: Table) -> list[int]:
    """The first action of a shortest way to reward from each state, where no move slips; the lowest among equals.

    Breadth-first search backwards from the rewarding moves. States from which none can be reached get action 0.
    """
    into: dict[int, list[int]] = {state: [] for state in table}
    distances = np.full(len(table), np.inf)
    for state, actions in table.items():
        for ((_, new, reward, _),) in actions.values():
            into[new].append(state)
            if reward > 0:
                distances[new] = 0
    queue = deque(np.flatnonzero(distances == 0).tolist())
    while queue:
        state = queue.popleft()
        for before in into[state]:
            if np.isinf(distances[before]):
                distances[before] = distances[state] + 1
                queue.append(before)
    return [_nearest(table[state], distances) for state in range(len(table))]


def _nearest(moves: Mapping[int, Sequence[Branch]], distances: np.ndarray) -> int:
    """The action that reward is fewest moves away from; the one that gives it before all."""
    return min(moves, key=lambda action: (-moves[action][0][2], distances[moves[action][0][1]]))


def slippery_policy(table: Table, gamma: float = 0.99) -> list[int]:
    """The action of the highest discounted worth in each state; the lowest among equals.

    Value iteration, `V(s) = max_a Σ p (r + γ V(s'))` (Bellman 1957), to within 1e-9. The discount is what
    makes the expert hurry: without it, standing at the edge until the ice slips the right way costs nothing.
    """
    reward = np.zeros((len(table), 4))
    onward = np.zeros((len(table), 4, len(table)))
    for state, actions in table.items():
        for action, branches in actions.items():
            for probability, new, gain, ended in branches:
                reward[state, action] += probability * gain
                onward[state, action, new] += probability * (not ended)
    values, change = np.zeros(len(table)), np.inf
    # ends: each round shrinks the change by γ
    while change >= 1e-9:
        worth = reward + gamma * onward @ values
        change = float(np.abs(worth.max(axis=-1) - values).max())
        values = worth.max(axis=-1)
    return [int(action) for action in worth.argmax(axis=-1)]
