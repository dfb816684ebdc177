"""What SGLang is asked, and what it says, whichever way it is reached.

The names are SGLang's own, as of 0.5.23 (`tests/unit/rollout/sglang_signatures.json` has them as they were published).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.errors import ConfigError
from quintet.records import Request, StopReason

__all__ = [
    "CONTROLS",
    "Garbled",
    "Piece",
    "Refused",
    "Writing",
    "ask_for_more",
    "ask_for_scores",
    "check",
    "penalised",
    "read_piece",
    "read_scores",
]

CONTROLS: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    "abort_request": ("AbortReq", ("rid",)),
    "begin_weight_update": ("BeginWeightUpdateReqInput", ()),
    "continue_generation": ("ContinueGenerationReqInput", ()),
    "end_weight_update": ("EndWeightUpdateReqInput", ()),
    "flush_cache": (None, ()),
    "pause_generation": ("PauseGenerationReqInput", ("mode",)),
    "release_memory_occupation": ("ReleaseMemoryOccupationReqInput", ("tags",)),
    "resume_memory_occupation": ("ResumeMemoryOccupationReqInput", ("tags",)),
    "update_weights_from_disk": (
        "UpdateWeightFromDiskReqInput",
        ("model_path", "load_format", "weight_version", "flush_cache"),
    ),
    "update_weights_from_tensor": (
        "UpdateWeightsFromTensorReqInput",
        ("serialized_named_tensors", "load_format", "weight_version", "flush_cache"),
    ),
}
"""What is asked besides generation: the HTTP route and the tokenizer manager's method of one name, the record that it
takes (`srt/managers/io_struct.py`), and which of its fields are given."""

MOST_PENALTY = 2.0
OFF = -1
"""SGLang's `top_k` that keeps the whole vocabulary."""


class Refused(RuntimeError):
    """SGLang is there and says no to one thing that it was asked; `kind` is its status or the error's type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Garbled(ValueError):
    """An answer that isn't SGLang's protocol, or has numbers that are none."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request for generation brought."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str
    """`stop`, `length` or `abort`."""
    matched: int | str | None
    """The token or the text that ended it."""
    versions: tuple[tuple[int, str], ...]
    """`(place, version)`: from that token on, these weights wrote. Empty where SGLang doesn't say."""
    message: str = ""


@dataclass(slots=True)
class Writing:
    """A request on its way, and what was written for it so far."""

    request: Request
    version: int
    """Weights that the engine had when it was sent."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(place, version)` of each stretch."""
    reason: StopReason | None = None
    """Why it ended, where only the log-probs are still to come."""
    aborted: bool = False

    def add(self, piece: Piece, numbers: Sequence[tuple[int, int]]) -> None:
        """Append what came, with the versions of its stretches."""
        before = len(self.tokens)
        for place, number in numbers:
            if not self.versions or self.versions[-1][1] != number:
                self.versions.append((before + place, number))
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs

    def end_of(self, piece: Piece, context: int) -> StopReason | None:
        """Why the answer ends here; null where SGLang stopped at an end of the model's own that the request doesn't
        stop at.

        Raises:
            Garbled: the model gave no numbers to draw from.
        """
        request = self.request
        if piece.end == "stop" and isinstance(piece.matched, str) and piece.matched not in request.stop_texts:
            raise Garbled(f"SGLang ended an answer with {piece.matched!r}, which nobody asked for")
        if piece.end == "abort":
            return StopReason.ABORT
        asked = isinstance(piece.matched, str) or (bool(self.tokens) and self.tokens[-1] in request.stop_ids)
        if piece.end == "stop" and asked:
            return StopReason.STOP
        if len(self.tokens) >= request.max_tokens:
            return StopReason.LENGTH
        full = len(request.prompt) + len(self.tokens) >= context
        return StopReason.CONTEXT if piece.end == "length" or full else None


def penalised(request: Request) -> bool:
    """Whether SGLang's log-probs are those of a distribution that penalties have changed."""
    return request.repetition_penalty != 1.0 or request.min_tokens > 0


