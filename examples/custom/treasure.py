"""Walk to a treasure on a square field."""

import itertools
import random

from quintet.records import Observation, Step

MOVES = {"Left": (-1, 0), "Right": (1, 0), "Down": (0, -1), "Up": (0, 1)}


class Treasure:
    actions = tuple(MOVES)

    def __init__(self, size=4):
        self.size = size
        cells = itertools.product(range(1, size + 1), repeat=2)
        self.start_states = list(itertools.permutations(cells, 2))
        random.Random(0).shuffle(self.start_states)

    def instruction(self):
        return "Walk to the treasure: Left, Right, Down or Up."

    def reset(self, seed):
        self.position, self.treasure = self.start_states[seed % len(self.start_states)]
        return self.observation()

    def step(self, action):
        dx, dy = MOVES[action]
        x, y = self.position
        self.position = min(max(x + dx, 1), self.size), min(max(y + dy, 1), self.size)
        success = self.position == self.treasure
        return Step(self.observation(), float(success), success, False, {"success": success})

    def close(self):
        pass

    def observation(self):
        return Observation("you {} {} treasure {} {}".format(*self.position, *self.treasure))

    def expert_action(self):
        (x, y), (treasure_x, treasure_y) = self.position, self.treasure
        if x != treasure_x:
            return "Left" if x > treasure_x else "Right"
        return "Down" if y > treasure_y else "Up"

    def expert_thought(self):
        return ""
