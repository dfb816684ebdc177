"""Rejected requests."""

from __future__ import annotations

from typing import Any


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
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the body of the error response in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def plain_body(self) -> dict[str, Any]:
        """Return the body of the error response of an environment service; VAGEN's clients show its `error`."""
        return {"error": self.message, "code": self.code}
