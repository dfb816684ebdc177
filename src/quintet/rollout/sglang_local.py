"""SGLang's own `Engine`, opened in this process; its schedulers are processes beneath it."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Collection, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quintet.errors import MachineError
from quintet.rollout.engine import EngineFault
from quintet.rollout.sglang_protocol import CONTROLS, Refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["LocalLink", "heed_a_death"]

CALL_SECONDS = 900.0
SHUT_SECONDS = 10.0
IO_STRUCT = "sglang.srt.managers.io_struct"

_DEATH = threading.Event()
"""One of the processes beneath has said that it fails; SGLang says so by SIGQUIT, to the whole process."""


def heed_a_death(_number: int, _frame: object) -> None:
    """SGLang's own handler would end this process; here only the engine has failed."""
    _DEATH.set()


class LocalLink:
    """What the engine does through an `Engine` of this process.

    SGLang's event loop runs in a thread; everything that SGLang is asked is asked there.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Raises:
        EngineFault: it doesn't come up.
        MachineError: this isn't the main thread, the only one that hears of a process's failing.
        """
        if threading.current_thread() is not threading.main_thread():
            raise MachineError(
                "SGLang in this process must be opened in its main thread", hint="take rollout.engine: sglang-server"
            )
        os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
        self._before = signal.getsignal(signal.SIGQUIT)
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        others = {child.pid for child in multiprocessing.active_children()}
        try:
            self._engine = _opened(arguments)
        except EngineFault:
            signal.signal(signal.SIGQUIT, self._before)
            _end({child.pid for child in multiprocessing.active_children()} - others)
            raise
        self._children = frozenset(self._engine.get_all_child_pids())
        self._ranks = int(arguments.get("tp_size", 1))
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="sglang-loop")
        self._thread.start()

    def generate(self, rid: str, body: Mapping[str, Any]) -> None:
        """Send a request; its answer comes by `collect`."""
        future = self._soon(self._engine.async_generate(rid=rid, **body))
        future.add_done_callback(lambda done: self._answers.put((rid, _result(done))))

    def collect(self, seconds: float) -> list[tuple[str, Any]]:
        """Answers, or why there are none, since the last call; waits for the first one so long.

        Raises:
            EngineFault: a process of the engine is gone.
        """
        found: list[tuple[str, Any]] = []
        try:
            found.append(self._answers.get(timeout=seconds))
            while True:
                found.append(self._answers.get_nowait())
        except queue.Empty:
            if (fault := self.fault()) is not None:
                raise EngineFault(fault) from None
        return found

    def fault(self) -> str | None:
        """Which process is gone; null where all are there."""
        gone = self._children - {child.pid for child in multiprocessing.active_children()}
        if gone:
            return f"a process of SGLang's has ended ({', '.join(map(str, sorted(gone)))}); what it said is above"
        return "a process of SGLang's has failed; what it said is above" if _DEATH.is_set() else None

    def call(self, name: str, **fields: Any) -> None:
        """Ask for something besides generation, and wait until it is done.

        Raises:
            EngineFault: it isn't done.
        """
        manager, (record, _) = self._engine.tokenizer_manager, CONTROLS[name]
        if name == "abort_request":
            self._loop.call_soon_threadsafe(lambda: manager.abort_request(**fields))
            return
        given = () if record is None else (getattr(importlib.import_module(IO_STRUCT), record)(**fields),)
        try:
            said = self._soon(getattr(manager, name)(*given)).result(CALL_SECONDS)
        except Exception as error:
            raise EngineFault(self.fault() or f"SGLang didn't do {name}: {error}") from error
        if (why := _objection(said)) is not None:
            raise EngineFault(f"SGLang didn't do {name}: {why}")

    def load(self, version: int, bundles: Iterable[Mapping[str, Tensor]]) -> None:
        """New weights, handed over in memory, some at a time.

        Raises:
            EngineFault: it couldn't take them.
        """
        session = hasattr(self._engine.tokenizer_manager, "begin_weight_update")
        if session:
            self.call("begin_weight_update")
        for bundle in bundles:
            flat, payloads = _flattened(bundle, self._ranks)
            self.call(
                "update_weights_from_tensor",
                serialized_named_tensors=payloads,
                load_format="flattened_bucket",
                weight_version=str(version),
                flush_cache=False,
            )
            # until here the processes read it where it is
            del flat
        if session:
            self.call("end_weight_update")
        self.call("flush_cache")

    def close(self) -> None:
        """End the processes beneath. SGLang's own way would end every child of this process, worlds and judges too."""
        atexit.unregister(self._engine.shutdown)
        watchdog = getattr(self._engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SHUT_SECONDS)
        _end(self._children)
        signal.signal(signal.SIGQUIT, self._before)
        _DEATH.clear()

    def _soon(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _opened(arguments: Mapping[str, Any]) -> Any:
    """SGLang's `Engine`; only here it is imported."""
    engine: Callable[..., Any] = importlib.import_module("sglang.srt.entrypoints.engine").Engine
    _DEATH.clear()
    try:
        return engine(**arguments, custom_sigquit_handler=heed_a_death)
    except Exception as error:
        raise EngineFault(f"SGLang doesn't come up: {type(error).__name__}: {error}") from error


def _result(done: Future[Any]) -> Any:
    """An answer, or the error instead of it."""
    if done.cancelled():
        return Refused("Cancelled", "the engine was closed")
    error = done.exception()
    if error is None:
        return done.result()
    return Refused(type(error).__name__, str(error) or "for no reason given")


def _objection(said: Any) -> str | None:
    """Why it didn't, in whichever form SGLang says so: a pair that begins with success, or a record that has it."""
    if isinstance(said, tuple) and said and said[0] is False:
        return str(said[1])
    return str(getattr(said, "message", "") or "it failed") if getattr(said, "success", True) is False else None


def _flattened(bundle: Mapping[str, Tensor], ranks: int) -> tuple[Any, list[bytes]]:
    """The weights as one tensor with the place of each, and what every rank is told of it. SGLang's own serialiser
    hands it to the processes that SGLang started, in shared memory: nothing comes back that way."""
    bucket = importlib.import_module("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorBucket(
        named_tensors=list(bundle.items())
    )
    serialiser = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer
    payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return bucket, [serialiser.serialize(payload) for _ in range(ranks)]


def _end(children: Collection[int | None]) -> None:
    """These processes, and no others."""
    for child in multiprocessing.active_children():
        if child.pid in children:
            child.kill()
            child.join(SHUT_SECONDS)
