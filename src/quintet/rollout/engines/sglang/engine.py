"""SGLang engine: SGLang's `Engine` in this process, or an SGLang server."""

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
from quintet.policies.hf_weight_names import hf_named_weights
from quintet.policies.vision.image_tokens import check_images
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.engine import Engine, EngineError, EngineSetup
from quintet.rollout.engines.sglang.options import KEY, Release, find_mismatch, installed_release, server_arguments
from quintet.rollout.engines.sglang.protocol import (
    ImageData,
    MalformedResponseError,
    PendingRequest,
    RequestRejectedError,
    ResponseChunk,
    check_request,
    generate_body,
    has_penalties,
    parse_chunk,
    parse_scores,
    score_body,
)
from quintet.rollout.engines.sglang.weight_sync import WeightNames, buckets
from quintet.rollout.engines.weight_source import WeightSource

if TYPE_CHECKING:
    from quintet.rollout.engines.sglang.server import ServerAddress

STEP_SECONDS = 0.05
"""Maximum time that a step waits for responses."""
ABORT_SECONDS, ABORT_RETRY_SECONDS = 60.0, 0.2
"""SGLang may not know a request yet that was just sent: aborts are repeated."""


class SglangConnection(Protocol):
    """Connection to SGLang: `InProcessConnection` or `HttpConnection`."""

    def generate(self, rid: str, body: Mapping[str, Any]) -> None: ...

    def collect(self, seconds: float) -> list[tuple[str, Any]]: ...

    def call(self, name: str, **fields: Any) -> None: ...

    def load(self, version: int, buckets: Iterable[Mapping[str, Tensor]]) -> None: ...

    def close(self) -> None: ...


def build_sglang_engine(setup: EngineSetup) -> Engine:
    """Start SGLang in this process, or use a server if `server_url` or `server_python` is set.

    Raises:
        ConfigError: SGLang, or its installed release, does not have an option.
        EngineError: SGLang does not start.
        MachineError: SGLang is not installed.
    """
    if setup.options.server_url is not None or setup.options.server_python is not None:
        return build_sglang_server_engine(setup)
    from quintet.rollout.engines.sglang.local import InProcessConnection

    arguments = server_arguments(setup, installed_release())
    return SglangEngine(InProcessConnection(arguments), setup, has_tokenizer=not arguments["skip_tokenizer_init"])


def build_sglang_server_engine(setup: EngineSetup) -> Engine:
    """Connect to the SGLang server at `server_url`, or launch one on loopback that ends with this run.

    Raises:
        ConfigError: SGLang, or its release, does not have an option, or the running server has another value.
        EngineError: the server cannot be reached, or does not start.
        MachineError: a server must be launched and SGLang is not installed.
    """
    from quintet.rollout.engines.sglang.server import HttpConnection, LaunchedServer, ServerAddress

    directory = setup.options.server_weights_dir
    weights_dir = None if directory is None else Path(directory).expanduser()
    if setup.options.server_url is None:
        python = setup.options.server_python and os.path.expanduser(setup.options.server_python)
        arguments = server_arguments(setup, installed_release(python))
        launched = LaunchedServer(arguments, python, show_output=setup.options.log_statistics)
        transport = HttpConnection(launched.address, launched, weights_dir)
        return SglangEngine(transport, setup, has_tokenizer=not arguments["skip_tokenizer_init"])
    address = ServerAddress(
        setup.options.server_url, os.environ.get("SGLANG_API_KEY"), os.environ.get("SGLANG_ADMIN_API_KEY")
    )
    running = _server_info(address, setup)
    # inputs must be shorter than max_req_input_len, and scoring sends the complete response as input
    longest = int(running.get("max_req_input_len") or setup.max_model_len + 1)
    max_model_len = min(setup.max_model_len, longest - 1)
    transport = HttpConnection(address, None, weights_dir)
    has_tokenizer = not running.get("skip_tokenizer_init", False)
    return SglangEngine(transport, setup, max_model_len=max_model_len, has_tokenizer=has_tokenizer)


