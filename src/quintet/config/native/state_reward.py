"""Reward for descriptions of an environment's state."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from quintet.config.native.data import ChatRequestConfig, EndpointUrl
from quintet.config.native.section import Count, NonNegative, Section

SECTIONS = {"grounding": "observation", "worldmodeling": "prediction"}
"""Section of the thoughts with each kind of description."""


class StateJudgeConfig(ChatRequestConfig):
    """Model behind an OpenAI-compatible endpoint that extracts relations from descriptions."""

    url: EndpointUrl
    """Base URL, such as `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model."""
    prompt: str | None = None
    """Prompt with `{text}` and `{objects}`, which asks for JSON; null uses a built-in one."""


class StateRewardConfig(Section):
    """Reward for thoughts that describe the state of the env, as in VAGEN (Wang et al. 2025, arXiv:2510.16907).

    The positions of objects relative to the player are extracted from the sections that `rollout.thoughts` demands, and
    compared with those in the env: the F1 of a maximum matching, by kind of object. Only responses in the right form
    with valid actions are scored.
    """

    grounding_weight: NonNegative = 0.5
    """Factor on the score of `<observation>`, compared with the state before the actions."""
    worldmodeling_weight: NonNegative = 0.5
    """Factor on the score of `<prediction>`, compared with the state after the actions."""
    scorer: Literal["rules", "judge"] = "rules"
    """What extracts the relations: rules for English sentences, JSON and grids, or the model at `judge`."""
    judge: StateJudgeConfig | None = None
    """Endpoint of the scorer `judge`."""
    repeated_texts: Count = 0
    """Number of most frequent descriptions of a step that are penalized if they score less than
    `repeated_below`; 0 penalizes none. VAGEN has 5."""
    repeated_below: Annotated[float, Field(ge=0.0, le=1.0)] = 0.35
    """Score below which a repeated description is penalized."""
    repeated_score: float = -0.1
    """Score in place of it."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.scorer == "judge" and self.judge is None:
            yield (
                "`scorer: judge` needs the endpoint `judge`",
                "judge.url=http://127.0.0.1:8000/v1 judge.model=NAME",
                "scorer=rules",
            )
