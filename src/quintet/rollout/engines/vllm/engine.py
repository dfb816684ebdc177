"""vLLM engine: vLLM's `LLMEngine` in this process or its own processes, with weight sync while requests run.

Log-probs are those of `Generation` regardless of top-k, top-p, min-p and penalties, see `worker_extension`. LoRA
adapters are merged into the weights. vLLM has no sleep mode on a CPU: there `sleep` only resets the prefix cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from quintet.errors import ConfigError
from quintet.policies.vision.image_encoder import is_vision_language
from quintet.policies.vision.image_tokens import check_images, with_placeholders
from quintet.records import Failure, FinishReason, Generation, PromptLogprobs, Request, TopLogprobs
from quintet.rollout.engines.async_engine import PartialResponse
from quintet.rollout.engines.engine import EngineError, EngineSetup
from quintet.rollout.engines.shared_weights import MappedWeights
from quintet.rollout.engines.stop_strings import StopStringMatcher
from quintet.rollout.engines.vllm.llm_engine import LlmEngine, RequestRejectedError
from quintet.rollout.engines.vllm.options import has_dummy_weights
from quintet.rollout.engines.vllm.weight_sync import WeightPlan
from quintet.rollout.engines.weight_source import ModuleWeights, WeightSource
from quintet.sampling import StructuredOutput

T = TypeVar("T")
MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this one."""


def build_vllm_engine(setup: EngineSetup) -> VllmEngine:
    """Start vLLM on the policy's directory.

    Raises:
        ConfigError: the installed version does not have an option, rejects a value, or does not support the model.
        EngineError: vLLM does not start.
    """
    engine = VllmEngine(setup, LlmEngine(setup))
    if has_dummy_weights(setup.options):
        engine.load_weights(0, ModuleWeights(setup.model))
    _warm_up(engine, setup)
    return engine


def _warm_up(engine: VllmEngine, setup: EngineSetup) -> None:
    """Generate one token: kernels that do not support the shape of a model fail only then."""
    try:
        engine.add_request(Request(id=0, prompt=(0,), max_tokens=1, seed=0))
        engine.step()
        engine.reset_prefix_cache()
    except EngineError as error:
        message = f"rollout.engine = vllm does not support {type(setup.model).__name__} of this shape: {error}"
        raise ConfigError(message, key="rollout.engine", value="vllm", hint="use rollout.engine=hf") from error


@dataclass(slots=True)
class _Running:
    """A request that vLLM is running, and its response so far."""

    request: Request
    stop_strings: StopStringMatcher
    weight_version: int
    """Version of the weights of the first token."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    def record_weight_update(self, version: int) -> None:
        """Record that later tokens come from other weights."""
        if not self.tokens:
            self.weight_version = version
            return
        if self.version_changes and self.version_changes[-1][0] == len(self.tokens):
            self.version_changes.pop()
        self.version_changes.append((len(self.tokens), version))

    def append(self, tokens: Sequence[int], logprobs: Sequence[float]) -> FinishReason | None:
        """Append new tokens up to the end of the response. Return why it ends, if vLLM does not detect it."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                return FinishReason.FAILED
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if len(self.tokens) >= self.request.min_tokens and self.stop_strings.matches(self.tokens):
                return FinishReason.STOP
        return None

    def generation(self, stop: FinishReason, failure: Failure | None = None) -> Generation:
        count = min(len(self.tokens), self.request.max_tokens)  # vLLM samples at least one
        return Generation(
            self.request.id,
            tuple(self.tokens[:count]),
            tuple(self.logprobs[:count]),
            stop,
            self.weight_version,
            tuple(self.version_changes),
            failure,
            tuple(self.top_logprobs[:count]),
            self.prompt_logprobs,
        )


