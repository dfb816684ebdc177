"""If these fail, engines of a large run idle while others are overloaded, or each engine makes routing slower."""

from __future__ import annotations

import random
import time

import pytest

from quintet.records import Request
from quintet.runtime.engines.request_router import RequestRouter


def request(number: int, prompt: int | None = None, *, keep_kv_cache: bool = False) -> Request:
    return Request(number, (number if prompt is None else prompt,), 4, seed=0, keep_kv_cache=keep_kv_cache)


def add(router: RequestRouter, request: Request) -> int:
    index = router.select(request)
    assert index is not None
    router.add(request, index)
    return index


def test_the_least_loaded_engine_is_selected_in_any_order_of_completions() -> None:
    """Compares 5,000 random additions and completions with the minimum over all counts."""
    router, counts, running = RequestRouter(7), [0] * 7, {}
    choices = random.Random(3)
    for number in range(5000):
        if running and choices.random() < 0.5:
            ended = choices.choice(sorted(running))
            router.complete(ended)
            counts[running.pop(ended)] -= 1
        else:
            index = add(router, request(number))
            assert index == counts.index(min(counts))
            running[number] = index
            counts[index] += 1


def test_excluded_engines_get_no_requests_not_even_of_their_episodes() -> None:
    router = RequestRouter(2)
    assert add(router, request(0, keep_kv_cache=True)) == 0
    router.complete(0)
    router.exclude(0)
    assert [add(router, request(number)) for number in (0, 1, 2)] == [1, 1, 1]
    router.exclude(1)
    assert router.select(request(3)) is None
    router.include(0)
    assert add(router, request(3)) == 0


def test_a_lost_request_may_go_to_another_engine() -> None:
    router = RequestRouter(2)
    assert add(router, request(0, keep_kv_cache=True)) == 0
    router.remove(0)
    with router.without(0):
        assert add(router, request(0)) == 1
    assert add(router, request(1)) == 0


def test_the_only_engine_gets_its_lost_requests_again() -> None:
    router = RequestRouter(1)
    with router.without(0):
        assert add(router, request(0)) == 0


@pytest.mark.parametrize("num_engines", [1000])
def test_routing_does_not_get_slower_with_the_number_of_engines(num_engines: int) -> None:
    """A minimum over all engines takes 25 µs for each request to 1,000 engines: 2.5 s."""
    router = RequestRouter(num_engines)
    requests = [request(number) for number in range(100_000)]
    started = time.process_time()
    for each in requests:
        add(router, each)
        if each.id % 2:
            router.complete(each.id - 1)
    assert time.process_time() - started < 1.5
