"""What requests cost: bounds of a request, and of all unfinished requests of a client."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quintet.records import Request
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.request_schema import Body, ChatBody, CompletionBody

MAX_COMPLETIONS = 4096
"""Maximum number of completions per request."""
MAX_RESPONSE_TOKENS = 1 << 22
"""Maximum number of tokens of all completions of a request, 70 bytes each."""
MAX_STOP_CHARACTERS = 1 << 16
"""Maximum number of characters of the stop strings, in each completion of a request."""
MAX_LOGPROBS, MAX_LOGPROBS_PER_CLIENT, MAX_ALL_LOGPROBS = 1 << 19, 1 << 21, 1 << 22
"""Maximum number of log-probs in the response to a request, to all unfinished requests of a client, and of all clients:
400 bytes each."""
MAX_UNFINISHED = 4 * MAX_COMPLETIONS
"""Maximum number of unfinished completions per client."""
MAX_IMAGE_BYTES, MAX_IMAGE_BYTES_PER_CLIENT = 1 << 30, 1 << 28
"""Maximum size of the images of all unfinished requests, and of those of a client."""


@dataclass(frozen=True, slots=True)
class RequestCosts:
    """Costs of a request until it is finished."""

    completions: int
    logprobs: int
    image_bytes: int


def check_completions(num_prompts: int, num_choices: int) -> None:
    """
    Raises:
        RequestError: there are too many.
    """
    if num_prompts * num_choices > MAX_COMPLETIONS:
        message = f"{num_prompts} prompts times n = {num_choices} is more than {MAX_COMPLETIONS} completions"
        raise RequestError(message, param="n")


def request_costs(body: Body, requests: Sequence[Request], context: int, image_bytes: int) -> RequestCosts:
    """Return the costs of a request, given as one request to the engine per completion, with a context of that many
    tokens.

    Raises:
        RequestError: one of them is above its maximum.
    """
    count = len(requests)
    num_tokens = sum(min(request.max_tokens, context - len(request.prompt)) for request in requests)
    echoed = sum(len(request.prompt) for request in requests if request.prompt_logprobs is not None)
    stop_characters = count * sum(map(len, body.stops))
    logprobs = (num_tokens + echoed) * _logprobs_per_token(body)
    for param, value, unit, maximum in (
        ("max_tokens", num_tokens, "tokens", MAX_RESPONSE_TOKENS),
        ("stop", stop_characters, "characters of stop strings", MAX_STOP_CHARACTERS),
        ("logprobs", logprobs, "log-probs", MAX_LOGPROBS),
    ):
        if value > maximum:
            message = f"{param}: {count} completions have up to {value} {unit} together, the maximum is {maximum}"
            raise RequestError(message, param=param)
    return RequestCosts(count, logprobs, image_bytes)


def _logprobs_per_token(body: Body) -> int:
    if isinstance(body, ChatBody):
        return 1 + body.top_logprobs if body.logprobs else 0
    return 1 + body.logprobs if isinstance(body, CompletionBody) and body.logprobs is not None else 0


class UnfinishedRequests:
    """Costs of the unfinished requests by client. Thread-safe."""

    def __init__(self) -> None:
        self._completions: Counter[str] = Counter()
        self._logprobs: Counter[str] = Counter()
        self._image_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, client: str, costs: RequestCosts) -> None:
        """Add a request of a client.

        Raises:
            RequestError: its unfinished requests, or those of all clients, would cost too much.
        """
        with self._lock:
            unfinished = self._completions[client]
            if unfinished + costs.completions > MAX_UNFINISHED:
                message = f"{unfinished} completions of this client are unfinished, the maximum is {MAX_UNFINISHED}"
                raise RequestError(message, status=429, kind="rate_limit_error", code="too_many_requests")
            logprobs, images = self._logprobs, self._image_bytes
            if _exceeds(logprobs, client, costs.logprobs, MAX_LOGPROBS_PER_CLIENT, MAX_ALL_LOGPROBS):
                raise _overloaded(f"unfinished requests have up to {logprobs.total()} log-probs")
            if _exceeds(images, client, costs.image_bytes, MAX_IMAGE_BYTES_PER_CLIENT, MAX_IMAGE_BYTES):
                raise _overloaded(f"the images of unfinished requests take {images.total() >> 20} MiB")
            self._completions[client] += costs.completions
            logprobs[client] += costs.logprobs
            images[client] += costs.image_bytes

    def remove(self, client: str, costs: RequestCosts) -> None:
        """Remove a finished request."""
        with self._lock:
            self._completions[client] -= costs.completions
            self._logprobs[client] -= costs.logprobs
            self._image_bytes[client] -= costs.image_bytes
            for counter in (self._completions, self._logprobs, self._image_bytes):
                counter += Counter()  # drops clients without requests


def _exceeds(counter: Counter[str], client: str, added: int, maximum: int, total_maximum: int) -> bool:
    return added > 0 and (counter[client] + added > maximum or counter.total() + added > total_maximum)


def _overloaded(problem: str) -> RequestError:
    return RequestError(f"{problem}: try again later", status=503, kind="server_error", code="overloaded")
