"""SGLang as an engine: its `Engine` in this process, or its server."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quintet.errors import ConfigError
from quintet.policies.file_names import in_files
from quintet.records import Failure, Generation, Request, StopReason
from quintet.rollout.engine import Engine, EngineFault, EngineSetup
from quintet.rollout.sglang_options import KEY, Release, differing, installed, server_arguments
from quintet.rollout.sglang_protocol import (
    Garbled,
    Piece,
    Refused,
    Writing,
    ask_for_more,
    ask_for_scores,
    check,
    penalised,
    read_piece,
    read_scores,
)
from quintet.rollout.sglang_weights import Names, bundles

if TYPE_CHECKING:
    from quintet.rollout.sglang_server import Address

__all__ = ["SglangEngine", "open_sglang", "open_sglang_server"]

PATIENCE_SECONDS = 0.05
"""How long a step waits for an answer; it goes on with the first that comes."""
ABORT_SECONDS, ASK_AGAIN_SECONDS = 60.0, 0.2
"""A request that is dropped the moment it is sent may not be known yet: it is dropped again."""


class Link(Protocol):
    """SGLang, by whichever way."""

    def generate(self, rid: str, body: Mapping[str, Any]) -> None: ...

    def collect(self, seconds: float) -> list[tuple[str, Any]]: ...

    def call(self, name: str, **fields: Any) -> None: ...

    def load(self, version: int, bundles: Iterable[Mapping[str, Tensor]]) -> None: ...

    def close(self) -> None: ...


def open_sglang(setup: EngineSetup) -> Engine:
    """SGLang's `Engine` in this process; a server where `server_url` or `server_python` is given.

    Raises:
        ConfigError: an option that SGLang, or the release here, doesn't have.
        EngineFault: it doesn't come up.
        MachineError: SGLang isn't installed here.
    """
    if setup.options.server_url is not None or setup.options.server_python is not None:
        return open_sglang_server(setup)
    from quintet.rollout.sglang_local import LocalLink

    arguments = server_arguments(setup, installed())
    return SglangEngine(LocalLink(arguments), setup, texts=not arguments["skip_tokenizer_init"])


def open_sglang_server(setup: EngineSetup) -> Engine:
    """An SGLang server: the one at `server_url`, else one on loopback that ends with this run.

    Raises:
        ConfigError: an option that SGLang, or the release there, doesn't have, or that the server runs without.
        EngineFault: it can't be reached, or doesn't come up.
        MachineError: none is to be reached and SGLang isn't installed here.
    """
    from quintet.rollout.sglang_server import Address, OwnServer, ServerLink

    place = setup.options.server_weights_dir
    weights_dir = None if place is None else Path(place).expanduser()
    if setup.options.server_url is None:
        python = setup.options.server_python and os.path.expanduser(setup.options.server_python)
        arguments = server_arguments(setup, installed(python))
        own = OwnServer(arguments, python, shown=setup.options.log_statistics)
        link = ServerLink(own.address, own, weights_dir)
        return SglangEngine(link, setup, texts=not arguments["skip_tokenizer_init"])
    address = Address(
        setup.options.server_url, os.environ.get("SGLANG_API_KEY"), os.environ.get("SGLANG_ADMIN_API_KEY")
    )
    running = _running(address, setup)
    # an input must stay below that, and what is scored is a whole answer
    longest = int(running.get("max_req_input_len") or setup.context + 1)
    context = min(setup.context, longest - 1)
    link = ServerLink(address, None, weights_dir)
    return SglangEngine(link, setup, context=context, texts=not running.get("skip_tokenizer_init", False))


def _running(address: Address, setup: EngineSetup) -> Mapping[str, Any]:
    """What a server that runs already was started with.

    Raises:
        ConfigError: it isn't what the options ask for, or has no way to get at the weights.
        EngineFault: it can't be reached, or is none of SGLang's.
    """
    if setup.options.server_weights_dir is None and not address.here:
        key = f"{KEY}.server_weights_dir"
        raise ConfigError(
            f"{KEY}.server_url = {address.url}: a server elsewhere reads new weights from a directory; none is named",
            key=key,
            hint=f"give {key} a directory that this machine and the server have under the same name",
        )
    try:
        running = address.ask("/server_info")
    except (OSError, Refused) as error:
        raise EngineFault(f"no SGLang server answers at {address.url}: {error}") from error
    if not isinstance(running, dict) or "model_path" not in running:
        raise EngineFault(f"what answers at {address.url} is no SGLang server")
    release = Release(f"SGLang {running.get('version', '')} at {address.url}", frozenset(running))
    if (fault := differing(setup.options, running, release)) is not None:
        raise fault
    return running


class SglangEngine:
    """Requests on their way to SGLang, which batches them as they come."""

    def __init__(self, link: Link, setup: EngineSetup, *, context: int | None = None, texts: bool = True) -> None:
        """`context` is the server's, where it isn't the one of the setup; `texts` says that it has a tokenizer."""
        self.weight_version = 0
        self._link = link
        self._setup = setup
        self._context = context or setup.context
        self._texts = texts
        self._names = Names.of(setup)
        self._waiting: deque[Writing] = deque()
        self._running: dict[str, Writing] = {}
        self._ended: list[Generation] = []
        # SGLang drops every request whose name begins with the one it is given: none begins with another
        self._tag, self._count = uuid.uuid4().hex, itertools.count()
        self._asleep: list[str] = []
        self._closed = False

    @property
    def context(self) -> int:
        """See `Engine.context`."""
        return self._context

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def submit(self, request: Request) -> None:
        """See `Engine.submit`.

        Raises:
            ConfigError: SGLang, as it was started, can't serve such a request.
        """
        if self._asleep:
            raise RuntimeError("the engine sleeps")
        check(request, self._context, texts=self._texts)
        self._waiting.append(Writing(request, self.weight_version))

    def step(self) -> list[Generation]:
        """See `Engine.step`: waits a moment for the next answer."""
        self._send_waiting()
        if self._running:
            self._take(self._link.collect(0.0 if self._ended else PATIENCE_SECONDS))
            self._send_waiting()
        ended, self._ended = self._ended, []
        return ended

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`."""
        wanted = set(ids)
        for writing in [one for one in self._waiting if one.request.id in wanted]:
            self._waiting.remove(writing)
            self._end(writing, StopReason.ABORT)
        end = time.monotonic() + ABORT_SECONDS
        while running := [rid for rid, one in self._running.items() if one.request.id in wanted]:
            if time.monotonic() > end:
                raise EngineFault(f"SGLang doesn't drop requests: {len(running)} still run after {ABORT_SECONDS:.0f} s")
            for rid in running:
                self._drop(rid)
            self._take(self._link.collect(ASK_AGAIN_SECONDS))
        dropped = [one for one in self._ended if one.id in wanted]
        self._ended = [one for one in self._ended if one.id not in wanted]
        return dropped

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load_weights`. Weights that are asleep wake for it, the cache sleeps on."""
        if "weights" in self._asleep:
            self._resume(["weights"])
        with self._held():
            stream = self._names.checked(in_files(self._setup.model, weights))
            self._link.load(version, bundles(stream, self._setup.dtype))
        self.weight_version = version

    def forget(self) -> None:
        """See `Engine.forget`."""
        with self._held():
            self._link.call("flush_cache")

    def sleep(self) -> None:
        """Give back the cache, and the weights where they are to move to the CPU; without `sleep_between_steps` and
        `offload` SGLang keeps its memory, and only what is computed is forgotten."""
        if self.busy:
            raise RuntimeError("the engine can't sleep while requests run")
        options = self._setup.options
        tags = ["kv_cache"] * (options.sleep_between_steps or options.offload) + ["weights"] * options.offload
        self.forget()
        if tags:
            self._link.call("release_memory_occupation", tags=tags)
        self._asleep = tags

    def wake(self) -> None:
        """See `Engine.wake`."""
        if self._asleep:
            self._resume(self._asleep)

    def _resume(self, tags: list[str]) -> None:
        self._link.call("resume_memory_occupation", tags=tags)
        self._asleep = [tag for tag in self._asleep if tag not in tags]

    def close(self) -> None:
        """See `Engine.close`. A server that isn't ours is told to drop what it still writes for us."""
        if self._closed:
            return
        self._closed = True
        try:
            for rid in self._running:
                self._link.call("abort_request", rid=rid)
        except EngineFault:
            self._running.clear()
        finally:
            self._link.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """While inside, nothing is written; what runs gives up its cache and is computed anew afterwards."""
        if not self._running:
            yield
            return
        self._link.call("pause_generation", mode="retract")
        try:
            yield
        finally:
            self._link.call("continue_generation")

    def _send_waiting(self) -> None:
        while self._waiting and len(self._running) < self._setup.slots:
            writing = self._waiting.popleft()
            writing.version = self.weight_version
            self._send(writing, ask_for_more(writing, self._context))

    def _send(self, writing: Writing, body: Mapping[str, Any]) -> None:
        rid = f"{self._tag}{next(self._count):012d}"
        self._running[rid] = writing
        self._link.generate(rid, body)

    def _drop(self, rid: str) -> None:
        writing = self._running[rid]
        writing.aborted = True
        if writing.reason is None:
            self._link.call("abort_request", rid=rid)

    def _take(self, answers: Iterable[tuple[str, Any]]) -> None:
        """Read answers; each ends its request, or has it go on."""
        for rid, answer in answers:
            writing = self._running.pop(rid)
            try:
                if isinstance(answer, Exception):
                    raise answer
                self._read(writing, answer)
            except (Refused, Garbled, OSError) as error:
                kind = error.kind if isinstance(error, Refused) else type(error).__name__
                self._end(writing, StopReason.FAILED, Failure("engine", kind, str(error)))

    def _read(self, writing: Writing, answer: Mapping[str, Any]) -> None:
        """Raises:
        Garbled: it is of no use.
        """
        if writing.reason is not None:
            writing.logprobs = read_scores(answer, writing.tokens)
            self._end(writing, writing.reason)
            return
        piece = read_piece(answer)
        writing.add(piece, self._versions(piece, writing))
        reason = writing.end_of(piece, self._context)
        if reason is StopReason.ABORT and not writing.aborted:
            raise Garbled(f"SGLang dropped the request: {piece.message or 'it says no more'}")
        if reason is None and not writing.aborted:
            writing.version = self.weight_version
            self._send(writing, ask_for_more(writing, self._context))
        elif penalised(writing.request) and writing.tokens:
            self._score(writing, reason or StopReason.ABORT)
        else:
            self._end(writing, reason or StopReason.ABORT)

    def _versions(self, piece: Piece, writing: Writing) -> list[tuple[int, int]]:
        """Stretches of an answer and whose weights wrote them.

        Raises:
            Garbled: weights came in between, and SGLang doesn't say where.
        """
        if piece.versions:
            return [(place, int(name) if name.isdecimal() else writing.version) for place, name in piece.versions]
        if piece.tokens and writing.version != self.weight_version:
            raise Garbled("new weights came while it was written, and this SGLang doesn't say where")
        return [(0, writing.version)] if piece.tokens else []

    def _score(self, writing: Writing, reason: StopReason) -> None:
        """Ask for the log-probs without penalties.

        Raises:
            Garbled: the weights that wrote are gone.
        """
        if {version for _, version in writing.versions} != {self.weight_version}:
            raise Garbled("its log-probs without penalties can't be had any more: new weights have come")
        writing.reason = reason
        self._send(writing, ask_for_scores(writing))

    def _end(self, writing: Writing, reason: StopReason, failure: Failure | None = None) -> None:
        first = writing.versions[0][1] if writing.versions else writing.version
        whole = len(writing.tokens) == len(writing.logprobs)
        self._ended.append(
            Generation(
                writing.request.id,
                tuple(writing.tokens) if whole else (),
                tuple(writing.logprobs) if whole else (),
                StopReason.ABORT if writing.aborted and failure is None else reason,
                first,
                tuple(writing.versions[1:]),
                failure,
            )
        )
