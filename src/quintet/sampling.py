"""How a response is sampled: what the sampling parameters of a rollout and a request to an engine have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Constraint on the text of a response.

    >>> StructuredOutput("regex", "[0-9]+").kind
    'regex'
    """

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    """The text is a JSON object, JSON that conforms to a schema, a match of a regular expression, or one of several
    texts."""
    spec: str = ""
    """The schema as JSON text, the regular expression, or the texts as a JSON list; empty for `json_object`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Settings of sampling one response."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or response so far (Keskar et al. 2019,
    arXiv:1909.05858)."""
    min_tokens: int = 0
    """Minimum length of the response: tokens that end it are not sampled before."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the response wherever they occur, also across token boundaries."""
    structured_output: StructuredOutput | None = None
    """Sample only tokens that can lead to such a text, and a stop token exactly where it is complete."""
