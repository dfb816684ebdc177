"""Server of a judge's model that the run has started, as its client sees it."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quintet.errors import MachineError

CONTROL_SECONDS = 900.0
"""Timeout of moving a large model between device memory and host memory."""


@dataclass(frozen=True, slots=True)
class JudgeServer:
    """Address of a server of `quintet.runtime.serving.launched`."""

    url: str
    """Base URL, up to `/v1`."""
    token: str
    sleeps: bool
    """Whether it has to leave the device's memory to others while there is nothing to judge."""
    request_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a request that the chat template of the server needs."""
    close: Callable[[], None] = lambda: None
    """Ends the server, if this process has started it; others end with theirs."""

    def control(self, action: Literal["sleep", "wake_up"]) -> None:
        """Request that the server frees the memory of its device, or loads the weights again.

        Raises:
            MachineError: it does not answer.
        """
        address = f"{self.url.removesuffix('/v1')}/{action}"
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(address, b"", headers, method="POST")  # noqa: S310 - started by the run
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=CONTROL_SECONDS) as response:
                response.read()
        except (OSError, http.client.HTTPException) as error:
            message = f"the judge's server at {self.url} does not answer: {error}"
            raise MachineError(message, "rerun the same command to continue from the last checkpoint") from error
