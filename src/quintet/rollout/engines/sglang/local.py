"""SGLang's `Engine` in this process; its schedulers are child processes."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quintet.errors import MachineError
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.sglang.protocol import CONTROLS, RequestRejectedError

if TYPE_CHECKING:
    from concurrent.futures import Future

CALL_SECONDS = 900.0
SHUTDOWN_SECONDS = 10.0
IO_STRUCT = "sglang.srt.managers.io_struct"

_DEATH = threading.Event()
"""Set when a child process of SGLang fails; SGLang reports that by SIGQUIT to this process."""


def record_child_death(_number: int, _frame: object) -> None:
    """SIGQUIT handler in place of SGLang's, which would end this process."""
    _DEATH.set()


class InProcessConnection:
    """Transport to an SGLang `Engine` in this process. All calls run in SGLang's event loop, in a thread."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Raises:
        EngineError: SGLang does not start.
        MachineError: this is not the main thread, the only one that receives signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise MachineError(
                "SGLang in this process must be started in the main thread", hint="use rollout.engine=sglang-server"
            )
        os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
        # see `launch.serve`
        os.environ |= {"SGLANG_VLM_CACHE_SIZE_MB": "0", "SGLANG_MM_AVOID_RETOKENIZE": "1"}
        self._previous_handler = signal.getsignal(signal.SIGQUIT)
        self._responses: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        others = {child.pid for child in multiprocessing.active_children()}
        try:
            self._engine = _start_engine(arguments)
        except EngineError:
            signal.signal(signal.SIGQUIT, self._previous_handler)
            _end({child.pid for child in multiprocessing.active_children()} - others)
            raise
        self._children = frozenset(self._engine.get_all_child_pids())
        self._ranks = int(arguments.get("tp_size", 1))
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="sglang-loop")
        self._thread.start()

    def generate(self, rid: str, body: Mapping[str, Any]) -> None:
        """Send a request; `collect` returns its response."""
        future = self._schedule(self._engine.async_generate(rid=rid, **body))
        future.add_done_callback(lambda done: self._responses.put((rid, _result(done))))

    def collect(self, seconds: float) -> list[tuple[str, Any]]:
        """Return the responses or errors since the last call; wait up to `seconds` for the first one.

        Raises:
            EngineError: a child process of SGLang died.
        """
        responses: list[tuple[str, Any]] = []
        try:
            responses.append(self._responses.get(timeout=seconds))
            while True:
                responses.append(self._responses.get_nowait())
        except queue.Empty:
            if (message := self._describe_failure()) is not None:
                raise EngineError(message) from None
        return responses

    def _describe_failure(self) -> str | None:
        """Message about dead child processes; None if all are alive."""
        dead = self._children - {child.pid for child in multiprocessing.active_children()}
        if dead:
            return f"a child process of SGLang died ({', '.join(map(str, sorted(dead)))}); see its output above"
        return "a child process of SGLang failed; see its output above" if _DEATH.is_set() else None

    def call(self, name: str, **fields: Any) -> None:
        """Send a control request and wait until it is done.

        Raises:
            EngineError: it failed.
        """
        manager, (record, _) = self._engine.tokenizer_manager, CONTROLS[name]
        if name == "abort_request":
            self._loop.call_soon_threadsafe(lambda: manager.abort_request(**fields))
            return
        arguments = () if record is None else (getattr(importlib.import_module(IO_STRUCT), record)(**fields),)
        with _sglang_errors(lambda error: self._describe_failure() or f"{name} failed in SGLang: {error}"):
            result = self._schedule(getattr(manager, name)(*arguments)).result(CALL_SECONDS)
        if (message := _error_message(result)) is not None:
            raise EngineError(f"{name} failed in SGLang: {message}")

    def load(self, version: int, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        """Load new weights from buckets in memory.

        Raises:
            EngineError: it failed.
        """
        session = hasattr(self._engine.tokenizer_manager, "begin_weight_update")
        if session:
            self.call("begin_weight_update")
        for bucket in buckets:
            flat, payloads = _flatten(bucket, self._ranks)
            self.call(
                "update_weights_from_tensor",
                serialized_named_tensors=payloads,
                load_format="flattened_bucket",
                weight_version=str(version),
                flush_cache=False,
            )
            # the child processes read from this memory until here
            del flat
        if session:
            self.call("end_weight_update")
        self.call("flush_cache")

    def close(self) -> None:
        """End the child processes of SGLang. SGLang's own shutdown would end every child of this process, also envs."""
        atexit.unregister(self._engine.shutdown)
        watchdog = getattr(self._engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SHUTDOWN_SECONDS)
        _end(self._children)
        signal.signal(signal.SIGQUIT, self._previous_handler)
        _DEATH.clear()

    def _schedule(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _start_engine(arguments: Mapping[str, Any]) -> Any:
    """Import SGLang and start its `Engine`."""
    engine: Callable[..., Any] = importlib.import_module("sglang.srt.entrypoints.engine").Engine
    _DEATH.clear()
    with _sglang_errors(lambda error: f"SGLang does not start: {type(error).__name__}: {error}"):
        return engine(**arguments, custom_sigquit_handler=record_child_death)


@contextmanager
def _sglang_errors(describe: Callable[[Exception], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # SGLang raises errors of any type
        raise EngineError(describe(error)) from error


def _result(done: Future[Any]) -> Any:
    """The response, or its error."""
    if done.cancelled():
        return RequestRejectedError("Cancelled", "the engine was closed")
    error = done.exception()
    if error is None:
        return done.result()
    return RequestRejectedError(type(error).__name__, str(error) or "no reason given")


def _error_message(result: Any) -> str | None:
    """The error in a result: a pair that starts with success, or a record with that field."""
    if isinstance(result, tuple) and result and result[0] is False:
        return str(result[1])
    return (
        str(getattr(result, "message", "") or "no reason given") if getattr(result, "success", True) is False else None
    )


def _flatten(bucket: Mapping[str, Tensor], ranks: int) -> tuple[Any, list[bytes]]:
    """The weights as one flat tensor with metadata, and a serialized payload per rank. SGLang's serializer passes the
    tensor to its child processes in shared memory."""
    flat = importlib.import_module("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorBucket(
        named_tensors=list(bucket.items())
    )
    serializer = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer
    payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return flat, [serializer.serialize(payload) for _ in range(ranks)]


def _end(children: Collection[int | None]) -> None:
    for child in multiprocessing.active_children():
        if child.pid in children:
            child.kill()
            child.join(SHUTDOWN_SECONDS)