def _server_info(address: ServerAddress, setup: EngineSetup) -> Mapping[str, Any]:
    """The arguments of a running server.

    Raises:
        ConfigError: they differ from the options, or the server cannot read new weights.
        EngineError: the server cannot be reached, or is not an SGLang server.
    """
    if setup.options.server_weights_dir is None and not address.is_local:
        key = f"{KEY}.server_weights_dir"
        raise ConfigError(
            f"{KEY}.server_url = {address.url}: a server on another machine reads new weights from a shared directory, "
            f"and {key} is not set",
            key=key,
            hint=f"set {key} to a directory that has the same path on this machine and on the server",
        )
    try:
        running = address.request("/server_info")
    except (OSError, RequestRejectedError) as error:
        raise EngineError(f"no SGLang server responds at {address.url}: {error}") from error
    if not isinstance(running, dict) or "model_path" not in running:
        raise EngineError(f"the server at {address.url} is not an SGLang server")
    release = Release(f"SGLang {running.get('version', '')} at {address.url}", frozenset(running))
    if (mismatch := find_mismatch(setup.options, running, release)) is not None:
        raise mismatch
    return running


class SglangEngine:
    """`Engine` that sends requests to SGLang, which schedules and batches them."""

    def __init__(
        self,
        transport: SglangConnection,
        setup: EngineSetup,
        *,
        max_model_len: int | None = None,
        has_tokenizer: bool = True,
    ) -> None:
        """`max_model_len` is the server's context length in tokens (default: the setup's)."""
        self.weight_version = 0
        self._transport = transport
        self._setup = setup
        self._max_model_len = max_model_len or setup.max_model_len
        self._has_tokenizer = has_tokenizer
        self._weight_names = WeightNames.from_setup(setup)
        self._images = ImageData.from_model(setup.model)
        self._waiting: deque[PendingRequest] = deque()
        self._running: dict[str, PendingRequest] = {}
        self._finished: list[Generation] = []
        # SGLang aborts all requests whose id starts with the given id: no id may be a prefix of another
        self._id_prefix, self._counter = uuid.uuid4().hex, itertools.count()
        self._sleeping: list[str] = []
        self._closed = False

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._finished)

    def add_request(self, request: Request) -> None:
        """See `Engine.add_request`.

        Raises:
            ConfigError: SGLang, as it was started, cannot serve the request.
        """
        if self._sleeping:
            raise RuntimeError("the engine is asleep")
        check_request(request, self._max_model_len, has_tokenizer=self._has_tokenizer)
        check_images(request, supported=self._images is not None)
        self._waiting.append(PendingRequest(request, self.weight_version))

    def step(self) -> list[Generation]:
        """See `Engine.step`; waits up to `STEP_SECONDS` for the next response."""
        self._send_waiting()
        if self._running:
            self._handle_responses(self._transport.collect(0.0 if self._finished else STEP_SECONDS))
            self._send_waiting()
        finished, self._finished = self._finished, []
        return finished

    def abort(self, ids: Collection[int]) -> list[Generation]:
        aborted = set(ids)
        for pending in [unfinished for unfinished in self._waiting if unfinished.request.id in aborted]:
            self._waiting.remove(pending)
            self._finish(pending, FinishReason.ABORT)
        deadline = time.monotonic() + ABORT_SECONDS
        while running := [rid for rid, unfinished in self._running.items() if unfinished.request.id in aborted]:
            if time.monotonic() > deadline:
                message = f"SGLang does not abort requests: {len(running)} still run after {ABORT_SECONDS:.0f} s"
                raise EngineError(message)
            for rid in running:
                self._abort_running(rid)
            self._handle_responses(self._transport.collect(ABORT_RETRY_SECONDS))
        generations = [generation for generation in self._finished if generation.id in aborted]
        self._finished = [generation for generation in self._finished if generation.id not in aborted]
        return generations

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """See `Engine.load_weights`. Sleeping weights are woken up, a sleeping KV cache is not."""
        if "weights" in self._sleeping:
            self._wake_up(["weights"])
        with self._generation_paused():
            checked = self._weight_names.check(hf_named_weights(self._setup.model, weights.tensors()))
            self._transport.load(version, buckets(checked, self._setup.dtype))
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        with self._generation_paused():
            self._transport.call("flush_cache")

    def sleep(self) -> None:
        """Free the KV cache with `sleep_between_steps`, and also the weights with `offload`; without both only the
        prefix cache is reset."""
        if self.busy:
            raise RuntimeError("the engine cannot sleep while requests are running")
        options = self._setup.options
        tags = ["kv_cache"] * (options.sleep_between_steps or options.offload) + ["weights"] * options.offload
        self.reset_prefix_cache()
        if tags:
            self._transport.call("release_memory_occupation", tags=tags)
        self._sleeping = tags

    def wake_up(self) -> None:
        if self._sleeping:
            self._wake_up(self._sleeping)

    def _wake_up(self, tags: list[str]) -> None:
        self._transport.call("resume_memory_occupation", tags=tags)
        self._sleeping = [tag for tag in self._sleeping if tag not in tags]

    def close(self) -> None:
        """See `Engine.close`. On a server that was not launched here, running requests are aborted."""
        if self._closed:
            return
        self._closed = True
        try:
            for rid in self._running:
                self._transport.call("abort_request", rid=rid)
        except EngineError:
            self._running.clear()
        finally:
            self._transport.close()

    @contextmanager
    def _generation_paused(self) -> Iterator[None]:
        """Retract running requests, which are prefilled again afterwards."""
        if not self._running:
            yield
            return
        self._transport.call("pause_generation", mode="retract")
        try:
            yield
        finally:
            self._transport.call("continue_generation")

    def _send_waiting(self) -> None:
        while self._waiting and len(self._running) < self._setup.max_num_seqs:
            pending = self._waiting.popleft()
            pending.version = self.weight_version
            self._send(pending, generate_body(pending, self._max_model_len))

    def _send(self, pending: PendingRequest, body: Mapping[str, Any]) -> None:
        if self._images is not None and pending.request.images:
            body = {**body, **self._images.fields(pending.request, pending.tokens)}
        rid = f"{self._id_prefix}{next(self._counter):012d}"
        self._running[rid] = pending
        self._transport.generate(rid, body)

    def _abort_running(self, rid: str) -> None:
        pending = self._running[rid]
        pending.aborted = True
        if pending.finished is None:
            self._transport.call("abort_request", rid=rid)

    def _handle_responses(self, responses: Iterable[tuple[str, Any]]) -> None:
        """Finish or continue the requests of responses."""
        for rid, response in responses:
            pending = self._running.pop(rid)
            try:
                if isinstance(response, Exception):
                    raise response
                self._handle_response(pending, response)
            except (RequestRejectedError, MalformedResponseError, OSError) as error:
                kind = error.error_type if isinstance(error, RequestRejectedError) else type(error).__name__
                self._finish(pending, FinishReason.FAILED, Failure("engine", kind, str(error)))

    def _handle_response(self, pending: PendingRequest, response: Mapping[str, Any]) -> None:
        """
        Raises:
            MalformedResponseError: the response cannot be used.
        """
        if pending.finished is not None:
            pending.logprobs, pending.top_logprobs = parse_scores(response, pending.tokens)
            self._finish(pending, pending.finished)
            return
        chunk = parse_chunk(response)
        if self._images is not None:
            self._images.check(pending.request, len(pending.tokens), chunk)
        pending.add(chunk, self._weight_versions(chunk, pending))
        reason = pending.finish_reason(chunk, self._max_model_len)
        if reason is FinishReason.ABORT and not pending.aborted:
            raise MalformedResponseError(f"SGLang aborted the request: {chunk.message or 'no reason given'}")
        if reason is None and not pending.aborted:
            pending.version = self.weight_version
            self._send(pending, generate_body(pending, self._max_model_len))
        elif has_penalties(pending.request) and pending.tokens:
            self._request_scores(pending, reason or FinishReason.ABORT)
        else:
            self._finish(pending, reason or FinishReason.ABORT)

    def _weight_versions(self, chunk: ResponseChunk, pending: PendingRequest) -> list[tuple[int, int]]:
        """`(index, version)` of the weights of a chunk from that token on.

        Raises:
            MalformedResponseError: the weights changed, and SGLang does not report at which token.
        """
        if chunk.versions:
            return [(index, int(name) if name.isdecimal() else pending.version) for index, name in chunk.versions]
        if chunk.tokens and pending.version != self.weight_version:
            raise MalformedResponseError("the weights changed during generation; this SGLang does not report where")
        return [(0, pending.version)] if chunk.tokens else []

    def _request_scores(self, pending: PendingRequest, reason: FinishReason) -> None:
        """Request the log-probs without penalties.

        Raises:
            MalformedResponseError: the weights that generated the response are gone.
        """
        if {version for _, version in pending.versions} != {self.weight_version}:
            raise MalformedResponseError("log-probs without penalties are not available: the weights have changed")
        pending.finished = reason
        self._send(pending, score_body(pending))

    def _finish(self, pending: PendingRequest, reason: FinishReason, failure: Failure | None = None) -> None:
        first = pending.versions[0][1] if pending.versions else pending.version
        complete = len(pending.tokens) == len(pending.logprobs)
        self._finished.append(
            Generation(
                pending.request.id,
                tuple(pending.tokens) if complete else (),
                tuple(pending.logprobs) if complete else (),
                FinishReason.ABORT if pending.aborted and failure is None else reason,
                first,
                tuple(pending.versions[1:]),
                failure,
                tuple(pending.top_logprobs) if complete else (),
            )
        )
