"""Drive points to their targets."""

import numpy as np

from quintet.embodied_records import RobotObservation, SimulatorStep

STRIDE = 0.2
PICTURE = 64


class Points:
    action_dim = 2
    control_frequency = 10.0
    num_start_states = 100_000
    tasks = ("reach",)

    def __init__(self, config, num_robots, seed):
        self.num_robots, self.seed = num_robots, seed
        self.points = np.zeros((num_robots, 2))
        self.targets = np.zeros((num_robots, 2))

    def task(self, start_state):
        return "reach"

    def reset(self, robots, start_states):
        for robot, start_state in zip(robots, start_states):
            random = np.random.default_rng([self.seed, start_state])
            self.points[robot], self.targets[robot] = random.uniform(-1, 1, (2, 2))

    def step(self, robots, actions):
        before = self.distances(robots)
        moved = self.points[robots] + STRIDE * np.clip(actions, -1, 1)
        self.points[robots] = np.clip(moved, -1, 1)
        after = self.distances(robots)
        success = after < 0.1
        return SimulatorStep(np.float32(before - after + success), success)

    def observe(self, robots):
        images = np.zeros((len(robots), 0, 1, 1, 3), np.uint8)  # no camera
        state = np.concatenate([self.points[robots], self.targets[robots]], axis=1)
        return RobotObservation(images, np.float32(state), ("drive to the target",) * len(robots))

    def render(self, robots):
        pictures = np.full((len(robots), PICTURE, PICTURE, 3), 255, np.uint8)
        for places, color in ((self.targets, (220, 40, 40)), (self.points, (40, 40, 220))):
            corners = np.int64((places[robots] + 1) / 2 * (PICTURE - 6))
            for picture, (column, row) in zip(pictures, corners):
                picture[row : row + 6, column : column + 6] = color
        return pictures

    def close(self):
        pass

    def distances(self, robots):
        return np.linalg.norm(self.points[robots] - self.targets[robots], axis=1)
