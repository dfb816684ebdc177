"""Rejected requests."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_CHARACTERS, MAX_PARAM_CHARACTERS = 4000, 200
"""Maximum sizes of parts of an error, which may repeat values of the request."""


class RequestError(Exception):
    """Rejected request, with HTTP status and the `type`, `code` and `param` of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:MAX_MESSAGE_CHARACTERS]}…"
        self.status = status
        self.kind = kind
        self.code = code
        self.param = None if param is None else param[:MAX_PARAM_CHARACTERS]

    def body(self) -> dict[str, Any]:
        """Return the body of the error response in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def plain_body(self) -> dict[str, Any]:
        """Return the body of the error response of an environment service; VAGEN's clients show its `error`."""
        return {"error": self.message, "code": self.code}
