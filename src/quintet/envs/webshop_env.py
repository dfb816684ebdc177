"""WebShop (Yao et al. 2022): an online shop with a search bar and links, by the package `webshop_minimal`."""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

import numpy as np

from quintet.config.native.text_envs import WebShopConfig
from quintet.envs.bandit import text_image
from quintet.envs.env import TEXT
from quintet.envs.start_states import Split, split_of
from quintet.records import Observation, Step

HELD_OUT = {Split.DEMONSTRATION: (0, 500), Split.VALIDATION: (500, 1500)}
"""First and last goal of the splits other than training, in the order of `GOAL_ORDER`."""
GOAL_ORDER = 42
"""Seed of the order of goals, as in RAGEN."""


class WebShop:
    """A goal, such as a product with a size below a price; the reward of a purchase is its agreement with the goal."""

    actions = (f"search[{TEXT}]", f"click[{TEXT}]")

    def __init__(self, config: WebShopConfig) -> None:
        import webshop_minimal

        if config.dataset is not None:
            webshop_minimal.init_basedir(config.dataset)
        options: dict[str, Any] = {} if config.file_path is None else {"file_path": config.file_path}
        self._shop = webshop_minimal.WebAgentTextEnv(
            observation_mode=config.observation,
            num_products=config.products,
            human_goals=config.human_goals,
            session_prefix=uuid4().hex,
            **options,
        )

    def instruction(self) -> str:
        return (
            "Buy a product in an online shop that agrees with the instruction. Answer with search[words] on the page"
            " with the search bar, and otherwise with click[link], such as click[buy now]. Choose options such as size"
            " and color, one at a time, before you buy."
        )

    def reset(self, seed: int) -> Observation:
        goals = list(range(len(self._shop.server.goals)))
        random.Random(GOAL_ORDER).shuffle(goals)  # noqa: S311 - an order, no secret
        first, last = HELD_OUT.get(split_of(seed), (1500, len(goals)))
        chosen = goals[first:last] or goals
        self._shop.reset(session=chosen[seed // len(Split) % len(chosen)])
        return self._observation()

    def step(self, action: str) -> Step:
        """See `Env.step`; an action that the page does not offer changes nothing."""
        _, reward, done, _ = self._shop.step(action)
        return Step(self._observation(), float(reward), bool(done), False, {"success": bool(reward == 1)})

    def render(self) -> np.ndarray:
        """See `Env.render`."""
        return text_image(self._observation().text)

    def close(self) -> None:
        """See `Env.close`."""
        self._shop.close()

    def _observation(self) -> Observation:
        offered = self._shop.get_available_actions()
        links = [f"click[{link}]" for link in offered["clickables"] if link != "search"]
        actions = ["search[words]", *links] if offered["has_search_bar"] else links
        return Observation(f"{self._shop.observation}\nAvailable: {', '.join(actions)}")
