"""Programs in a service of Sandbox Fusion, as verl's SandboxFusionTool runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from quintet.rewards.chat_endpoint import EndpointError, JsonEndpoint
from quintet.tools.tool import StatelessTool, result_text

ATTEMPTS: Final = 3
"""Attempts while the gateway of the service times out, with pauses of 1 and 2 seconds, as verl has them."""
REPLY_SECONDS: Final = 10.0
"""Time limit of a request beyond the limits of compilation and run."""
NO_OUTPUT: Final = "no stdout here"
"""Result of a program that did not end, as in verl."""


class CodeService(StatelessTool):
    """Output of a program that a code service runs."""

    description: ClassVar[str] = "Runs a program and returns its output and errors."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; it prints its results"}},
        "required": ["code"],
    }

    checks_arguments: ClassVar[bool] = True

    def __init__(self, url: str, timeout_seconds: float = 30, language: str = "python", memory_mb: int = 1024) -> None:
        """`url` is the service's URL; a call may set `timeout` and `language`."""
        self._url, self._timeout, self._language, self._memory = url, timeout_seconds, language, memory_mb

    def execute(self, arguments: Mapping[str, Any]) -> str:
        """Return standard output and standard error of the program, if it ended."""
        timeout = arguments.get("timeout", self._timeout)
        body = {
            "compile_timeout": timeout,
            "run_timeout": timeout,
            "code": str(arguments.get("code", "")),
            "stdin": None,
            "memory_limit_MB": self._memory,
            "language": arguments.get("language", self._language),
            "files": {},
            "fetch_files": [],
        }
        try:
            endpoint = JsonEndpoint.at_url(self._url, 2 * float(timeout) + REPLY_SECONDS)
            reply = endpoint.ask(body, ATTEMPTS, lambda error: error.error_type == "Http504")
            run = reply.get("run_result") or {}
        except (EndpointError, ValueError, TypeError, AttributeError):
            return NO_OUTPUT
        if run.get("status") != "Finished":
            return NO_OUTPUT
        return f"{result_text(run.get('stdout'))}{result_text(run.get('stderr'))}"
