"""If these fail, a client waits for all work of another, or work for clients leaves no time for the engine."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from quintet.runtime.http_service.turns import FairSemaphore, Turns


def test_clients_take_turns_for_permits() -> None:
    order = list[str]()

    async def main() -> None:
        semaphore = FairSemaphore(1)
        await semaphore.acquire("a")

        async def wait(client: str) -> None:
            await semaphore.acquire(client)
            order.append(client)
            semaphore.release(0.0)

        waiting = [asyncio.ensure_future(wait(client)) for client in ("a", "a", "a", "b")]
        cancelled = asyncio.ensure_future(wait("c"))
        await asyncio.sleep(0)
        cancelled.cancel()
        semaphore.release(0.0)
        await asyncio.wait_for(asyncio.gather(*waiting), 10)

    asyncio.run(main())
    assert order == ["a", "b", "a", "a"]


def test_work_for_connections_leaves_time_for_the_engine() -> None:
    """A permit that was used for 20 ms rests for 40."""

    async def main() -> float:
        semaphore = FairSemaphore(1, rest_ratio=2.0)
        await semaphore.acquire("a")
        started = time.monotonic()
        semaphore.release(0.02)
        await asyncio.wait_for(semaphore.acquire("a"), 10)
        return time.monotonic() - started

    assert 0.04 <= asyncio.run(main()) < 1


def test_thousands_of_calls_of_a_client_wait_behind_one_of_another() -> None:
    order = list[str]()

    async def main() -> None:
        turns = Turns(rest_ratio=1.0)
        occupied = [asyncio.ensure_future(turns.compute("c", partial(time.sleep, 0.1))) for _ in range(4)]
        await asyncio.sleep(0)
        for client in ["a"] * 3000 + ["b"]:
            turns.call(client, partial(order.append, client))
        await asyncio.gather(*occupied)
        while len(order) < 3001:
            await asyncio.sleep(0.01)
        turns.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert "b" in order[:5]


def test_processor_time_before_a_call_counts_as_work() -> None:
    """Such as the time of receiving a large body, which would be taken from the engine."""
    called = list[float]()

    async def main() -> None:
        turns = Turns(rest_ratio=2.0)
        for _ in range(2):
            turns.call("a", lambda: called.append(time.monotonic()), is_large=True, seconds=0.02)
        while len(called) < 2:
            await asyncio.sleep(0.001)
        turns.close()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert called[1] - called[0] >= 0.04
