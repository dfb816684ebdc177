"""Whether an engine plays the policy that learns: its weights against the learner's, and its log-probs against theirs.

`rollout.engine_options.validate_weights` asks for it before the first step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from quintet.errors import MachineError
from quintet.policies.adapters import plain_weights
from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import Packed, token_statistics
from quintet.records import Generation, Request, StopReason
from quintet.rollout.engine import Engine

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Difference", "Readable", "WeightsCheck", "check_weights", "compare_weights"]

KEY = "rollout.engine_options.validate_weights"
TOKENS = 32
"""Length of the replies that are compared."""
EXACT, ROUNDED = 1e-3, 0.25
"""Largest difference of log-probs, nats, between kernels of the same type, and where the engine's type is smaller."""
RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""Of weights of the same type."""


@runtime_checkable
class Readable(Protocol):
    """An engine that can be asked for its weights."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names."""
        ...


@dataclass(frozen=True, slots=True)
class Difference:
    """One weight on both sides."""

    name: str
    problem: str
    """`equal`, `rounded` (the same in the engine's type), `differs`, `shape` or `missing`."""
    largest: float = 0.0
    """Largest absolute difference."""

    @property
    def wrong(self) -> bool:
        return self.problem not in ("equal", "rounded")


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """What came of a comparison."""

    weights: tuple[Difference, ...] | None
    """One for each weight of the learner; None where the engine can't be asked for its own."""
    logprobs: float
    """Largest difference of log-probs, nats."""

    def __str__(self) -> str:
        if self.weights is None:
            return f"engine and learner agree: log-probs differ by {self.logprobs:.1e} at most"
        return f"engine and learner agree: {len(self.weights)} weights, log-probs by {self.logprobs:.1e} at most"


def check_weights(
    engine: Engine,
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    exact: bool,
    directory: Path | None = None,
) -> WeightsCheck:
    """Compare an engine with the learner's model, which are to have the same weights, on a few prompts. `exact` says
    that both compute in the same type. In `directory` both sides' weights are stored, and a table of what differs.

    Raises:
        MachineError: they differ.
    """
    theirs = dict(engine.weights()) if isinstance(engine, Readable) else None
    ours = dict(plain_weights(model))
    weights = None if theirs is None else tuple(compare_weights(ours.items(), theirs))
    if directory is not None:
        _store(directory, ours, theirs, weights)
    wrong = [one for one in weights or () if one.wrong]
    if wrong:
        raise _differing(wrong, directory)
    largest = _compare_replies(engine, model, prompts)
    if largest > (EXACT if exact else ROUNDED):
        raise MachineError(
            f"{KEY}: log-probs of engine and learner differ by {largest:.2g} nats on the same words",
            "the engine computes another model; `quintet check drift` shows where they part",
        )
    return WeightsCheck(weights, largest)


def compare_weights(ours: Iterable[tuple[str, Tensor]], theirs: dict[str, Tensor]) -> Iterator[Difference]:
    """Each of the learner's weights beside the engine's. Weights that the engine has beyond them are passed over: a
    head that is tied to the embedding counts once."""
    for name, weight in ours:
        other = theirs.get(name)
        if other is None:
            yield Difference(name, "missing")
        elif other.shape != weight.shape:
            yield Difference(name, "shape")
        else:
            yield _compared(name, weight.detach().cpu(), other.detach().cpu())


def _compared(name: str, weight: Tensor, other: Tensor) -> Difference:
    largest = float((weight.float() - other.float()).abs().max()) if weight.numel() else 0.0
    if torch.equal(weight.to(other.dtype), other):
        return Difference(name, "equal" if largest == 0.0 else "rounded", largest)
    near = torch.allclose(weight.to(other.dtype).float(), other.float(), rtol=RELATIVE, atol=ABSOLUTE)
    return Difference(name, "equal" if near else "differs", largest)


def _differing(wrong: Sequence[Difference], directory: Path | None) -> MachineError:
    told = "; ".join(f"{one.name}: {one.problem}{_by(one)}" for one in wrong[:3])
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    where = f"{directory / 'differences.json'} has them all" if directory else f"{KEY}_dir stores them all"
    return MachineError(f"{KEY}: engine and learner differ in {len(wrong)} weights ({told}{more})", where)


def _by(one: Difference) -> str:
    return f" by {one.largest:.2g}" if one.problem == "differs" else ""


def _store(
    directory: Path, ours: dict[str, Tensor], theirs: dict[str, Tensor] | None, found: Sequence[Difference] | None
) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    for side, weights in {"learner": ours, "engine": theirs}.items():
        if weights is not None:
            plain = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
            save_file(plain, directory / f"{side}.safetensors")
    table = None if found is None else [asdict(one) for one in found]
    (directory / "differences.json").write_text(json.dumps(table, indent=1))


def _compare_replies(engine: Engine, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> float:
    """Largest difference of log-probs of the engine's own greedy words."""
    replies = _replies(engine, prompts)
    pairs = zip(prompts, replies, strict=True)
    return max((_difference(model, prompt, reply) for prompt, reply in pairs), default=0.0)


def _replies(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[Generation]:
    for number, prompt in enumerate(prompts):
        room = min(TOKENS, engine.context - len(prompt))
        engine.submit(Request(id=number, prompt=prompt, max_tokens=room, seed=number, temperature=0.0))
    found: dict[int, Generation] = {}
    while engine.busy:
        found |= {generation.id: generation for generation in engine.step()}
    for number in range(len(prompts)):
        failure = found[number].failure if number in found else None
        if number not in found or found[number].stop is StopReason.FAILED:
            told = failure.message if failure else "no answer"
            raise MachineError(f"{KEY}: the engine couldn't answer a prompt ({told})", "see what the engine lacks")
    return [found[number] for number in range(len(prompts))]


def _difference(model: PreTrainedModel, prompt: tuple[int, ...], reply: Generation) -> float:
    if not reply.tokens:
        return 0.0
    tokens = torch.tensor([*prompt, *reply.tokens], device=model.device)
    places = torch.arange(len(tokens), device=model.device)
    whole = PackedLayout(torch.tensor([len(tokens)]))
    packed = Packed(tokens, places, whole, places[len(prompt) - 1 : -1], tokens[len(prompt) :])
    was = model.training
    model.eval()
    with torch.no_grad():
        own, _ = token_statistics(model, packed)
    model.train(was)
    apart = (own.cpu() - torch.tensor(reply.logprobs)).abs()
    return float(apart.nan_to_num(nan=math.inf).max())
