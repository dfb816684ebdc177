"""The environment protocol: text and image observations and actions, never tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quintet.records import Observation, Step

if TYPE_CHECKING:
    import numpy as np


IMAGE = "<image>"
"""Place of an image in the text of an observation; images without one come before the text."""

ELLIPSIS = "…"
"""Place of any text in the only word of `Env.actions`."""


class UnsolvableError(Exception):
    """The expert of an env knows no way to success from the current state, or finds none within its search limit."""


class Env(Protocol):
    """Environment that runs one episode at a time. The same seed gives the same start state and the same randomness.

    A class may have a static method `prepare_steps`, which gets several of its envs, each with the action of its next
    step, and computes for all of them together what these steps need.
    """

    actions: tuple[str, ...]
    """Valid action words. One word with `ELLIPSIS` is an element, `<svg…</svg>`: any text with that beginning and end,
    wherever it is in a response; a response without it is the empty action."""

    def instruction(self) -> str:
        """Return the system message: task, legend, valid actions."""

    def reset(self, seed: int) -> Observation:
        """Start the episode of this seed."""

    def step(self, action: Any) -> Step:
        """Execute one valid action."""

    def render(self) -> np.ndarray:
        """Return the current state as RGB `uint8[height, width, 3]`."""

    def close(self) -> None: ...
