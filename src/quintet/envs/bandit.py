"""Two arms whose names hint at their rewards, as in RAGEN (arXiv:2504.20073)."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from quintet.config.native.text_envs import BanditConfig
from quintet.records import Observation, Step


class Bandit:
    """Choice between two arms, ordered by the seed. One pull ends the episode; it succeeds with the better arm."""

    def __init__(self, config: BanditConfig) -> None:
        self._config = config
        self.actions = (config.low_arm, config.high_arm)

    def instruction(self) -> str:
        return (
            "Choose the arm with the higher average reward. Each arm has its own distribution of rewards, and its name"
            " hints at it. Answer with the name of an arm."
        )

    def reset(self, seed: int) -> Observation:
        # text as seed: close numbers give unrelated draws
        self._rng = random.Random(f"bandit/{seed}")  # noqa: S311 - a game, no secret
        first, second = self._rng.sample(self.actions, 2)
        self._text = f"There are two arms: {first} and {second}."
        return Observation(self._text)

    def step(self, action: str) -> Step:
        """See `Env.step`; the reward is that of the arm."""
        is_high, config = action == self._config.high_arm, self._config
        reward = config.low_reward
        if is_high:
            pays = self._rng.random() < config.high_probability
            reward = config.high_reward if pays else config.miss_reward
        self._text = f"{action}: {reward:g} points"
        return Step(Observation(self._text), reward, True, False, {"success": is_high})

    def render(self) -> np.ndarray:
        """See `Env.render`."""
        return text_image(self._text)

    def close(self) -> None:
        """See `Env.close`."""

    def expert_action(self) -> str:
        """Return the better arm."""
        return self._config.high_arm

    def expert_thought(self) -> str:
        """Return why it is better."""
        return f"{self._config.high_arm} is the better arm"


def text_image(text: str, width: int = 480) -> np.ndarray:
    """Return the text as an image, RGB `uint8[height, width, 3]`."""
    font = ImageFont.load_default(16)
    lines = [line[start : start + 56] for line in text.splitlines() or [""] for start in range(0, len(line) or 1, 56)]
    image = Image.new("RGB", (width, 12 + 20 * len(lines)), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((6, 6 + 20 * number), line, fill=(20, 20, 20), font=font)
    return np.asarray(image)
