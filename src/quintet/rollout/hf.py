"""The embedded engine: a transformers model under our own scheduler and cache."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quintet.errors import ConfigError
from quintet.policies.adapters import has_lora, merge, plain_weights
from quintet.policies.causal_lm import cast_weights
from quintet.policies.inference import lay_together
from quintet.records import Failure, Generation, Request, StopReason
from quintet.rollout.cache import CacheShape, DecodeLayout, KeyValueStore, Shared
from quintet.rollout.computed import Piece
from quintet.rollout.engine import EngineFault, EngineSetup
from quintet.rollout.load_log import LoadLog
from quintet.rollout.passes import Passes, Work
from quintet.rollout.reading import PromptReader
from quintet.rollout.sampling import Changed, sample, uniform
from quintet.rollout.writing import Beginning, WrittenRows

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedModel

__all__ = ["HfEngine", "open_hf"]

PREFILL_TOKENS = 8192
"""Tokens of prompts in one forward pass, where nothing else is asked for."""
LOG_EVERY_STEPS = 100
NUMBERS_AHEAD = 16
"""Steps for which random numbers are made at once."""


@dataclass(eq=False, slots=True)
class _Running:
    """A request; while it doesn't write, with what it wrote so far."""

    request: Request
    version: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    switches: list[tuple[int, int]] = field(default_factory=list)
    piece: Piece | None = None
    """Its prompt, in use; where it had been interrupted, with the words that it had written."""
    seen: Tensor | None = None
    """bool [vocab], tokens of prompt and answer; where repetition is penalised."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """What has to be computed before it can go on."""
        return self.request.prompt + tuple(self.tokens)


@dataclass(slots=True)
class _Draw:
    """How the running rows draw, as long as the same ones run; tensors [n]."""

    seeds: Tensor
    temperature: Tensor
    special: list[int]
    """Rows with more than a temperature."""
    _ahead: list[Tensor] = field(default_factory=list)

    def numbers(self, written: Tensor) -> Tensor:
        """Uniform numbers for the tokens that rows write next, float64 [n]; made for some steps at once, as each row
        writes one token a step."""
        if not self._ahead:
            steps = torch.arange(NUMBERS_AHEAD, device=written.device)[:, None]
            self._ahead = list(uniform(self.seeds, written + steps).flip(0))
        return self._ahead.pop()

    def changes(self, running: Sequence[_Running], rows: WrittenRows, vocabulary: int) -> Changed | None:
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
                if rows.written[self.special[place]] < run.request.min_tokens and run.request.stop_ids
            ],
        )


def open_hf(setup: EngineSetup) -> HfEngine:
    """The engine on the learner's own weights where the type is theirs, else on a copy.

    Raises:
        ConfigError: the processor has no arithmetic of that type.
    """
    if setup.dtype is torch.float16 and setup.model.device.type == "cpu":
        raise ConfigError(
            "the engine hf computes in float32 and bfloat16 on a CPU, and float16 is asked for",
            key="rollout.engine_options.dtype",
            hint="set rollout.engine_options.dtype=float32, or bfloat16",
        )
    shared, options = setup.learner_owns and setup.dtype == setup.model.dtype, setup.options
    model = setup.model if shared else _own_copy(setup.model, setup.dtype, keep=setup.learner_owns)
    engine = HfEngine(
        model,
        slots=setup.slots,
        context=setup.context,
        shared=shared,
        decode=setup.decode,
        prefill_tokens=options.max_batched_tokens or PREFILL_TOKENS,
        whole_prompts=options.chunked_prefill is False,
        rest_on=torch.device("cpu") if options.offload and not shared else None,
    )
    if options.torch_compile:
        engine.compile(options.torch_compile_max_batch)
    if options.log_statistics:
        engine.log_load(options.log_every_steps or LOG_EVERY_STEPS)
    return engine


def _own_copy(model: PreTrainedModel, dtype: torch.dtype, *, keep: bool = True) -> PreTrainedModel:
    """Another one in that type, to which whole weights come: adapters are merged. Without `keep` it is the same one."""
    own = copy.deepcopy(model) if keep else model
    if has_lora(own):
        merge(own)
    cast_weights(own, dtype)
    return own


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
        rest_on: torch.device | None = None,
    ) -> None:
        """`slots` requests at a time, `context` tokens for prompt and answer together. `shared` says that the model is
        the learner's own; `decode` is needed for stops that are texts. Prompts are read in passes of `prefill_tokens`,
        a longer one in pieces unless `whole_prompts`. While it sleeps its weights are on the device `rest_on`, where
        one is given."""
        self._model = model
        if not shared:
            lay_together(model.base_model)
        self._passes = Passes(model)
        self._slots = slots
        self._context = context
        self._shared_model = shared
        self._decode_text = decode
        self._prefill_tokens = prefill_tokens
        self._whole_prompts = whole_prompts
        self._awake_on, self._rest_on = model.device, rest_on
        self._log: LoadLog | None = None
        self.weight_version = weight_version
        self._waiting: deque[_Running] = deque()
        self._reading: list[_Running] = []
        """Admitted; their prompts are being computed."""
        self._running: list[_Running] = []
        """Writing; each has the row of its place here."""
        self._rows = WrittenRows(slots)
        self._draw: _Draw | None = None
        self._shared: list[Shared] | None = None
        self._open()

    def _open(self) -> None:
        shape = CacheShape.of(self._model)
        self._device = shape.device
        self._answers = KeyValueStore(shape)
        self._free = list(range(self._slots))[::-1]
        self._reader = PromptReader(shape, self._passes, self._slots, self._prefill_tokens, whole=self._whole_prompts)
        self._prompts = self._reader.prompts

    def compile(self, most_rows: int | None) -> None:
        """Compile what layers do besides attention, for up to so many rows at a time; None for any number."""
        self._passes.compile(most_rows)

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
            if ready:
                decoded = torch.stack(ready) if decoded is None else torch.cat([decoded, torch.stack(ready)])
            if decoded is not None:
                self._draw_tokens(decoded)
            if self._log:
                self._log.note(len(self._running), len(self._waiting))
            return self._retire()
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise EngineFault(f"out of memory with {len(self._running)} requests running: {error}") from error

    def written(self, ids: Collection[int]) -> Mapping[int, tuple[Sequence[int], Sequence[float]]]:
        """Tokens and log-probs that running requests have written so far."""
        rows = self._rows
        return {
            run.request.id: (rows.tokens(row), rows.logprobs(row))
            for row, run in enumerate(self._running)
            if run.request.id in ids
        }

    @torch.inference_mode()
    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`."""
        unwanted = set(ids)
        gone = [run for run in self._waiting if run.request.id in unwanted]
        self._waiting = deque(run for run in self._waiting if run.request.id not in unwanted)
        gone += self._give_up_reading(unwanted)
        rows = [row for row, run in enumerate(self._running) if run.request.id in unwanted]
        gone += [self._settled(row) for row in rows]
        self._leave(rows, keep=False)
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
        yield from plain_weights(self._model)

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
        runs = [self._settled(row) for row in range(len(self._running))]
        for run in reversed([*runs, *self._reading]):
            run.piece = None
            self._waiting.appendleft(run)
        self._stop_writing()

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
        if self._rest_on is not None:
            self._model.to(self._rest_on)
            self._passes.let_go()

    def wake(self) -> None:
        """The cache comes back with the next request."""
        if self._rest_on is not None:
            self._model.to(self._awake_on)
            lay_together(self._model.base_model)

    def close(self) -> None:
        """See `Engine.close`."""
        self._waiting.clear()
        self._stop_writing()
        self._open()

    def _stop_writing(self) -> None:
        """Nobody runs any more."""
        self._reading.clear()
        self._running.clear()
        self._free = list(range(self._slots))[::-1]
        self._rows.count = 0
        self._changed()

    def _settled(self, row: int) -> _Running:
        """The request of a row, with what it wrote."""
        run = self._running[row]
        run.tokens, run.logprobs = self._rows.tokens(row), self._rows.logprobs(row)
        return run

    def _changed(self) -> None:
        """Other rows run than before."""
        self._draw = self._shared = None

    def _admit(self) -> None:
        """Begin to read the prompts of as many waiting requests as there is room for."""
        count = min(self._slots - len(self._running) - len(self._reading), len(self._waiting))
        if not count:
            return
        admitted = [self._waiting.popleft() for _ in range(count)]
        pieces = self._reader.pieces_for([(run.request.id, run.prompt) for run in admitted])
        for run, piece in zip(admitted, pieces, strict=True):
            run.piece = piece
            if run.request.repetition_penalty != 1.0:
                run.seen = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
                run.seen[torch.tensor(run.prompt, device=self._device)] = True
        self._reading += admitted
        self._shared = None

    @property
    def _vocabulary(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    def _begin_writing(self) -> list[Tensor]:
        """Requests whose prompt is computed come behind the running ones; the state of each one's last token,
        [hidden]."""
        ready = [run for run in self._reading if run.piece and run.piece.hidden is not None]
        if not ready:
            return []
        self._reading = [run for run in self._reading if run.piece is None or run.piece.hidden is None]
        begun = [
            Beginning(
                run.request,
                run.tokens,
                run.logprobs,
                min(run.request.max_tokens, self._context - len(run.request.prompt)),
                _is_special(run.request),
            )
            for run in ready
        ]
        self._rows.add(begun, [self._free.pop() for _ in ready], self._vocabulary)
        self._running += ready
        self._changed()
        return [run.piece.hidden for run in ready if run.piece and run.piece.hidden is not None]

    def _compute(self) -> Tensor | None:
        """One forward pass: a token for each running request, and the next tokens of prompts that are being read. The
        states of the running ones, [running, hidden]."""
        prompts = self._reader.next(run.piece for run in self._reading if run.piece)
        works = [*([self._decoding()] if self._running else []), *([prompts] if prompts else [])]
        if not works:
            return None
        states = self._passes(works)
        if prompts:
            self._reader.have_read(states[-1])
        return states[0] if self._running else None

    def _decoding(self) -> Work:
        """The last token of each running request."""
        rows, n = self._rows, self._rows.count
        own = rows.written[:n] - 1
        places = own - rows.held[:n]
        self._answers.reserve(int(rows.slot[:n].max()) + 1, int(places.max()) + 1)
        layout = DecodeLayout(self._answers, self._shared_pieces(), self._sent(rows.slot[:n]), self._sent(places))
        return Work(self._sent(rows.last[:n]), self._sent(rows.prompt[:n] + own), layout)

    def _sent(self, values: npt.NDArray[Any]) -> Tensor:
        """An array where the model is; on a CPU it is the same memory."""
        return torch.from_numpy(values).to(self._device)

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

    def _draw_tokens(self, hidden: Tensor) -> None:
        """Sample one token for every running request from hidden states [n, hidden]."""
        rows = self._rows
        draw = self._draw = self._draw or _Draw(
            self._sent(rows.seed[: rows.count]),
            self._sent(rows.temperature[: rows.count]),
            rows.special[: rows.count].nonzero()[0].tolist(),
        )
        logits = self._model.get_output_embeddings()(hidden).float()
        tokens, logprobs = sample(
            logits,
            draw.temperature,
            draw.numbers(self._sent(rows.written[: rows.count])),
            draw.changes(self._running, rows, self._vocabulary),
        )
        rows.append(tokens.cpu().numpy(), logprobs.cpu().numpy())
        for row in draw.special:
            seen = self._running[row].seen
            if seen is not None:
                seen[rows.last[row]] = True

    def _retire(self) -> list[Generation]:
        """Take out what ended."""
        ended = {row: reason for row in self._rows.ended() if (reason := self._stop_reason(row)) is not None}
        generations = [_generation(self._settled(row), reason) for row, reason in ended.items()]
        if ended:
            self._keep_dialogues([row for row, reason in ended.items() if reason is not StopReason.FAILED])
            self._leave(list(ended))
        return generations

    def _stop_reason(self, row: int) -> StopReason | None:
        """Why a row ends that may; None where it goes on."""
        rows, request = self._rows, self._running[row].request
        count = int(rows.written[row])
        if np.isnan(rows.logprobs(row)[-1]):
            return StopReason.FAILED
        if rows.last[row] in request.stop_ids and count >= request.min_tokens:
            return StopReason.STOP
        if request.stop_texts and count >= request.min_tokens and self._holds_stop(row):
            return StopReason.STOP
        if count >= request.max_tokens:
            return StopReason.LENGTH
        return StopReason.CONTEXT if len(request.prompt) + count >= self._context else None

    def _holds_stop(self, row: int) -> bool:
        """Whether one of the stop texts comes up at the answer's end. A token is a byte at least, a letter four bytes
        at most."""
        if self._decode_text is None:
            return False
        texts = self._running[row].request.stop_texts
        end = self._decode_text(self._rows.tokens(row)[-4 * (max(map(len, texts)) + 1) :])
        return any(text in end for text in texts)

    def _leave(self, leaving: Sequence[int], *, keep: bool = True) -> None:
        """Take rows out; the last ones move into the gaps."""
        if not leaving:
            return
        rows = self._rows
        runs = [self._running[row] for row in leaving]
        for again in (False, True):
            # of a dialogue that goes on, the prompt is kept with the answer
            pieces = [run.piece for run in runs if run.piece and again == (keep and not run.request.keep)]
            self._prompts.release(pieces, keep=again)
        left = [int(rows.slot[row]) for row in leaving]
        gaps, movers = rows.leave(leaving)
        for gap, mover in zip(gaps, movers, strict=True):
            self._running[gap] = self._running[mover]
        del self._running[rows.count :]
        if gaps and not self._answers.scattered:
            # the products over all rows read slot i for row i
            used = int((rows.written[gaps] - rows.held[gaps]).max())
            self._answers.take(gaps, self._answers, movers, used)
            left = list(range(rows.count, rows.count + len(leaving)))
            rows.slot[gaps] = gaps
        self._free += left[::-1]
        self._changed()

    def _keep_dialogues(self, ended: Sequence[int]) -> None:
        """Lay aside what is computed of dialogues that go on."""
        rows = self._rows
        for row in ended:
            run = self._running[row]
            if run.request.keep and run.piece:
                answer = rows.tokens(row)[rows.held[row] : -1]
                self._prompts.keep_dialogue(run.request.id, run.piece, answer, self._answers, int(rows.slot[row]))


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
