"""If these fail, a request whose fields are all valid takes the memory or time of thousands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quintet.records import Request
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.request_costs import (
    MAX_ALL_LOGPROBS,
    MAX_LOGPROBS,
    MAX_LOGPROBS_PER_CLIENT,
    RequestCosts,
    UnfinishedRequests,
    request_costs,
)
from quintet.runtime.serving.request_schema import ChatBody, CompletionBody, parse

MESSAGES = [{"role": "user", "content": "a"}]


def costs(fields: dict[str, Any], context: int = 1 << 20) -> RequestCosts:
    kind = CompletionBody if "prompt" in fields else ChatBody
    body = parse(kind, json.dumps({"messages": MESSAGES} | fields if kind is ChatBody else fields).encode())
    request = Request(id=0, prompt=(1,), max_tokens=body.max_tokens or context - 1, seed=0)
    return request_costs(body, [request] * body.n, context, 0)


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"n": 128, "max_tokens": 16, "stop": ["a" * 1024] * 64}, "stop: 128 completions have up to 8388608 char"),
        ({"n": 5, "max_tokens": 1_000_000}, "max_tokens: 5 completions have up to 5000000 tokens"),
        ({"n": 128, "max_tokens": 4096, "logprobs": True, "top_logprobs": 20}, "logprobs: 128 completions have up to"),
        ({"prompt": "a", "max_tokens": 30_000, "logprobs": 20}, "logprobs: 1 completions have up to 630000 log-probs"),
    ],
)  # fmt: skip
def test_products_of_fields_are_refused_by_name_value_and_maximum(fields: dict[str, Any], value: str) -> None:
    with pytest.raises(RequestError, match=rf"{value}.* together, the maximum is \d+") as refused:
        costs(fields)
    assert refused.value.param == value.partition(":")[0]


def test_what_training_programs_ask_for_is_accepted() -> None:
    assert costs({"n": 64, "max_tokens": 8192, "logprobs": True}).logprobs == MAX_LOGPROBS
    assert costs({"n": 1, "max_tokens": 16, "stop": ["a" * 1024] * 64}).completions == 1
    assert costs({"n": 128, "max_tokens": 10**9}, context=32_768).logprobs == 0
    assert costs({"n": 8, "max_tokens": 10**9, "logprobs": True}, context=4096).logprobs == 8 * 4095


def test_unfinished_requests_of_a_client_leave_room_for_others() -> None:
    unfinished, large = UnfinishedRequests(), RequestCosts(1, MAX_LOGPROBS, 0)
    for _ in range(MAX_LOGPROBS_PER_CLIENT // MAX_LOGPROBS):
        unfinished.add("a", large)
    with pytest.raises(RequestError, match="log-probs: try again later") as refused:
        unfinished.add("a", large)
    assert refused.value.status == 503
    unfinished.add("a", RequestCosts(1, 0, 0))
    for _ in range((MAX_ALL_LOGPROBS - MAX_LOGPROBS_PER_CLIENT) // MAX_LOGPROBS):
        unfinished.add("b", large)
    with pytest.raises(RequestError):
        unfinished.add("c", large)
    unfinished.remove("a", large)
    unfinished.add("c", large)
