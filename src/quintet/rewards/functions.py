"""Reward functions of users' own: a function of a file, or an address that is asked over HTTP."""

from __future__ import annotations

import inspect
import json
import math
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from quintet.errors import ConfigError
from quintet.processes.wire import encoded
from quintet.registry import load_outside

__all__ = ["Outcome", "is_address", "load_function", "outcome_of", "outcomes_of"]

Outcome = Mapping[str, Any]
"""`score`, and where a function says so `predicted` and numbers among `parts`."""
KEY = "reward.function"
SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
LONGEST_REPLY = 1 << 24
"""Bytes that an address may answer."""


def is_address(reference: str) -> bool:
    """Whether a function is asked over HTTP."""
    return urlsplit(reference).scheme in ("http", "https")


def load_function(
    reference: str, arguments: Mapping[str, Any], *, batched: bool, timeout: float
) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the mapping that holds the four things it is told, by verl's names.

    Raises:
        ConfigError: there is no such function, importing it fails, or it doesn't take what it is called with.
    """
    if is_address(reference):
        return lambda told: _asked(reference, {**told, **arguments}, timeout)
    function = load_outside(reference, KEY, entry_points="quintet.rewards")
    _check_takes(function, reference, (*(BATCHED if batched else SINGLE), *arguments))
    return lambda told: function(**told, **arguments)


def _check_takes(function: Callable[..., Any], reference: str, names: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        told = f"{KEY} = {reference!r} can't be called with {', '.join(names)}: {error}"
        raise ConfigError(told, key=KEY, value=reference, hint="take what isn't needed with **others") from error


def _asked(address: str, told: Mapping[str, Any], timeout: float) -> Any:
    """What an address answers to a POST of JSON."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    request = urllib.request.Request(address, encoded(told), headers, method="POST")  # noqa: S310 - `is_address`
    with urllib.request.urlopen(request, timeout=timeout) as reply:  # noqa: S310
        return json.loads(reply.read(LONGEST_REPLY))


def outcome_of(given: Any) -> Outcome:
    """What a function gave: a number, a mapping with `score`, or a sequence that begins with the score.

    Numbers of a mapping become parts; its `pred` is the answer that was read.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(given, Mapping):
        return _of_mapping(given)
    if isinstance(given, list | tuple) and given:
        return {"score": _number(given[0])}
    return {"score": _number(given)}


def _of_mapping(given: Mapping[str, Any]) -> Outcome:
    if "score" not in given:
        raise TypeError(f"a reward function gave a mapping without `score`: {sorted(map(str, given))}")
    others = {str(name): float(value) for name, value in given.items() if name != "score" and _is_number(value)}
    predicted = given.get("pred", given.get("predicted"))
    found = None if predicted is None else str(predicted)
    finite = {name: value for name, value in others.items() if math.isfinite(value)}
    return {"score": _number(given["score"]), "predicted": found, "parts": finite}


def _number(value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"a reward function gives a number or a mapping with `score`, not {type(value).__name__}")
    return float(value)


def _is_number(value: Any) -> bool:
    """Python's numbers, and those of numpy and torch, which have one value."""
    return isinstance(value, bool | int | float) or (hasattr(value, "item") and getattr(value, "size", 1) in (1, ()))


def outcomes_of(given: Any, count: int) -> list[Outcome]:
    """What a function gave for many answers, one after another.

    Raises:
        TypeError: it is no sequence.
        ValueError: there are more or fewer than answers.
    """
    if hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, list | tuple):
        raise TypeError(f"a batched reward function gives a list, not {type(given).__name__}")
    if len(given) != count:
        raise ValueError(f"a batched reward function gave {len(given)} scores for {count} answers")
    return [outcome_of(one) for one in given]
