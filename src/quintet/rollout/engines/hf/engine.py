"""The embedded engine: a transformers model in this process, with its own scheduler and KV cache."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quintet import trace
from quintet.config.plan.kv_blocks import pool_blocks
from quintet.errors import ConfigError
from quintet.policies.inference_decoder import apply_head, fuse_projections
from quintet.policies.lora import has_lora, iter_merged_weights, merge_adapters
from quintet.policies.model_loading import cast_weights
from quintet.policies.vision.image_encoder import text_decoder
from quintet.policies.vision.image_tokens import check_images
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.async_engine import PartialResponse
from quintet.rollout.engines.engine import EngineError, EngineSetup
from quintet.rollout.engines.grammars import GrammarCompiler, TokenMatcher
from quintet.rollout.engines.hf.attention_state import CacheShape
from quintet.rollout.engines.hf.engine_check import TAILS, check_engine
from quintet.rollout.engines.hf.idle_timer import IdleTimer
from quintet.rollout.engines.hf.model_runner import ModelRunner
from quintet.rollout.engines.hf.paged_cache import PagedCache
from quintet.rollout.engines.hf.prefill import PassBudget
from quintet.rollout.engines.hf.prompt_logprobs import PromptScorer
from quintet.rollout.engines.hf.running_batch import ScheduledRequest
from quintet.rollout.engines.hf.scheduler import Scheduler
from quintet.rollout.engines.stop_strings import StopStringMatcher
from quintet.rollout.engines.weight_source import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_PREFILL_TOKENS = 8192
DEFAULT_LOG_STEPS = 100
MAX_SERVING_SLOWDOWN = 2.5
"""Duration of a pass with prompt tokens, of one that only decodes, where clients wait for each token."""


def build_hf_engine(setup: EngineSetup) -> HfEngine:
    """Build the engine on the learner's weights if it has their data type, else on a copy.

    Raises:
        ConfigError: the CPU does not compute in the requested data type.
    """
    if setup.dtype is torch.float16 and setup.model.device.type == "cpu":
        raise ConfigError(
            "rollout.engine_options.dtype = float16: the engine hf computes in float32 and bfloat16 on a CPU",
            key="rollout.engine_options.dtype",
            hint="set rollout.engine_options.dtype=float32, or bfloat16",
        )
    check_engine(setup.model, lambda model, length: HfEngine(model, max_num_seqs=len(TAILS), max_model_len=length))
    shared, options = setup.is_learner_model and setup.dtype == setup.model.dtype, setup.options
    model = setup.model if shared else _inference_model(setup.model, setup.dtype, copied=setup.is_learner_model)
    engine = HfEngine(
        model,
        max_num_seqs=setup.max_num_seqs,
        max_model_len=setup.max_model_len,
        shares_learner_model=shared,
        detokenize=setup.detokenize,
        grammars=setup.grammars,
        prefill_tokens=options.max_batched_tokens or DEFAULT_PREFILL_TOKENS,
        chunked_prefill=options.chunked_prefill is not False,
        sleep_device=torch.device("cpu") if options.offload and not shared else None,
        max_cache_blocks=setup.max_cache_blocks,
        max_pass_slowdown=MAX_SERVING_SLOWDOWN if setup.is_interactive else None,
        batch_invariant=options.deterministic or not setup.is_interactive,
    )
    if options.torch_compile:
        engine.compile(options.torch_compile_max_batch)
    if options.log_statistics:
        engine.log_stats(options.log_every_steps or DEFAULT_LOG_STEPS)
    return engine


def _inference_model(model: PreTrainedModel, dtype: torch.dtype, *, copied: bool = True) -> PreTrainedModel:
    """The model, or a copy of it, with adapters merged and weights in `dtype`."""
    model = copy.deepcopy(model) if copied else model
    if has_lora(model):
        merge_adapters(model)
    cast_weights(model, dtype)
    return model


class HfEngine:
    """`StreamingEngine` with continuous batching in this process.

    The scheduler admits requests while sequence slots and blocks of the KV cache are free. What prompts and earlier
    dialogues begin with is prefilled once for all of them, while the weights stay the same; each step decodes one token
    for all running requests. The model is the learner's, or a copy in another data type.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        weight_version: int = 0,
        shares_learner_model: bool = False,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        grammars: GrammarCompiler | None = None,
        prefill_tokens: int = DEFAULT_PREFILL_TOKENS,
        chunked_prefill: bool = True,
        sleep_device: torch.device | None = None,
        max_cache_blocks: int | None = None,
        max_pass_slowdown: float | None = None,
        batch_invariant: bool = True,
    ) -> None:
        """`detokenize` is required for stop strings, `grammars` for structured outputs. One pass prefills up to
        `prefill_tokens`; longer prompts are split with `chunked_prefill`. During `sleep` the weights move to
        `sleep_device`, if set. The KV cache has up to `max_cache_blocks` blocks (default: enough for
        `max_num_seqs` sequences of `max_model_len` tokens). With a `max_pass_slowdown`, prompts are divided so that a
        pass takes at most about that many times the time of pure decoding. With `batch_invariant`, log-probs on CPUs do
        not depend on the other requests, and equal the learner's; a few sequences alone are faster without."""
        self._model = model
        if not shares_learner_model:
            fuse_projections(text_decoder(model.base_model))
        self._runner = ModelRunner(model, batch_invariant=batch_invariant)
        self._batch_invariant = batch_invariant
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._detokenize = detokenize
        self._grammars = grammars
        self._prefill_tokens = prefill_tokens
        self._budget = PassBudget(prefill_tokens, max_pass_slowdown)
        self._chunked_prefill = chunked_prefill
        self._device, self._sleep_device = model.device, sleep_device
        self._max_cache_blocks = max_cache_blocks or pool_blocks(max_model_len, max_num_seqs, 1, None)
        self._stats: StatsLog | None = None
        self.weight_version = weight_version
        self._lock = threading.RLock()
        """Held while requests, or the memory of their keys and values, change."""
        self._idle_timer = IdleTimer(self.free_idle_memory)
        self._scheduler = self._build_scheduler()
        self._scorer = self._build_scorer()

    def _build_scorer(self) -> PromptScorer:
        shape, head = CacheShape.from_model(self._model), self._model.get_output_embeddings()
        return PromptScorer(shape, self._runner, head, int(head.weight.shape[0]), self._prefill_tokens)

    def _build_scheduler(self) -> Scheduler:
        """A scheduler with empty queues and caches."""
        shape, states = CacheShape.from_model(self._model), self._runner.new_states()
        return Scheduler(
            PagedCache(shape, self._max_cache_blocks, self._max_num_seqs, self._max_model_len, recurrent=states),
            self._runner,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            vocab_size=int(self._model.get_output_embeddings().weight.shape[0]),
            budget=self._budget,
            chunked_prefill=self._chunked_prefill,
        )

    def compile(self, max_tokens: int | None) -> None:
        """Compile MLPs and norms for passes of up to `max_tokens` tokens; None for any number."""
        self._runner.compile(max_tokens)

    def log_stats(self, every_steps: int) -> None:
        """Log running and waiting requests and throughput from now on."""
        self._stats = StatsLog(every_steps)

    @property
    def busy(self) -> bool:
        return self._scheduler.busy or self._scorer.busy

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def add_request(self, request: Request) -> None:
        if not 0 < len(request.prompt) < self._max_model_len:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens in a context of {self._max_model_len}")
        check_images(request, supported=self._runner.images is not None)
        if request.stop_strings and self._detokenize is None:
            raise ValueError("stop strings require an engine with a detokenizer")
        if request.prompt_logprobs is not None and request.images:
            raise ValueError("log-probs of prompts with images are not supported")
        matcher, stop_strings = self._matcher(request), self._stop_matcher(request)
        scheduled = ScheduledRequest(request, self.weight_version, matcher=matcher, stop_strings=stop_strings)
        queue = self._scheduler if request.prompt_logprobs is None else self._scorer
        queue.add(scheduled)

    def _matcher(self, request: Request) -> TokenMatcher | None:
        if request.structured_output is None:
            return None
        if self._grammars is None:
            raise ValueError("structured outputs require an engine with a tokenizer")
        return self._grammars.matcher(request.structured_output, request.stop_token_ids)

    def _stop_matcher(self, request: Request) -> StopStringMatcher | None:
        if not request.stop_strings or self._detokenize is None:
            return None
        return StopStringMatcher(request.stop_strings, self._detokenize)

    def step(self) -> list[Generation]:
        with self._lock, torch.inference_mode():
            generations = self._step()
        if not self.busy:
            self._idle_timer.touch()
        return generations

    def _step(self) -> list[Generation]:
        scheduler, start = self._scheduler, time.perf_counter()
        try:
            scored = self._score_prompts()
            scheduler.reserve_blocks()
            scheduler.admit()
            num_decoding = len(scheduler.running.requests)
            with trace.span("forward", running=num_decoding, prefilling=scheduler.num_prefilling):
                hidden = scheduler.forward()
            prefilled = scheduler.start_decoding()
            if prefilled:
                hidden = torch.stack(prefilled) if hidden is None else torch.cat([hidden, torch.stack(prefilled)])
            if hidden is not None:
                with trace.span("sample"):
                    head = self._model.get_output_embeddings()
                    logits = apply_head(head, hidden, batch_invariant=self._batch_invariant)
                    scheduler.running.sample(logits.float())
            self._budget.record(time.perf_counter() - start, num_decoding, scheduler.num_prompt_tokens)
            if self._stats:
                self._stats.record(len(scheduler.running.requests), scheduler.num_waiting)
            return [*scored, *self._finish_requests()]
        except (MemoryError, torch.OutOfMemoryError) as error:
            count = len(scheduler.running.requests)
            raise EngineError(f"out of memory with {count} requests running: {error}") from error

    def _score_prompts(self) -> list[Generation]:
        """Compute log-probs of prompts; return the requests that want nothing else, and queue the others."""
        finished: list[Generation] = []
        for scheduled in self._scorer.step():
            if scheduled.prompt_logprobs is not None and np.isnan(scheduled.prompt_logprobs.logprobs).any():
                finished.append(_generation(scheduled, FinishReason.FAILED))
            elif scheduled.request.max_tokens:
                self._scheduler.add(scheduled)
            else:
                finished.append(_generation(scheduled, FinishReason.LENGTH))
        return finished

    def partial_responses(self, ids: Collection[int]) -> Mapping[int, PartialResponse]:
        return self._scheduler.running.partial_responses(ids)

    def abort(self, ids: Collection[int]) -> list[Generation]:
        with self._lock, torch.inference_mode():
            aborted = [*self._scorer.abort(ids), *self._scheduler.abort(ids)]
        return [_generation(scheduled, FinishReason.ABORT) for scheduled in aborted]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        if weights.module is not self._model:
            self._copy_weights(weights.tensors())
        self.weight_version = version
        self.reset_prefix_cache()
        for scheduled in self._scheduler.remove_scored():  # its log-probs would be those of other weights
            self._scorer.add(scheduled)
        self._scheduler.record_weight_update(version)
        self._scorer.restart(version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the engine's weights under Hugging Face names."""
        yield from iter_merged_weights(self._model)

    def _copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        missing = {name for name, _ in self._model.named_parameters()}
        with torch.no_grad():
            for name, tensor in weights:
                if name not in parameters:
                    raise EngineError(f"the engine's model has no weight {name}")
                parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise EngineError(f"{len(missing)} weights are missing from the weight sync, among them {min(missing)}")

    def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`; running requests are preempted and prefilled again."""
        with self._lock:
            self._scheduler.preempt_all()

    def free_idle_memory(self) -> None:
        """Free the KV cache unless requests wait or run. The engine itself does so when it has been idle for
        `IDLE_SECONDS`."""
        with self._lock:
            if not self.busy:
                self._scheduler.free_memory()

    def sleep(self) -> None:
        """See `Engine.sleep`.

        Raises:
            ValueError: requests are running.
        """
        if self.busy:
            raise ValueError("the engine cannot sleep while requests are running")
        self.close()
        if self._sleep_device is not None:
            self._model.to(self._sleep_device)
            self._runner.release_weights()

    def wake_up(self) -> None:
        """Move the weights back; the KV cache is allocated with the next request."""
        if self._sleep_device is not None:
            self._model.to(self._device)
            fuse_projections(text_decoder(self._model.base_model))

    def close(self) -> None:
        self._idle_timer.cancel()
        self._scheduler, self._scorer = self._build_scheduler(), self._build_scorer()

    def _finish_requests(self) -> list[Generation]:
        running = self._scheduler.running
        reasons = {
            row: reason for row in running.rows.finish_candidates() if (reason := self._finish_reason(row)) is not None
        }
        generations = [_generation(running.snapshot(row), reason) for row, reason in reasons.items()]
        if reasons:
            running.finish(reasons)
        return generations

    def _finish_reason(self, row: int) -> FinishReason | None:
        """Why a candidate row finishes; None if it continues."""
        rows, scheduled = self._scheduler.running.rows, self._scheduler.running.requests[row]
        request, count = scheduled.request, int(rows.num_tokens[row])
        if np.isnan(rows.logprobs(row)[-1]) or (scheduled.matcher and scheduled.matcher.error):
            return FinishReason.FAILED
        if rows.last_token[row] in request.stop_token_ids and count >= request.min_tokens:
            return FinishReason.STOP
        stop_strings = scheduled.stop_strings
        if stop_strings is not None and count >= request.min_tokens and stop_strings.matches(rows.tokens(row)):
            return FinishReason.STOP
        if count >= request.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if len(request.prompt) + count >= self._max_model_len else None


def _generation(scheduled: ScheduledRequest, reason: FinishReason) -> Generation:
    """The finished request as a record; the token at which it failed is left out."""
    failure, count = None, len(scheduled.tokens)
    if reason is FinishReason.FAILED:
        failure = _failure(scheduled)
        count = max(0, count - 1)
    return Generation(
        scheduled.request.id,
        tuple(scheduled.tokens[:count]),
        tuple(scheduled.logprobs[:count]),
        reason,
        scheduled.weight_version,
        tuple(scheduled.version_changes),
        failure,
        tuple(scheduled.top_logprobs[:count]),
        scheduled.prompt_logprobs,
    )


def _failure(scheduled: ScheduledRequest) -> Failure:
    """Why a request failed: non-finite logits, also of its prompt, or no token continues its structured output."""
    if len(scheduled.logprobs) and not np.isnan(scheduled.logprobs[-1]) and scheduled.matcher is not None:
        return Failure("engine", "StructuredOutput", f"no token can continue the text: {scheduled.matcher.error}")
    message = f"the model's outputs are not numbers (weights {scheduled.weight_version})"
    return Failure("engine", "NonFinite", message)


LOGGER = logging.getLogger("quintet.engine")


class StatsLog:
    """Logs running and waiting requests and tokens per second once in `every_steps` decode steps."""

    def __init__(self, every_steps: int) -> None:
        """Log to standard error unless the program has configured logging."""
        self._every_steps = every_steps
        self._steps = 0
        self._tokens = 0
        self._since = time.perf_counter()
        LOGGER.setLevel(logging.INFO)
        if not LOGGER.hasHandlers():
            LOGGER.addHandler(logging.StreamHandler())

    def record(self, running: int, waiting: int) -> None:
        """Count a step in which each running request got one token."""
        self._steps += 1
        self._tokens += running
        if self._steps % self._every_steps:
            return
        now = time.perf_counter()
        throughput = self._tokens / max(now - self._since, 1e-9)
        LOGGER.info("step %d: %d running, %d waiting, %.0f tokens/s", self._steps, running, waiting, throughput)
        self._tokens, self._since = 0, now
