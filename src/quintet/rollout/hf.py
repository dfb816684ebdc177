"""The embedded engine: a transformers model under our own scheduler and cache."""

from __future__ import annotations

import copy
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.errors import ConfigError
from quintet.policies.attention import Layout
from quintet.policies.causal_lm import hidden_states
from quintet.records import Failure, Generation, Request, StopReason
from quintet.rollout.cache import CacheShape, DecodeLayout, ExtendLayout, KeyValueStore, Shared, SideBySide
from quintet.rollout.computed import SHORTEST_PREFIX, ComputedPrompts, Piece, Prefix, common_prefix
from quintet.rollout.engine import EngineFault, EngineSetup
from quintet.rollout.load_log import LoadLog
from quintet.rollout.sampling import Changed, sample, uniform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HfEngine", "open_hf"]

PREFILL_TOKENS = 8192
"""Tokens of prompts in one forward pass, where nothing else is asked for."""
LOG_EVERY_STEPS = 100


@dataclass(eq=False, slots=True)
class _Running:
    """A request and what it wrote so far."""

    request: Request
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    switches: list[tuple[int, int]] = field(default_factory=list)
    piece: Piece | None = None
    """Its prompt, in use; where it had been interrupted, with the words that it had written."""
    fed: int = 0
    """Tokens of the answer whose keys and values lie in its row."""
    seen: Tensor | None = None
    """bool [vocab], tokens of prompt and answer; where repetition is penalised."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """What has to be computed before it can go on."""
        return self.request.prompt + tuple(self.tokens)

    @property
    def filled(self) -> int:
        """Tokens in the cache."""
        return len(self.piece.tokens) + self.fed if self.piece else 0


@dataclass(frozen=True, slots=True)
class _Work:
    """Tokens to be computed, their places in their sequences, and what they attend to."""

    tokens: list[int]
    positions: list[int]
    layout: Layout


@dataclass(slots=True)
class _Draw:
    """How the running rows draw, as long as the same ones run; tensors [n]."""

    seeds: Tensor
    temperature: Tensor
    special: list[int]
    """Rows with more than a temperature."""

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> _Draw:
        return cls(
            torch.tensor([request.seed for request in requests], device=device),
            torch.tensor([request.temperature for request in requests], device=device),
            [row for row, request in enumerate(requests) if _is_special(request)],
        )

    def changes(self, running: Sequence[_Running], vocabulary: int) -> Changed | None:
        """What changes the draws of special rows this time."""
        if not self.special:
            return None
        device, runs = self.seeds.device, [running[row] for row in self.special]
        requests = [run.request for run in runs]
        seen = None
        if any(run.seen is not None for run in runs):
            nothing = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            seen = torch.stack([nothing if run.seen is None else run.seen for run in runs])
        return Changed(
            torch.tensor(self.special, device=device),
            torch.tensor([request.top_k for request in requests], device=device),
            torch.tensor([request.top_p for request in requests], device=device),
            torch.tensor([request.min_p for request in requests], device=device),
            torch.tensor([request.repetition_penalty for request in requests], device=device),
            seen,
            [
                (place, run.request.stop_ids)
                for place, run in enumerate(runs)
                if len(run.tokens) < run.request.min_tokens and run.request.stop_ids
            ],
        )


def open_hf(setup: EngineSetup) -> HfEngine:
    """The engine on the learner's own weights where the type is theirs, else on a copy.

    Raises:
        ConfigError: the processor has no arithmetic of that type.
    """
    if setup.dtype is torch.float16 and setup.model.device.type == "cpu":
        raise ConfigError(
            "the engine hf computes in float32 and bfloat16 on a CPU, and this model is stored in float16",
            key="rollout.engine_options.dtype",
            hint="set rollout.engine_options.dtype=float32, or bfloat16",
        )
    shared, options = setup.dtype == setup.model.dtype, setup.options
    model = setup.model if shared else copy.deepcopy(setup.model).to(setup.dtype)
    engine = HfEngine(
        model,
        slots=setup.slots,
        context=setup.context,
        shared=shared,
        decode=setup.decode,
        prefill_tokens=options.max_batched_tokens or PREFILL_TOKENS,
        whole_prompts=options.chunked_prefill is False,
    )
    if options.torch_compile:
        engine.compile(options.torch_compile_max_batch)
    if options.log_statistics:
        engine.log_load(options.log_every_steps or LOG_EVERY_STEPS)
    return engine


class HfEngine:
    """Continuous batching in this process.

    Requests are admitted as soon as slots are free. A prompt is computed once for all requests that bring it, now or
    later under the same weights, and what prompts have in common only once; every step decodes one token for all
    running requests, which read what they share once. The model may be the learner's own or a copy in another type.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        weight_version: int = 0,
        shared: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        whole_prompts: bool = False,
    ) -> None:
        """`slots` requests at a time, `context` tokens for prompt and answer together. `shared` says that the model is
        the learner's own; `decode` is needed for stops that are texts. Prompts are read in passes of `prefill_tokens`,
        a longer one in pieces unless `whole_prompts`."""
        self._model = model
        self._body = model.base_model
        self._slots = slots
        self._context = context
        self._shared_model = shared
        self._decode_text = decode
        self._prefill_tokens = prefill_tokens
        self._whole_prompts = whole_prompts
        self._compiled_up_to: int | None = None
        self._log: LoadLog | None = None
        self.weight_version = weight_version
        self._waiting: deque[_Running] = deque()
        self._reading: list[_Running] = []
        """Admitted; their prompts are being computed."""
        self._running: list[_Running] = []
        """Writing; each has the row of its place here."""
        self._draw: _Draw | None = None
        self._shared: list[Shared] | None = None
        self._open()

    def _open(self) -> None:
        shape = CacheShape.of(self._model)
        self._device = shape.device
        self._answers = KeyValueStore(shape)
        self._prompts = ComputedPrompts(shape, self._slots)

    def compile(self, most_rows: int | None) -> None:
        """Compile what layers do besides attention, for up to so many rows at a time; None for any number."""
        self._compiled_up_to = most_rows or sys.maxsize
        for module in self._body.modules():
            if type(module).__name__.endswith(("MLP", "RMSNorm")):
                module.compile(dynamic=True)

    def log_load(self, every: int) -> None:
        """Log the load from now on, once in so many steps."""
        self._log = LoadLog(every)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._reading or self._running)

    @property
    def context(self) -> int:
        return self._context

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        if not 0 < len(request.prompt) < self._context:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens in a context of {self._context}")
        if request.stop_texts and self._decode_text is None:
            raise ValueError("stops that are texts need an engine that can decode")
        self._waiting.append(_Running(request, self.weight_version))

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """See `Engine.step`."""
        try:
            self._admit()
            decoded = self._compute()
            ready = self._begin_writing()
            if decoded is not None or ready:
                self._draw_tokens(torch.cat([x for x in (decoded, *ready) if x is not None]))
            if self._log:
                self._log.note(len(self._running), len(self._waiting))
            return self._retire()
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise EngineFault(f"out of memory with {len(self._running)} requests running: {error}") from error

    def written(self, ids: Collection[int]) -> Mapping[int, tuple[Sequence[int], Sequence[float]]]:
        """Tokens and log-probs that running requests have written so far."""
        return {run.request.id: (run.tokens, run.logprobs) for run in self._running if run.request.id in ids}

    @torch.inference_mode()
    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`."""
        unwanted = set(ids)
        gone = [run for run in self._waiting if run.request.id in unwanted]
        self._waiting = deque(run for run in self._waiting if run.request.id not in unwanted)
        gone += self._give_up_reading(unwanted)
        reasons = [StopReason.ABORT if run.request.id in unwanted else None for run in self._running]
        gone += [run for run, reason in zip(self._running, reasons, strict=True) if reason is not None]
        self._leave(reasons, keep=False)
        return [_generation(run, StopReason.ABORT) for run in gone]

    def _give_up_reading(self, unwanted: Collection[int]) -> list[_Running]:
        gone = [run for run in self._reading if run.request.id in unwanted]
        self._reading = [run for run in self._reading if run.request.id not in unwanted]
        self._prompts.release((run.piece for run in gone if run.piece), keep=False)
        return gone

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load_weights`."""
        if not self._shared_model:
            self._copy(weights)
        self.weight_version = version
        self._interrupt()
        for run in self._waiting:
            if run.tokens:
                run.switches.append((len(run.tokens), version))
            else:
                run.version = version
        self.forget()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What it decodes with, under Hugging Face names."""
        yield from self._model.named_parameters()

    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        missing = {name for name, _ in self._model.named_parameters()}
        with torch.no_grad():
            for name, tensor in weights:
                if name not in parameters:
                    raise EngineFault(f"the engine's model has no weight {name}")
                parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise EngineFault(f"{len(missing)} weights didn't come, {min(missing)} among them")

    def _interrupt(self) -> None:
        """Put running requests back in front of the waiting ones, with the words they have written."""
        for run in reversed([*self._running, *self._reading]):
            run.piece, run.fed = None, 0
            self._waiting.appendleft(run)
        self._running.clear()
        self._reading.clear()
        self._changed()

    def forget(self) -> None:
        """See `Engine.forget`."""
        self._interrupt()
        self._prompts.clear()

    def sleep(self) -> None:
        """See `Engine.sleep`.

        Raises:
            ValueError: requests run.
        """
        if self.busy:
            raise ValueError("the engine can't sleep while requests run")
        self._open()

    def wake(self) -> None:
        """The cache comes back with the next request."""

    def close(self) -> None:
        """See `Engine.close`."""
        self._waiting.clear()
        self._reading.clear()
        self._running.clear()
        self._changed()
        self._open()

    def _changed(self) -> None:
        """Other rows run than before."""
        self._draw = self._shared = None

    def _admit(self) -> None:
        """Begin to read the prompts of as many waiting requests as there is room for."""
        count = min(self._slots - len(self._running) - len(self._reading), len(self._waiting))
        if not count:
            return
        admitted = [self._waiting.popleft() for _ in range(count)]
        prompts = self._prompts
        fresh: list[tuple[int, ...]] = []
        for run in admitted:
            tokens = run.prompt
            run.piece = prompts.find(tokens) or prompts.go_on(run.request.id, tokens)
            if run.piece is None:
                fresh.append(tokens)
            if run.request.repetition_penalty != 1.0:
                run.seen = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
                run.seen[torch.tensor(tokens, device=self._device)] = True
        self._begin(list(dict.fromkeys(fresh)))
        for run in admitted:
            run.piece = run.piece or prompts.find(run.prompt)
        prompts.use([run.piece for run in admitted if run.piece])
        self._reading += admitted
        self._shared = None

    @property
    def _vocabulary(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    def _begin_writing(self) -> list[Tensor]:
        """Requests whose prompt is computed come behind the running ones; the state of each one's last token,
        [1, hidden]."""
        ready = [run for run in self._reading if run.piece and run.piece.hidden is not None]
        if ready:
            self._reading = [run for run in self._reading if run.piece is None or run.piece.hidden is None]
            self._running += ready
            self._changed()
        return [run.piece.hidden[None] for run in ready if run.piece and run.piece.hidden is not None]

    def _begin(self, fresh: list[tuple[int, ...]]) -> None:
        """Pieces for new prompts, behind a prefix where they have one."""
        for tokens in fresh:
            self._prompts.start(tokens, self._prefix_of(tokens, fresh))

    def _prefix_of(self, tokens: tuple[int, ...], fresh: list[tuple[int, ...]]) -> Prefix:
        """The longest known prefix of a prompt; a new one where that pays."""
        known = [
            p for p in self._prompts.prefixes if len(p.tokens) < len(tokens) and tokens[: len(p.tokens)] == p.tokens
        ]
        best = max(known, key=lambda prefix: len(prefix.tokens))
        if best.tokens or len(fresh) < 2:
            return best
        common = min(common_prefix(fresh), min(map(len, fresh)) - 1)
        if common < SHORTEST_PREFIX or (new := self._prompts.add_prefix(tokens[:common])) is None:
            return best
        layout = ExtendLayout(self._prompts.prefix_store, [new.slot], [0], [common])
        self._forward([_Work(list(new.tokens), list(range(common)), layout)])
        return new

    def _compute(self) -> Tensor | None:
        """One forward pass: a token for each running request, and the next tokens of prompts that are being read. The
        states of the running ones, [running, hidden]."""
        works = [self._decoding()] if self._running else []
        chosen = self._to_read()
        if chosen:
            works.append(self._reading_of(chosen))
        if not works:
            return None
        states = self._forward(works)
        for run in self._running:
            run.fed += 1
        if chosen:
            self._have_read(chosen, states[-1])
        return states[0] if self._running else None

    def _to_read(self) -> list[tuple[Piece, int]]:
        """Prompts behind one prefix and how many of their tokens come next, so many in all at most."""
        pieces = dict.fromkeys(run.piece for run in self._reading if run.piece and run.piece.hidden is None)
        chosen: list[tuple[Piece, int]] = []
        room, prefix = self._prefill_tokens, next((piece.prefix for piece in pieces), None)
        for piece in pieces:
            left = len(piece.tokens) - piece.known
            if piece.prefix is not prefix or room <= 0:
                continue
            if self._whole_prompts and left > room and chosen:
                break
            count = left if self._whole_prompts else min(left, room)
            chosen.append((piece, count))
            room -= count
        return chosen

    def _reading_of(self, chosen: list[tuple[Piece, int]]) -> _Work:
        prompts, prefix = self._prompts, chosen[0][0].prefix
        lengths = [count for _, count in chosen]
        slots, past = [piece.slot for piece, _ in chosen], [piece.own for piece, _ in chosen]
        before = (prompts.prefix_store, prefix.slot, len(prefix.tokens)) if prefix.tokens else None
        return _Work(
            [token for piece, count in chosen for token in piece.tokens[piece.known : piece.known + count]],
            [place for piece, count in chosen for place in range(piece.known, piece.known + count)],
            ExtendLayout(prompts.store, slots, past, lengths, before),
        )

    def _have_read(self, chosen: list[tuple[Piece, int]], states: Tensor) -> None:
        """Note what is known now; `states` [tokens, hidden] of the tokens just read."""
        last = states[self._tensor([count for _, count in chosen]).cumsum(0) - 1]
        for (piece, count), state in zip(chosen, last, strict=True):
            piece.known += count
            if piece.known == len(piece.tokens):
                piece.hidden = state

    def _decoding(self) -> _Work:
        """The last token of each running request."""
        rows = self._running
        places = [run.fed for run in rows]
        self._answers.reserve(len(rows), max(places) + 1)
        layout = DecodeLayout(self._answers, self._shared_pieces(), places)
        return _Work([run.tokens[-1] for run in rows], [run.filled for run in rows], layout)

    def _shared_pieces(self) -> list[Shared]:
        """What running requests see besides their own answers."""
        if self._shared is None:
            prompts = self._prompts
            pieces = [run.piece for run in self._running if run.piece]
            self._shared = [
                Shared(prompts.store, [piece.slot for piece in pieces], [piece.own for piece in prompts.active])
            ]
            if any(piece.prefix.tokens for piece in pieces):
                lengths = [len(prefix.tokens) for prefix in prompts.prefixes]
                self._shared.append(Shared(prompts.prefix_store, [piece.prefix.slot for piece in pieces], lengths))
        return self._shared

    def _forward(self, works: Sequence[_Work]) -> tuple[Tensor, ...]:
        """Last hidden states of each work's tokens, [tokens, hidden]."""
        sizes = [len(work.tokens) for work in works]
        layout = works[0].layout if len(works) == 1 else SideBySide([work.layout for work in works], sizes)
        tokens = self._tensor([token for work in works for token in work.tokens])
        positions = self._tensor([place for work in works for place in work.positions])
        if self._compiled_up_to is None or len(tokens) <= self._compiled_up_to:
            return torch.split(hidden_states(self._body, tokens, positions, layout), sizes)
        with torch.compiler.set_stance("force_eager"):
            return torch.split(hidden_states(self._body, tokens, positions, layout), sizes)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _draw_tokens(self, hidden: Tensor) -> None:
        """Sample one token for every running request from hidden states [n, hidden]."""
        draw = self._draw = self._draw or _Draw.of([run.request for run in self._running], self._device)
        counts = self._tensor([len(run.tokens) for run in self._running])
        logits = self._model.get_output_embeddings()(hidden).float()
        tokens, logprobs = sample(
            logits, draw.temperature, uniform(draw.seeds, counts), draw.changes(self._running, self._vocabulary)
        )
        for run, token, logprob in zip(self._running, tokens.tolist(), logprobs.tolist(), strict=True):
            run.tokens.append(token)
            run.logprobs.append(logprob)
            if run.seen is not None:
                run.seen[token] = True

    def _retire(self) -> list[Generation]:
        """Take out what ended and close the gaps with the requests of the last rows."""
        reasons = [self._stop_reason(run) for run in self._running]
        ended = [
            _generation(run, reason) for run, reason in zip(self._running, reasons, strict=True) if reason is not None
        ]
        if ended:
            self._leave(reasons)
        return ended

    def _stop_reason(self, run: _Running) -> StopReason | None:
        request, count = run.request, len(run.tokens)
        if math.isnan(run.logprobs[-1]):
            return StopReason.FAILED
        if run.tokens[-1] in request.stop_ids and count >= request.min_tokens:
            return StopReason.STOP
        if request.stop_texts and count >= request.min_tokens and self._holds_stop(run):
            return StopReason.STOP
        if count >= request.max_tokens:
            return StopReason.LENGTH
        return StopReason.CONTEXT if run.filled + 1 >= self._context else None

    def _holds_stop(self, run: _Running) -> bool:
        """Whether one of the stop texts comes up at the answer's end. A token is a byte at least, a letter four bytes
        at most."""
        if self._decode_text is None:
            return False
        longest = max(map(len, run.request.stop_texts))
        end = self._decode_text(run.tokens[-4 * (longest + 1) :])
        return any(text in end for text in run.request.stop_texts)

    def _leave(self, reasons: Sequence[StopReason | None], *, keep: bool = True) -> None:
        """Take rows with a reason out; the last ones move into the gaps."""
        leaving = [row for row, reason in enumerate(reasons) if reason is not None]
        if not leaving:
            return
        if keep:
            self._keep_dialogues(leaving, reasons)
        kept = {row for row in leaving if keep and not self._running[row].request.keep}
        self._prompts.release(self._pieces(row for row in leaving if row not in kept), keep=False)
        self._prompts.release(self._pieces(kept))
        count = len(reasons) - len(leaving)
        gaps = [row for row in leaving if row < count]
        movers = [row for row in range(count, len(reasons)) if reasons[row] is None]
        if movers:
            used = max(self._running[row].fed for row in movers)
            self._answers.take(gaps, self._answers, movers, used)
        for gap, mover in zip(gaps, movers, strict=True):
            self._running[gap] = self._running[mover]
        del self._running[count:]
        self._changed()

    def _keep_dialogues(self, rows: Sequence[int], reasons: Sequence[StopReason | None]) -> None:
        for row in rows:
            run = self._running[row]
            if run.request.keep and run.piece and reasons[row] is not StopReason.FAILED:
                answer = run.tokens[len(run.tokens) - 1 - run.fed : -1]
                self._prompts.keep_dialogue(run.request.id, run.piece, answer, self._answers, row)

    def _pieces(self, rows: Iterable[int]) -> Iterator[Piece]:
        for row in rows:
            piece = self._running[row].piece
            if piece is not None:
                yield piece


def _is_special(request: Request) -> bool:
    """Whether more than a temperature decides what is drawn."""
    plain = request.top_k == 0 and request.top_p >= 1 and request.min_p == 0 and request.repetition_penalty == 1
    return not plain or bool(request.min_tokens and request.stop_ids)


def _generation(run: _Running, reason: StopReason) -> Generation:
    """The record of what was written; a token that was drawn from what isn't a number doesn't count."""
    failure, count = None, len(run.tokens)
    if reason is StopReason.FAILED:
        failure = Failure("engine", "NonFinite", f"the model's outputs are not numbers (weights {run.version})")
        count -= 1
    return Generation(
        run.request.id,
        tuple(run.tokens[:count]),
        tuple(run.logprobs[:count]),
        reason,
        run.version,
        tuple(run.switches),
        failure,
    )
