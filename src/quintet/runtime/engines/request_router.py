"""Selection of an engine for each request, in constant time for any number of engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush

from quintet.records import Request

MAX_IMBALANCE = 1.5
"""How many times the requests of the least loaded engine another one may have, to use its cache."""
HEAP_ENTRIES_PER_ENGINE = 8
"""Size of the heap, relative to the number of engines, at which outdated entries are removed."""


class RequestRouter:
    """Counts the running requests of each engine.

    A request goes to the engine with the fewest running requests, or to one with about as few whose cache has its
    prompt, which all samples of a group share. The turns of an episode, which have the same id, go to the engine of its
    first turn, whose cache has the earlier turns.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_running = [0] * num_engines
        self._excluded: set[int] = set()
        self._least_loaded = [(0, index) for index in range(num_engines)]
        """Heap of `(running requests, engine)`; only entries with the current count of their engine are valid."""
        self._engine_by_id: dict[int, int] = {}
        self._engine_by_prompt: dict[int, int] = {}
        """Engine that had a prompt last, by hash."""
        self._continued: set[int] = set()
        """Ids of episodes that will have further requests."""

    def select(self, request: Request) -> int | None:
        """Return the number of the engine for a request; None if all are excluded."""
        index = self._engine_by_id.get(request.id)
        if index is not None and index not in self._excluded:
            return index
        least_loaded = self._find_least_loaded()
        if least_loaded is None:
            return None
        prompt, running = hash(request.prompt), self._num_running
        cached = self._engine_by_prompt.get(prompt, least_loaded)
        is_balanced = running[cached] <= MAX_IMBALANCE * running[least_loaded] + 1
        index = cached if is_balanced and cached not in self._excluded else least_loaded
        self._engine_by_prompt[prompt] = index
        return index

    def engine_of(self, request_id: int) -> int | None:
        """Return the engine of a running request or of an episode that will have further ones."""
        return self._engine_by_id.get(request_id)

    def add(self, request: Request, index: int) -> None:
        """Count a request of engine `index`."""
        self._engine_by_id[request.id] = index
        self._count(index, 1)
        if request.keep_kv_cache:
            self._continued.add(request.id)
        else:
            self._continued.discard(request.id)

    def complete(self, request_id: int) -> None:
        """Subtract a request that ended. The id of an episode that continues remains with its engine."""
        index = self._engine_by_id.get(request_id)
        if index is not None:
            self._count(index, -1)
        if request_id not in self._continued:
            self._engine_by_id.pop(request_id, None)

    def remove(self, request_id: int) -> None:
        """Subtract a request that its engine has lost, with the cache of its episode."""
        self._continued.discard(request_id)
        self.complete(request_id)

    def exclude(self, index: int) -> None:
        """Give engine `index` no requests until `include`."""
        self._excluded.add(index)

    def include(self, index: int) -> None:
        """Give engine `index` requests again."""
        if index in self._excluded:
            self._excluded.discard(index)
            heappush(self._least_loaded, (self._num_running[index], index))

    @contextmanager
    def without(self, index: int) -> Iterator[None]:
        """Exclude engine `index` within the context, unless there is no other one."""
        if len(self._excluded | {index}) == len(self._num_running) or index in self._excluded:
            yield
            return
        self.exclude(index)
        try:
            yield
        finally:
            self.include(index)

    def forget_prompts(self) -> None:
        """Forget which engine's cache has which prompt: the caches are dropped."""
        self._engine_by_prompt.clear()

    def _count(self, index: int, change: int) -> None:
        self._num_running[index] += change
        heappush(self._least_loaded, (self._num_running[index], index))
        if len(self._least_loaded) > HEAP_ENTRIES_PER_ENGINE * len(self._num_running) + 64:
            self._least_loaded = [(count, index) for index, count in enumerate(self._num_running)]
            heapify(self._least_loaded)

    def _find_least_loaded(self) -> int | None:
        """Return the engine with the fewest running requests, among equals the first one."""
        heap = self._least_loaded
        while heap:
            count, index = heap[0]
            if count == self._num_running[index] and index not in self._excluded:
                return index
            heappop(heap)
        return None
