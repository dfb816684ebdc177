"""The environment protocol: text and image observations and actions, never tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quintet.records import Observation, Step

if TYPE_CHECKING:
    import numpy as np


IMAGE = "<image>"
"""Place of an image in the text of an observation; images without one come before the text."""

NUMBER, TEXT = "{number}", "{text}"
"""Placeholders in an action of `Env.actions` for any decimal number and for any text: `pick({number})`."""


class UnsolvableError(Exception):
    """The expert of an env finds no solution from the current state within its search limit."""


class Env(Protocol):
    """Environment that runs one episode at a time. The same seed gives the same start state and the same randomness.

    A class may have a static method `prepare_steps`, which gets several of its envs, each with the action of its next
    step, and computes for all of them together what these steps need.
    """

    actions: tuple[str, ...]
    """Valid actions; those after `reset` are the episode's. `NUMBER` and `TEXT` are placeholders in them. If the only
    action is an element, such as `<svg{text}</svg>`, it may be anywhere in a response, and a response without it is the
    empty action."""

    def instruction(self) -> str:
        """Return the system message: task, legend, valid actions."""

    def reset(self, seed: int) -> Observation:
        """Start the episode of this seed."""

    def step(self, action: Any) -> Step:
        """Execute one valid action, as the response spells it if it has placeholders."""

    def render(self) -> np.ndarray:
        """Return the current state as RGB `uint8[height, width, 3]`."""

    def close(self) -> None: ...
