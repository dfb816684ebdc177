"""Words for episodes of games and for responses to prompts: outcomes, results and facts of a turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.records import PROMPTS
from quintet.tracking.grid_svg import DISPLAY

OUTCOMES: Mapping[str, str] = DISPLAY["outcomes"]
PROMPT_OUTCOMES: Mapping[str, str] = OUTCOMES | DISPLAY["prompt_outcomes"]


def answers_prompt(episode: Mapping[str, Any]) -> bool:
    """Return whether a stored episode is a response to a prompt of a data file."""
    return PROMPTS in (episode.get("env_type"), episode["env"])


def success_word(episode: Mapping[str, Any]) -> str:
    """Return what a successful episode is called; empty if success is not measured, since the goal is the reward."""
    if episode.get("measures_success") is False:
        return ""
    return "correct" if answers_prompt(episode) else "solved"


def outcome_text(episode: Mapping[str, Any]) -> str:
    """Return how a stored episode ended.

    >>> outcome_text({"env": "frozenlake", "outcome": "terminated"})
    'lost'
    >>> outcome_text({"env": "sums", "env_type": "prompts", "outcome": "terminated", "measures_success": False})
    'complete'
    >>> outcome_text({"env": "prompts", "outcome": "terminated"})
    'not correct'
    """
    outcome = str(episode["outcome"])
    if not answers_prompt(episode):
        return OUTCOMES.get(outcome, outcome)
    if success_word(episode):
        return {"success": "correct", "terminated": "not correct"}.get(outcome) or PROMPT_OUTCOMES.get(outcome, outcome)
    return PROMPT_OUTCOMES.get(outcome, outcome)


def checks_format(episode: Mapping[str, Any]) -> bool:
    """Return whether the responses of a stored episode have a form to keep to."""
    return not answers_prompt(episode) or "format" in (episode.get("reward_components") or {})
