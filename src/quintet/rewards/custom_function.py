"""Users' reward functions: a function in a file or module, or a URL that is called over HTTP."""

from __future__ import annotations

import inspect
import json
import math
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from quintet.errors import ConfigError
from quintet.registry import load_user_object
from quintet.sandbox.json_lines import encode

ScoreMessage = Mapping[str, Any]
"""`score`, and optionally `extracted_answer` and numbers under `reward_components`."""
KEY = "reward.function"
SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
MAX_RESPONSE_BYTES = 1 << 24


def is_url(reference: str) -> bool:
    """Return whether a function is called over HTTP."""
    return urlsplit(reference).scheme in ("http", "https")


def load_function(
    reference: str, arguments: Mapping[str, Any], *, batched: bool, timeout: float
) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function of the mapping of verl's four arguments (`data_source`, `solution_str`, …).

    Raises:
        ConfigError: there is no such function, importing it fails, or it does not accept the arguments.
    """
    if is_url(reference):
        return lambda message: _post(reference, {**message, **arguments}, timeout)
    function = load_user_object(reference, KEY, entry_points="quintet.rewards")
    _check_signature(function, reference, (*(BATCHED if batched else SINGLE), *arguments))
    return lambda message: function(**message, **arguments)


def _check_signature(function: Callable[..., Any], reference: str, names: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        message = f"{KEY} = {reference!r} cannot be called with {', '.join(names)}: {error}"
        hint = "set further arguments in reward.function_arguments, and accept unused ones with **others"
        raise ConfigError(message, key=KEY, value=reference, hint=hint) from error


def _post(url: str, message: Mapping[str, Any], timeout: float) -> Any:
    """Return the JSON response to a POST of JSON."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    request = urllib.request.Request(url, encode(message), headers, method="POST")  # noqa: S310 - see `is_url`
    with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
        return json.loads(response.read(MAX_RESPONSE_BYTES))


def parse_result(result: Any) -> ScoreMessage:
    """Parse the result of a function: a number, a mapping with `score`, or a sequence that begins with the score.

    Other numbers of a mapping become reward components; its `pred` is the extracted answer.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(result, Mapping):
        return _parse_mapping(result)
    if isinstance(result, list | tuple) and result:
        return {"score": _number(result[0])}
    return {"score": _number(result)}


def _parse_mapping(result: Mapping[str, Any]) -> ScoreMessage:
    if "score" not in result:
        raise TypeError(f"a reward function returned a mapping without `score`: {sorted(map(str, result))}")
    others = {str(name): float(value) for name, value in result.items() if name != "score" and _is_number(value)}
    answer = result.get("pred", result.get("predicted"))
    finite = {name: value for name, value in others.items() if math.isfinite(value)}
    return {
        "score": _number(result["score"]),
        "extracted_answer": None if answer is None else str(answer),
        "reward_components": finite,
    }


def _number(value: Any) -> float:
    if not _is_number(value):
        problem = f"not {type(value).__name__}"
        raise TypeError(f"a reward function must return a number or a mapping with `score`, {problem}")
    return float(value)


def _is_number(value: Any) -> bool:
    """Accept Python numbers, and one-element numbers of numpy and torch."""
    return isinstance(value, bool | int | float) or (hasattr(value, "item") and getattr(value, "size", 1) in (1, ()))


def parse_results(results: Any, count: int) -> list[ScoreMessage]:
    """Parse the results of a batched function.

    Raises:
        TypeError: it is not a sequence.
        ValueError: its length is not the number of responses.
    """
    if hasattr(results, "tolist"):
        results = results.tolist()
    if not isinstance(results, list | tuple):
        raise TypeError(f"a batched reward function must return a list, not {type(results).__name__}")
    if len(results) != count:
        raise ValueError(f"a batched reward function returned {len(results)} scores for {count} responses")
    return [parse_result(result) for result in results]
