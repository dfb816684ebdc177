"""Find the coloured square."""

import numpy as np

from quintet.records import Observation, Step


class ColouredSquare:
    actions = ("Northwest", "Northeast", "Southwest", "Southeast")

    def __init__(self, cell=16):
        self.cell = cell

    def instruction(self):
        return f"Three squares are grey. Where is the coloured one? Answer with {', '.join(self.actions)}."

    def reset(self, seed):
        random = np.random.default_rng(seed)
        squares = random.integers(60, 200, (4, 1)).repeat(3, axis=1)
        self.place = int(random.integers(4))
        squares[self.place] = random.permutation([230, 120, 20])
        self.image = np.uint8(squares.reshape(2, 2, 3).repeat(self.cell, axis=0).repeat(self.cell, axis=1))
        return Observation("<image> Where?", (self.image,))

    def step(self, action):
        success = action == self.expert_action()
        return Step(Observation("<image>", (self.image,)), float(success), True, False, {"success": success})

    def close(self):
        pass

    def expert_action(self):
        return self.actions[self.place]

    def expert_thought(self):
        return ""