def check(request: Request, context: int, *, texts: bool) -> None:
    """Look whether SGLang can serve a request as it is meant.

    Raises:
        ValueError: the prompt leaves no room for a single token.
        ConfigError: it needs a tokenizer in the engine, or log-probs that SGLang can't give.
    """
    if not 0 < len(request.prompt) < context:
        raise ValueError(f"a prompt of {len(request.prompt)} tokens in a context of {context}")
    if (request.stop_texts or request.min_tokens > 0) and not texts:
        raise ConfigError(
            "SGLang stops at texts, and holds back the end of an answer, only with a tokenizer of its own",
            key="rollout.engine_options.detokenize",
            value=False,
            hint="give rollout.engine_options.detokenize: true",
        )
    if request.repetition_penalty > MOST_PENALTY:
        raise ConfigError(
            f"rollout.repetition_penalty = {request.repetition_penalty:g}: SGLang takes at most {MOST_PENALTY:g}",
            key="rollout.repetition_penalty",
            value=request.repetition_penalty,
        )
    if penalised(request) and request.temperature not in (0.0, 1.0):
        raise ConfigError(
            "SGLang's log-probs include rollout.repetition_penalty and rollout.min_response_tokens; without them they "
            f"can be had at temperature 1 only, not at {request.temperature:g}",
            key="rollout.temperature",
            value=request.temperature,
            hint="give rollout.temperature: 1, leave the penalties out, or take another engine",
        )


def ask_for_more(writing: Writing, context: int) -> dict[str, Any]:
    """The body of the request that goes on where `writing` stands."""
    request, written = writing.request, len(writing.tokens)
    room = context - len(request.prompt) - written
    return {
        "input_ids": [*request.prompt, *writing.tokens],
        "sampling_params": _sampling(request, written, min(request.max_tokens - written, room)),
        "return_logprob": True,
    }


def _sampling(request: Request, written: int, most: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or OFF,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "min_new_tokens": min(max(request.min_tokens - written, 0), most),
        "max_new_tokens": most,
        "sampling_seed": request.seed % (1 << 63),
        "ignore_eos": not request.stop_ids,
    }
    if request.stop_ids:
        told["stop_token_ids"] = list(request.stop_ids)
    if request.stop_texts:
        told["stop"] = list(request.stop_texts)
    return told


def ask_for_scores(writing: Writing) -> dict[str, Any]:
    """The body of the request for the log-probs of what was written, untouched by penalties."""
    request = writing.request
    return {
        "input_ids": [*request.prompt, *writing.tokens],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": len(request.prompt) - 1,
    }


def read_piece(body: Mapping[str, Any]) -> Piece:
    """What `/generate` said.

    Raises:
        Garbled: that isn't it.
    """
    try:
        meta = body["meta_info"]
        end = meta["finish_reason"]
        rows = meta.get("output_token_logprobs") or ()
        tokens, logprobs = tuple(int(row[1]) for row in rows), tuple(_number(row[0]) for row in rows)
        versions = tuple((int(span["start"]), str(span["version"])) for span in meta.get("weight_versions") or ())
        piece = Piece(tokens, logprobs, end["type"], end.get("matched"), versions, str(end.get("message") or ""))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Garbled(f"not an answer of SGLang's: {type(error).__name__}: {error}") from error
    given = body.get("output_ids")
    if given is not None and tuple(given) != piece.tokens:
        raise Garbled(f"{len(piece.tokens)} log-probs for {len(given)} tokens")
    return _numbers(piece)


def _number(value: Any) -> float:
    """JSON has no other word for what isn't a number than null."""
    return math.nan if value is None else float(value)


def _numbers(piece: Piece) -> Piece:
    if not all(map(math.isfinite, piece.logprobs)):
        raise Garbled("log-probs that are no numbers: do the weights contain NaN?")
    return piece


def read_scores(body: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Log-probs of `tokens`, the end of what was scored.

    Raises:
        Garbled: they aren't there.
    """
    try:
        rows = body["meta_info"]["input_token_logprobs"][-len(tokens) :]
        found = [(int(row[1]), float(row[0])) for row in rows]
    except (LookupError, TypeError, ValueError) as error:
        raise Garbled(f"no log-probs of the prompt: {type(error).__name__}: {error}") from error
    if [token for token, _ in found] != list(tokens) or not all(math.isfinite(value) for _, value in found):
        raise Garbled("log-probs of other tokens, or that are no numbers")
    return [value for _, value in found]
