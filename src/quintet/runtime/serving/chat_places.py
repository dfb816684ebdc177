"""Where the fields of a chat request come from in the body of another route, for its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintet.runtime.http_service.request_error import RequestError

MESSAGE = re.compile(r"messages\.(\d+)(?:\.content\.(\d+))?(?:\.(.+))?")


@dataclass(frozen=True, slots=True)
class ChatPlace:
    """Place of a message of the chat in the body."""

    path: str
    """Of the message or item, such as `input.2`."""
    parts: Sequence[str] = ()
    """Of each part of its content."""


def renamed_error(error: RequestError, names: Mapping[str, str], places: Sequence[ChatPlace] = ()) -> RequestError:
    """Return an error about a chat with the names that another route has for its fields.

    `names` has the route's name of each field of the chat that it calls differently; those of fields of messages are
    without the message, such as `tool_call_id` and `image_url.url`.
    """
    param = error.param or ""
    renamed = _renamed(param, names, places)
    if renamed == param:
        return error
    message = error.message.replace(param, renamed, 1)
    if message == error.message:  # it names the field only
        first = param.partition(".")[0]
        message = message.replace(first, names.get(first, first), 1)
    return RequestError(message, status=error.status, kind=error.kind, code=error.code, param=renamed)


def _renamed(param: str, names: Mapping[str, str], places: Sequence[ChatPlace]) -> str:
    match = MESSAGE.fullmatch(param)
    if match is not None and int(match[1]) < len(places):
        place, part = places[int(match[1])], match[2]
        path = place.parts[int(part)] if part is not None and int(part) < len(place.parts) else place.path
        field = "" if match[3] is None else names.get(match[3], match[3])
        return f"{path}.{field}" if field else path
    first, dot, rest = param.partition(".")
    return f"{names.get(first, first)}{dot}{rest.replace('function.', '', 1) if first == 'tools' else rest}"
