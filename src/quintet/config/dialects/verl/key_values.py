"""Types of verl's values that a type expression cannot describe."""

import math
import re

from quintet.config.dialects.value_types import ValueType, parse_type

UNCLIPPED = 1e12
"""Global gradient norm that clips nothing; Megatron's 0."""
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?")
_DIVERGENCES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


REJECTION_LEVELS = ("token", "sequence", "geometric")
"""What releases up to 2025-12 compare with the bounds of a rejection."""


def parse_bounds(value: object) -> tuple[float | None, float] | None:
    """Return `(lower, upper)` of a number, which is the upper bound, or of text `lower_upper`; None if it is neither.

    >>> parse_bounds("0.5_2.0")
    (0.5, 2.0)
    """
    parts = str(value).split("_")
    if isinstance(value, bool) or len(parts) > 2 or not all(map(_NUMBER.fullmatch, parts)):
        return None
    *below, upper = map(float, parts)
    lower = below[0] if below else None
    if not 0 < upper < math.inf or (lower is not None and not 0 < lower <= upper):
        return None
    return lower, upper


def _is_bounds(value: object) -> bool:
    return isinstance(value, int | float | str) and parse_bounds(value) is not None


def parse_betas(value: object) -> object:
    """Return a list of numbers for its text, which quotes within quotes of a script leave; other values as they are.

    >>> parse_betas("[0.9,0.95]")
    [0.9, 0.95]
    """
    inner = value[1:-1] if isinstance(value, str) and value[:1] == "[" and value[-1:] == "]" else None
    parts = [] if inner is None else [part.strip() for part in inner.split(",")]
    return [*map(float, parts)] if parts and all(map(_NUMBER.fullmatch, parts)) else value


def parse_names(value: object) -> object:
    """Return a list of names for its text, which quotes within quotes of a script leave; other values as they are.

    >>> parse_names("[console, wandb]")
    ['console', 'wandb']
    """
    inner = value[1:-1] if isinstance(value, str) and value[:1] == "[" and value[-1:] == "]" else None
    return value if inner is None else [part.strip(" '\"") for part in inner.split(",")]


_BETAS = parse_type("list of number >= 0 < 1")


def _is_thinking_option(value: object) -> bool:
    return isinstance(value, dict) and (
        not value or (isinstance(value.get("enable_thinking"), bool) and len(value) == 1)
    )


VALUE_TYPES = {
    "thinking_option": ValueType("nothing but enable_thinking", _is_thinking_option),
    "betas": ValueType(_BETAS.description, lambda value: _BETAS.accepts(parse_betas(value))),
    "text_of_names": ValueType("the text of a list", lambda value: parse_names(value) is not value),
    "bounds": ValueType("a number > 0, or two as lower_upper", _is_bounds),
    "bounds_list": ValueType(
        "numbers > 0, or two each as lower_upper, joined by commas",
        lambda value: all(_is_bounds(part.strip()) for part in str(value).split(",")),
    ),
    "divergences": ValueType(
        f"one or more of {', '.join(_DIVERGENCES)}, joined by commas",
        lambda value: (
            isinstance(value, str)
            and (value in REJECTION_LEVELS or all(name.strip() in _DIVERGENCES for name in value.split(",")))
        ),
    ),
}
