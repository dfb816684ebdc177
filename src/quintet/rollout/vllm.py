"""vLLM as an engine: its `LLMEngine` in this process or in processes of its own, new weights while it runs.

Log-probs are what `Generation` promises, whatever top-k, top-p, min-p and penalties do (see `vllm_worker`). What it is
started with is in `vllm_options`, how weights get into it in `vllm_weights`. Adapters (LoRA) come merged into the
weights. On a CPU vLLM has no sleep: there `sleep` drops computed prompts and frees nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from quintet.errors import ConfigError
from quintet.records import Failure, Generation, Request, StopReason
from quintet.rollout.engine import EngineFault, EngineSetup
from quintet.rollout.vllm_core import Core, Unfit
from quintet.rollout.vllm_options import first_weights_are_dummies
from quintet.rollout.vllm_stops import TextStops
from quintet.rollout.vllm_weights import WeightPlan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VllmEngine", "open_vllm"]

T = TypeVar("T")
COLDEST = 0.01
"""vLLM raises temperatures between 0 and this one."""


def open_vllm(setup: EngineSetup) -> VllmEngine:
    """Start vLLM on the policy's directory.

    Raises:
        ConfigError: an option that the installed version doesn't have, a value it refuses, or a model it can't run.
        EngineFault: it doesn't start.
    """
    engine = VllmEngine(setup, Core(setup))
    if first_weights_are_dummies(setup.options):
        engine.load_weights(0, setup.model.named_parameters())
    _try_out(engine, setup)
    return engine


def _try_out(engine: VllmEngine, setup: EngineSetup) -> None:
    """Write one token: kernels that don't know a model's shape say so only then."""
    try:
        engine.submit(Request(id=0, prompt=(0,), max_tokens=1, seed=0))
        engine.step()
        engine.forget()
    except EngineFault as fault:
        told = f"rollout.engine = vllm can't run {type(setup.model).__name__} of this shape: {fault}"
        raise ConfigError(told, key="rollout.engine", value="vllm", hint="take rollout.engine=hf") from fault


@dataclass(slots=True)
class _Running:
    """A request that vLLM has, and what it wrote so far."""

    request: Request
    room: int
    """Tokens that the context leaves for the answer."""
    stops: TextStops
    version: int
    """Of the weights that wrote the first token, or will."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    switches: list[tuple[int, int]] = field(default_factory=list)

    def switch(self, version: int) -> None:
        """Other weights write from here on."""
        if not self.tokens:
            self.version = version
            return
        if self.switches and self.switches[-1][0] == len(self.tokens):
            self.switches.pop()
        self.switches.append((len(self.tokens), version))

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> StopReason | None:
        """Add new tokens as far as the answer goes; why it ends with them, if it does and vLLM doesn't say so."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                return StopReason.FAILED
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if len(self.tokens) >= self.request.min_tokens and self.stops.ended_by(self.tokens):
                return StopReason.STOP
        return None

    def generation(self, stop: StopReason, failure: Failure | None = None) -> Generation:
        return Generation(
            self.request.id,
            tuple(self.tokens),
            tuple(self.logprobs),
            stop,
            self.version,
            tuple(self.switches),
            failure,
        )


class VllmEngine:
    """Continuous batching by vLLM."""

    def __init__(self, setup: EngineSetup, core: Core) -> None:
        self.weight_version = 0
        self._setup = setup
        self._core = core
        self._plan = WeightPlan.of(setup.model)
        self._vocabulary = setup.model.config.get_text_config().vocab_size
        self._running: dict[str, _Running] = {}
        self._names: dict[int, str] = {}
        self._refused: list[Generation] = []
        self._numbers = count()

    @property
    def context(self) -> int:
        return self._core.context

    @property
    def busy(self) -> bool:
        return bool(self._running or self._refused)

    def submit(self, request: Request) -> None:
        """See `Engine.submit`. What vLLM itself can't take ends as `StopReason.FAILED` in the next step."""
        room = self.context - len(request.prompt)
        if not request.prompt or room < 1:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens in a context of {self.context}")
        if request.id in self._names:
            raise ValueError(f"request {request.id} is running already")
        run = _Running(request, room, TextStops(request.stop_texts, self._setup.decode), self.weight_version)
        name = str(next(self._numbers))
        try:
            self._check(request)
            self._guarded(self._core.add, name, request.prompt, self._sampling(request, room))
        except Unfit as error:
            self._refused.append(run.generation(StopReason.FAILED, Failure("engine", "ValueError", str(error))))
            return
        self._running[name] = run
        self._names[request.id] = name

    def _check(self, request: Request) -> None:
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._vocabulary:
            raise Unfit(f"a prompt with tokens outside a vocabulary of {self._vocabulary}")
        if 0 < request.temperature < COLDEST:
            raise Unfit(f"temperature {request.temperature:g}: vLLM's lowest is {COLDEST}; 0 is greedy")

    def _sampling(self, request: Request, room: int) -> dict[str, Any]:
        """Keywords for vLLM's `SamplingParams`. Stops that are texts are found here, in the tokens: vLLM would need the
        tokenizer, and knows only the model's own."""
        most = min(request.max_tokens, room)
        return {
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "min_p": request.min_p,
            "repetition_penalty": request.repetition_penalty,
            "min_tokens": min(request.min_tokens, most),
            "max_tokens": most,
            "stop_token_ids": [token for token in request.stop_ids if token < self._vocabulary],
            "ignore_eos": True,
            "logprobs": 0,
        } | self._core.seeded(request.seed)

    def step(self) -> list[Generation]:
        """See `Engine.step`."""
        ended, self._refused = self._refused, []
        if self._running:
            ended += self._ended(self._guarded(self._core.step))
        return ended

    def _ended(self, outputs: Iterable[Any]) -> Iterator[Generation]:
        """Enter what vLLM wrote; the requests that ended."""
        for output in outputs:
            run = self._running.get(output.request_id)
            if run is not None and (generation := self._advance(output.request_id, run, output.outputs[0])):
                yield generation

    def _advance(self, name: str, run: _Running, written: Any) -> Generation | None:
        """Take new tokens of one request; its record if it ended."""
        own = run.take(written.token_ids, _logprobs(written))
        if own is None and written.finish_reason is None:
            return None
        self._leave(name)
        if own is not None and written.finish_reason is None:
            self._guarded(self._core.abort, [name])
        if own is StopReason.FAILED:
            told = f"the model's outputs are not numbers (weights {self.weight_version})"
            return run.generation(own, Failure("engine", "NonFinite", told))
        return run.generation(own) if own is not None else _finished(run, written.finish_reason)

    def _leave(self, name: str) -> _Running:
        run = self._running.pop(name)
        del self._names[run.request.id]
        return run

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`."""
        names = [self._names[number] for number in ids if number in self._names]
        if names:
            self._guarded(self._core.abort, names)
        return [self._leave(name).generation(StopReason.ABORT) for name in names]

    def written(self, ids: Collection[int]) -> Mapping[int, tuple[Sequence[int], Sequence[float]]]:
        """Tokens and log-probs so far of those of the requests that run."""
        runs = [self._running[self._names[number]] for number in ids if number in self._names]
        return {run.request.id: (run.tokens, run.logprobs) for run in runs}

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load_weights`. Keys and values of running requests are computed again under the new weights. The
        stream is read to its end first: one that isn't whole leaves the engine as it was."""
        whole = self._plan.take(weights)
        with_requests = bool(self._running)
        if with_requests:
            # what was written before the pause, and only that, is the old weights'
            self._refused += self._ended(self._guarded(self._core.pause))
        self._guarded(self._core.load, whole, self._plan)
        self.weight_version = version
        for run in self._running.values():
            run.switch(version)
        self._guarded(self._core.forget)
        if with_requests:
            self._guarded(self._core.resume)

    def forget(self) -> None:
        """See `Engine.forget`."""
        self._guarded(self._core.forget)

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._guarded(self._core.sleep)

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._guarded(self._core.wake)

    def close(self) -> None:
        """See `Engine.close`."""
        self._running.clear()
        self._names.clear()
        self._core.close()

    def _guarded(self, call: Callable[..., T], *arguments: Any) -> T:
        """Whatever vLLM raises means that it is gone: it doesn't promise to go on after an error."""
        try:
            return call(*arguments)
        except Unfit:
            raise
        except Exception as error:
            cause = self._core.cause(error)
            lost = len(self._running)
            self.close()
            raise EngineFault(f"vLLM is gone, with {lost} requests: {cause}") from error


def _logprobs(written: Any) -> list[float]:
    """Of the new tokens, nats."""
    return [entry[token].logprob for token, entry in zip(written.token_ids, written.logprobs, strict=True)]


def _finished(run: _Running, reason: str) -> Generation:
    """The record of a request that vLLM ended."""
    if reason == "stop":
        return run.generation(StopReason.STOP)
    if reason == "length":
        full = len(run.tokens) >= run.request.max_tokens
        return run.generation(StopReason.LENGTH if full else StopReason.CONTEXT)
    return run.generation(StopReason.FAILED, Failure("engine", "Refused", f"vLLM ended the request: {reason}"))