class VllmEngine:
    """`StreamingEngine` that sends requests to vLLM, which schedules and batches them."""

    def __init__(self, setup: EngineSetup, llm_engine: LlmEngine) -> None:
        self.weight_version = 0
        self._setup = setup
        self._llm_engine = llm_engine
        self._plan = WeightPlan.from_model(setup.model)
        self._vocab_size = setup.model.config.get_text_config().vocab_size
        self._has_images = is_vision_language(setup.model.config)
        self._running: dict[str, _Running] = {}
        self._name_by_id: dict[int, str] = {}
        self._finished: list[Generation] = []
        self._counter = count()

    @property
    def max_model_len(self) -> int:
        return self._llm_engine.max_model_len

    @property
    def busy(self) -> bool:
        return bool(self._running or self._finished)

    def add_request(self, request: Request) -> None:
        """See `Engine.add_request`. A request that vLLM rejects finishes as `FinishReason.FAILED` in the next step."""
        remaining = self.max_model_len - len(request.prompt)
        if not request.prompt or remaining < 1:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens in a context of {self.max_model_len}")
        check_images(request, supported=self._has_images)
        if request.id in self._name_by_id:
            raise ValueError(f"request {request.id} is already running")
        stop_strings = StopStringMatcher(request.stop_strings, self._setup.detokenize)
        run = _Running(request, stop_strings, self.weight_version)
        name = str(next(self._counter))
        try:
            self._check(request)
            prompt, sampling = self._prompt(request), self._sampling_params(request, remaining)
            self._call(self._llm_engine.add_request, name, prompt, sampling)
        except RequestRejectedError as error:
            self._finished.append(run.generation(FinishReason.FAILED, Failure("engine", "ValueError", str(error))))
            return
        self._running[name] = run
        self._name_by_id[request.id] = name

    def _check(self, request: Request) -> None:
        smallest = 0 if self._has_images else min(request.prompt)
        if not 0 <= smallest <= max(request.prompt) < self._vocab_size:
            raise RequestRejectedError(f"the prompt has token ids outside of the vocabulary of {self._vocab_size}")
        if 0 < request.temperature < MIN_TEMPERATURE:
            raise RequestRejectedError(
                f"temperature {request.temperature:g}: vLLM supports {MIN_TEMPERATURE} and more, or 0 for greedy"
            )
        if request.structured_output is not None and not self._setup.options.detokenize:
            raise RequestRejectedError(
                "vLLM supports structured outputs only with its own tokenizer: set "
                "rollout.engine_options.detokenize=true"
            )

    def _prompt(self, request: Request) -> dict[str, Any]:
        """The prompt as vLLM reads it, see `image_inputs`."""
        if not request.images:
            return {"type": "token", "prompt_token_ids": list(request.prompt)}
        tokens, keys = with_placeholders(request.prompt, self._setup.model.config.image_token_id)
        images = {image.key: image for image in request.images}
        return {
            "prompt_token_ids": tokens,
            "multi_modal_data": {"image": [images[key] for key in keys]},
            "multi_modal_uuids": {"image": [f"{key:x}" for key in keys]},
        }

    def _sampling_params(self, request: Request, remaining: int) -> dict[str, Any]:
        """Arguments of vLLM's `SamplingParams`. Stop strings are matched here, because vLLM would need the tokenizer
        and supports only the model's own."""
        max_tokens = max(1, min(request.max_tokens, remaining))
        return {
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "min_p": request.min_p,
            "repetition_penalty": request.repetition_penalty,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "logit_bias": dict(request.logit_bias) or None,
            "prompt_logprobs": request.prompt_logprobs,
            "min_tokens": min(request.min_tokens, max_tokens),
            "max_tokens": max_tokens,
            "stop_token_ids": [token for token in request.stop_token_ids if token < self._vocab_size],
            # a structured output may also end by the tokenizer's end token
            "ignore_eos": request.structured_output is None,
            "logprobs": request.top_logprobs,
            "structured_outputs": _structured_outputs(request.structured_output),
        } | self._llm_engine.seed_arguments(request.seed)

    def step(self) -> list[Generation]:
        finished, self._finished = self._finished, []
        if self._running:
            finished += self._handle_outputs(self._call(self._llm_engine.step))
        return finished

    def _handle_outputs(self, outputs: Iterable[Any]) -> Iterator[Generation]:
        """Record vLLM's outputs; yield the requests that finished."""
        for output in outputs:
            run = self._running.get(output.request_id)
            if run is not None and run.prompt_logprobs is None and output.prompt_logprobs:
                run.prompt_logprobs = _prompt_logprobs(output.prompt_logprobs, run.request)
            if run is not None and (generation := self._advance(output.request_id, run, output.outputs[0])):
                yield generation

    def _advance(self, name: str, run: _Running, output: Any) -> Generation | None:
        """Append the new tokens of a request; return its record if it finished."""
        reason = run.append(output.token_ids, _logprobs(output))
        if run.request.top_logprobs:
            run.top_logprobs += [_likeliest(entry, run.request.top_logprobs) for entry in output.logprobs]
        if reason is None and output.finish_reason is None:
            return None
        self._remove(name)
        if reason is not None and output.finish_reason is None:
            self._call(self._llm_engine.abort, [name])
        if reason is FinishReason.FAILED:
            message = f"the model's outputs are not numbers (weights {self.weight_version})"
            return run.generation(reason, Failure("engine", "NonFinite", message))
        return run.generation(reason) if reason is not None else _generation(run, output.finish_reason)

    def _remove(self, name: str) -> _Running:
        run = self._running.pop(name)
        del self._name_by_id[run.request.id]
        return run

    def abort(self, ids: Collection[int]) -> list[Generation]:
        names = [self._name_by_id[number] for number in ids if number in self._name_by_id]
        if names:
            self._call(self._llm_engine.abort, names)
        return [self._remove(name).generation(FinishReason.ABORT) for name in names]

    def partial_responses(self, ids: Collection[int]) -> Mapping[int, PartialResponse]:
        runs = [self._running[self._name_by_id[number]] for number in ids if number in self._name_by_id]
        return {run.request.id: (run.tokens, run.logprobs, run.top_logprobs) for run in runs}

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """See `Engine.load_weights`. Running requests are prefilled again under the new weights. All weights are
        checked first: an incomplete stream leaves the engine unchanged."""
        tensors = weights.tensors()
        full_weights = self._plan.collect(tensors)
        is_running = bool(self._running)
        if is_running:
            # exactly the tokens from before the pause come from the old weights
            self._finished += self._handle_outputs(self._call(self._llm_engine.pause))
        mapped = tensors if isinstance(tensors, MappedWeights) else None
        self._call(self._llm_engine.load_weights, full_weights, self._plan, mapped)
        self.weight_version = version
        for run in self._running.values():
            run.record_weight_update(version)
        self._call(self._llm_engine.reset_prefix_cache)
        if is_running:
            self._call(self._llm_engine.resume)

    def reset_prefix_cache(self) -> None:
        self._call(self._llm_engine.reset_prefix_cache)

    def sleep(self) -> None:
        self._call(self._llm_engine.sleep)

    def wake_up(self) -> None:
        self._call(self._llm_engine.wake_up)

    def close(self) -> None:
        self._running.clear()
        self._name_by_id.clear()
        self._llm_engine.close()

    def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call vLLM; after any error it is closed, because it may be unusable."""
        try:
            return method(*arguments)
        except RequestRejectedError:
            raise
        except Exception as error:  # vLLM raises errors of any type
            cause = self._llm_engine.describe_error(error)
            num_requests = len(self._running)
            self.close()
            raise EngineError(f"vLLM died with {num_requests} requests: {cause}") from error


def _structured_outputs(output: StructuredOutput | None) -> dict[str, Any] | None:
    """Arguments of vLLM's `StructuredOutputsParams`."""
    if output is None:
        return None
    if output.kind == "json_object":
        return {"json_object": True}
    if output.kind == "choice":
        return {"choice": json.loads(output.spec)}
    return {"json" if output.kind == "json_schema" else "regex": output.spec}


def _logprobs(output: Any) -> list[float]:
    """Log-probs of the new tokens, nats."""
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


def _likeliest(entry: Mapping[int, Any], count: int) -> TopLogprobs:
    """The likeliest tokens at a position, to which vLLM adds the sampled token."""
    ordered = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return tuple((token, item.logprob) for token, item in ordered[:count])


def _prompt_logprobs(entries: Sequence[Any], request: Request) -> PromptLogprobs:
    """The log-probs of a prompt; vLLM's first entry is None."""
    positions = list(zip(request.prompt[1:], entries[1:], strict=True))
    logprobs = tuple(entry[token].logprob for token, entry in positions)
    count = request.prompt_logprobs or 0
    return PromptLogprobs(logprobs, tuple(_likeliest(entry, count) for _, entry in positions) if count else ())


def _generation(run: _Running, reason: str) -> Generation:
    """The record of a request that vLLM finished."""
    if reason == "stop":
        return run.generation(FinishReason.STOP)
    if reason == "length":
        full = len(run.tokens) >= run.request.max_tokens
        return run.generation(FinishReason.LENGTH if full else FinishReason.CONTEXT)
    return run.generation(FinishReason.FAILED, Failure("engine", "Refused", f"vLLM finished the request: {reason}"))
