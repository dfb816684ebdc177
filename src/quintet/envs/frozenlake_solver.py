"""Optimal policies for FrozenLake and other tabular envs, computed from gymnasium's transition table.

The table is `env.P`: a list of `(probability, next state, reward, terminated)` per state and action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

Branch = tuple[float, int, float, bool]
Table = Mapping[int, Mapping[int, Sequence[Branch]]]


def shortest_policy(table: Table) -> list[int]:
    """Return the first action of a shortest path to the reward from each state without slipping; ties take the lowest.

    Breadth-first search backward from the rewarding moves. States that cannot reach the reward get action 0.
    """
    predecessors: dict[int, list[int]] = {state: [] for state in table}
    distances = np.full(len(table), np.inf)
    for state, actions in table.items():
        for ((_, new, reward, _),) in actions.values():
            predecessors[new].append(state)
            if reward > 0:
                distances[new] = 0
    queue = deque(np.flatnonzero(distances == 0).tolist())
    while queue:
        state = queue.popleft()
        for before in predecessors[state]:
            if np.isinf(distances[before]):
                distances[before] = distances[state] + 1
                queue.append(before)
    return [_nearest(table[state], distances) for state in range(len(table))]


def _nearest(moves: Mapping[int, Sequence[Branch]], distances: np.ndarray) -> int:
    """Return the action with the fewest moves to the reward, preferring the rewarding move itself."""
    return min(moves, key=lambda action: (-moves[action][0][2], distances[moves[action][0][1]]))


def slippery_policy(table: Table, gamma: float = 0.99) -> list[int]:
    """Return the action of the highest discounted value in each state; ties take the lowest.

    Value iteration, `V(s) = max_a Σ p (r + γ V(s'))` (Bellman 1957), to within 1e-9. Without the
    discount, waiting at the edge until the ice slips the right way would cost nothing.
    """
    num_actions = max(map(len, table.values()))
    reward = np.zeros((len(table), num_actions))
    transitions = np.zeros((len(table), num_actions, len(table)))
    for state, actions in table.items():
        for action, branches in actions.items():
            for probability, new, gain, ended in branches:
                reward[state, action] += probability * gain
                transitions[state, action, new] += probability * (not ended)
    values, change = np.zeros(len(table)), np.inf
    # terminates: each iteration shrinks the change by γ
    while change >= 1e-9:
        action_values = reward + gamma * transitions @ values
        change = float(np.abs(action_values.max(axis=-1) - values).max())
        values = action_values.max(axis=-1)
    return [int(action) for action in action_values.argmax(axis=-1)]
