"""Two arms whose names hint at their rewards, as in RAGEN (arXiv:2504.20073)."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from quintet.config.native.text_envs import BanditConfig
from quintet.envs.env import Env
from quintet.package_files import read_yaml
from quintet.records import Observation, Step

PROFESSIONS = {arms: [(str(low), str(high)) for low, high in pairs] for arms, pairs in read_yaml(__file__).items()}


class Bandit(Env):
    """Choice between two arms, ordered by the seed. One pull ends the episode; it succeeds with the better arm.

    `actions` are the names of all arms until `reset` draws two.
    """

    def __init__(self, config: BanditConfig) -> None:
        self._config = config
        self._pairs = PROFESSIONS.get(config.arms, ((config.low_arm, config.high_arm),))
        self.actions: tuple[str, ...] = tuple(name for pair in self._pairs for name in pair)

    def instruction(self) -> str:
        return (
            "Choose the arm with the higher average reward. Each arm has its own distribution of rewards, and its name"
            " hints at it. Answer with the name of an arm."
        )

    def reset(self, seed: int) -> Observation:
        # text as seed: close numbers give unrelated draws
        self._rng = random.Random(f"bandit/{seed}")  # noqa: S311 - a game, no secret
        self.actions = pair = self._pairs[0] if len(self._pairs) == 1 else self._rng.choice(self._pairs)
        self._best = pair[1]
        first, second = self._rng.sample(pair, 2)
        self._text = f"There are two arms: {first} and {second}."
        return Observation(self._text)

    def step(self, action: str) -> Step:
        """See `Env.step`; the reward is the arm's. The name of an arm of another episode pulls no arm."""
        if action not in self.actions:
            return Step(Observation(self._text), 0.0, False, False, {"success": False})
        is_high, config = action == self._best, self._config
        reward = config.low_reward
        if is_high:
            pays = self._rng.random() < config.high_probability
            reward = config.high_reward if pays else config.miss_reward
        self._text = f"{action}: {reward:g} points"
        return Step(Observation(self._text), reward, True, False, {"success": is_high})

    def render(self) -> np.ndarray:
        return text_image(self._text)

    def expert_action(self) -> str:
        """Return the better arm."""
        return self._best

    def expert_thought(self) -> str:
        """Return why it is better."""
        return f"{self._best} is the better arm"


def text_image(text: str) -> np.ndarray:
    """Return the text as an image, RGB `uint8[height, width, 3]`."""
    font = ImageFont.load_default(16)
    lines = [line[start : start + 56] for line in text.splitlines() or [""] for start in range(0, len(line) or 1, 56)]
    image = Image.new("RGB", (480, 12 + 20 * len(lines)), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((6, 6 + 20 * number), line, fill=(20, 20, 20), font=font)
    return np.asarray(image)
