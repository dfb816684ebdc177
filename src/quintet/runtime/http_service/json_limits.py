"""Limits of JSON in the bodies of requests, because many values and deep nesting take seconds to handle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.runtime.http_service.request_error import RequestError


def check_separators(data: bytes, maxima: Mapping[str, int]) -> None:
    """Check how often characters occur in a body before it is parsed.

    Raises:
        RequestError: one occurs more often than its maximum.
    """
    for separator, maximum in maxima.items():
        if (count := data.count(separator.encode())) > maximum:
            message = f"the body contains {count} times {separator!r}, the maximum is {maximum}"
            raise RequestError(message, status=413, code="too_large")


def check_depth(value: Any, maximum: int) -> None:
    """
    Raises:
        RequestError: objects and lists are nested too deeply; handling them recursively would fail.
    """
    level = [value]
    for _ in range(maximum):
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise RequestError(f"the body is nested more than {maximum} levels deep", code="invalid_json")
