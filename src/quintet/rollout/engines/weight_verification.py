"""Verification of an engine against the learner: weights and log-probs.

Enabled by `rollout.engine_options.validate_weights`, before the first step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from quintet.errors import MachineError
from quintet.policies.attention import PackedLayout
from quintet.policies.lora import iter_merged_weights
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.token_statistics import log_probs_and_entropy
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "rollout.engine_options.validate_weights"
MAX_TOKENS = 32
"""Length of the responses whose log-probs are compared."""
MAX_GAP_SAME_DTYPE, MAX_GAP_LOWER_PRECISION = 1e-3, 0.25
"""Maximum difference of log-probs, nats."""
RTOL, ATOL = 1e-3, 1e-4
"""Tolerances of weights."""


@runtime_checkable
class ReadableEngine(Protocol):
    """An engine whose weights can be read."""

    def weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """Return full tensors under Hugging Face names; None if the engine of another process cannot be read."""


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """Comparison of one weight of engine and learner."""

    name: str
    problem: str
    """`equal`, `rounded` (the same in the engine's type), `differs`, `shape` or `missing`."""
    max_difference: float = 0.0
    """Maximum absolute difference."""

    @property
    def is_mismatch(self) -> bool:
        return self.problem not in ("equal", "rounded")


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """Result of a verification."""

    weights: tuple[WeightDifference, ...] | None
    """One entry per weight of the learner; None if the engine's weights cannot be read."""
    logprobs: float
    """Maximum difference of log-probs, nats."""

    def __str__(self) -> str:
        if self.weights is None:
            return f"engine and learner agree: log-probs differ by {self.logprobs:.1e} at most"
        return f"engine and learner agree: {len(self.weights)} weights, log-probs by {self.logprobs:.1e} at most"


def check_weights(
    engine: Engine,
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    same_dtype: bool,
    directory: Path | None = None,
) -> WeightsCheck:
    """Compare weights of engine and learner, and their log-probs on a few prompts. `same_dtype` says that both
    compute in the same data type. The weights of both and a table of differences are saved in `directory`.

    Raises:
        MachineError: they differ.
    """
    engine_weights = read_weights(engine)
    learner_weights = dict(iter_merged_weights(model))
    weights = None if engine_weights is None else tuple(compare_weights(learner_weights.items(), engine_weights))
    if directory is not None:
        _save(directory, learner_weights, engine_weights, weights)
    mismatches = [each for each in weights or () if each.is_mismatch]
    if mismatches:
        raise _mismatch_error(mismatches, directory)
    gap = _compare_logprobs(engine, model, prompts)
    if gap > (MAX_GAP_SAME_DTYPE if same_dtype else MAX_GAP_LOWER_PRECISION):
        raise MachineError(
            f"{KEY}: log-probs of engine and learner differ by {gap:.2g} nats on the same tokens",
            "the engine computes a different model; `quintet check drift` shows where they differ",
        )
    return WeightsCheck(weights, gap)


def read_weights(engine: Engine) -> dict[str, Tensor] | None:
    """Return the engine's weights under Hugging Face names; None if they cannot be read."""
    weights = engine.weights() if isinstance(engine, ReadableEngine) else None
    return None if weights is None else dict(weights)


def compare_weights(
    learner_weights: Iterable[tuple[str, Tensor]], engine_weights: dict[str, Tensor]
) -> Iterator[WeightDifference]:
    """Compare each of the learner's weights with the engine's. Additional weights of the engine are ignored, because a
    tied head counts once."""
    for name, weight in learner_weights:
        other = engine_weights.get(name)
        if other is None:
            yield WeightDifference(name, "missing")
        elif other.shape != weight.shape:
            yield WeightDifference(name, "shape")
        else:
            yield _compare(name, weight.detach().cpu(), other.detach().cpu())


def _compare(name: str, weight: Tensor, other: Tensor) -> WeightDifference:
    largest = float((weight.float() - other.float()).abs().max()) if weight.numel() else 0.0
    if torch.equal(weight.to(other.dtype), other):
        return WeightDifference(name, "equal" if largest == 0.0 else "rounded", largest)
    near = torch.allclose(weight.to(other.dtype).float(), other.float(), rtol=RTOL, atol=ATOL)
    return WeightDifference(name, "equal" if near else "differs", largest)


def _mismatch_error(mismatches: Sequence[WeightDifference], directory: Path | None) -> MachineError:
    listed = "; ".join(
        f"{mismatch.name}: {mismatch.problem}{_difference_text(mismatch)}" for mismatch in mismatches[:3]
    )
    more = f", and {len(mismatches) - 3} more" if len(mismatches) > 3 else ""
    hint = f"see {directory / 'differences.json'}" if directory else f"set {KEY}_dir to save all differences"
    return MachineError(f"{KEY}: engine and learner differ in {len(mismatches)} weights ({listed}{more})", hint)


def _difference_text(difference: WeightDifference) -> str:
    return f" by {difference.max_difference:.2g}" if difference.problem == "differs" else ""


def _save(
    directory: Path,
    learner_weights: dict[str, Tensor],
    engine_weights: dict[str, Tensor] | None,
    differences: Sequence[WeightDifference] | None,
) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    for side, weights in {"learner": learner_weights, "engine": engine_weights}.items():
        if weights is not None:
            plain = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
            save_file(plain, directory / f"{side}.safetensors")
    table = None if differences is None else [asdict(difference) for difference in differences]
    (directory / "differences.json").write_text(json.dumps(table, indent=1), encoding="utf-8")


def _compare_logprobs(engine: Engine, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> float:
    """Maximum difference of log-probs of the engine's greedy responses."""
    responses = _generate(engine, prompts)
    pairs = zip(prompts, responses, strict=True)
    return max((_max_gap(model, prompt, response) for prompt, response in pairs), default=0.0)


def _generate(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[Generation]:
    for number, prompt in enumerate(prompts):
        max_tokens = min(MAX_TOKENS, engine.max_model_len - len(prompt))
        engine.add_request(Request(id=number, prompt=prompt, max_tokens=max_tokens, seed=number, temperature=0.0))
    generations: dict[int, Generation] = {}
    while engine.busy:
        generations |= {generation.id: generation for generation in engine.step()}
    for number in range(len(prompts)):
        failure = generations[number].failure if number in generations else None
        if number not in generations or generations[number].finish_reason is FinishReason.FAILED:
            cause = failure.message if failure else "no response"
            raise MachineError(
                f"{KEY}: the engine did not complete a prompt ({cause})", "see the engine's output above"
            )
    return [generations[number] for number in range(len(prompts))]


def _max_gap(model: PreTrainedModel, prompt: tuple[int, ...], response: Generation) -> float:
    if not response.tokens:
        return 0.0
    tokens = torch.tensor([*prompt, *response.tokens], device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    layout = PackedLayout(torch.tensor([len(tokens)]))
    packed = PackedBatch(tokens, positions, layout, positions[len(prompt) - 1 : -1], tokens[len(prompt) :])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logprobs, _ = log_probs_and_entropy(model, packed)
    model.train(was_training)
    gap = (logprobs.cpu() - torch.tensor(response.logprobs)).abs()
    return float(gap.nan_to_num(nan=math.inf).max())
