"""Check of the embedded engine on a model: sampled log-probs against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.errors import MachineError, UserError
from quintet.policies.attention import MODELS_HINT
from quintet.policies.model_check import MAX_DIFFERENCE, VOCABULARY, build_miniature, reference_logits
from quintet.policies.output_head import MASKED_LOGIT
from quintet.records import Generation, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quintet.rollout.engines.engine import RequestEngine

SHARED, TAILS, RESPONSE = 18, (3, 1, 5), 4
"""Tokens that all prompts begin with, more than a block; further tokens of each prompt, and tokens of each response."""
MAX_MODEL_LEN = 32


def check_engine(model: PreTrainedModel, build: Callable[[PreTrainedModel, int], RequestEngine]) -> None:
    """Sample a few tokens for prompts of different lengths that share a prefix, by the model's miniature with its
    adapters, and compare log-probs with transformers' own forward pass, one sequence at a time. `build` returns an
    engine on a model with a given maximum length.

    Raises:
        MachineError: the log-probs differ, or the model's code raises an error.
    """
    try:
        miniature = build_miniature(model)
        generations = _generate(build(miniature, MAX_MODEL_LEN), requests := _requests(miniature))
        sequences = [
            torch.tensor([*r.prompt, *g.tokens], device=model.device)
            for r, g in zip(requests, generations, strict=True)
        ]
        reference = reference_logits(miniature, sequences)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # a model's code may raise anything on input that it was not made for
        raise _unsupported(model, f"{type(error).__name__}: {error}") from error
    for request, generation, logits in zip(requests, generations, reference, strict=True):
        if difference := _difference(request, generation, logits):
            raise _unsupported(
                model, f"log-probs of sampled tokens differ by {difference:.2g} from those of transformers"
            )


def _requests(miniature: PreTrainedModel) -> list[Request]:
    vocabulary = min(VOCABULARY, miniature.config.get_text_config().vocab_size)
    tokens = torch.randint(vocabulary, (SHARED + sum(TAILS),), generator=torch.Generator().manual_seed(1)).tolist()
    ends = [SHARED + sum(TAILS[: row + 1]) for row in range(len(TAILS))]
    prompts = [(*tokens[:SHARED], *tokens[end - tail : end]) for end, tail in zip(ends, TAILS, strict=True)]
    # the longest response ends first, so that rows move
    return [Request(row, prompt, RESPONSE - row, seed=row) for row, prompt in enumerate([*prompts, prompts[0]])]


def _generate(engine: RequestEngine, requests: Sequence[Request]) -> list[Generation]:
    for request in requests[:-1]:
        engine.add_request(request)
    finished = {generation.id: generation for generation in engine.step()}
    engine.add_request(requests[-1])
    while engine.busy:
        finished.update((generation.id, generation) for generation in engine.step())
    return [finished[request.id] for request in requests]


def _difference(request: Request, generation: Generation, logits: Tensor) -> float:
    """Return the largest difference of a response's log-probs; 0 if it is within rounding errors."""
    expected = logits[len(request.prompt) - 1 : -1].float().log_softmax(-1)
    sampled = expected.gather(1, torch.tensor(generation.tokens, device=expected.device)[:, None])[:, 0]
    difference = float((sampled - torch.tensor(generation.logprobs, device=expected.device)).abs().max())
    largest = float(logits.masked_fill(logits == MASKED_LOGIT, 0.0).abs().max())
    return 0.0 if difference <= MAX_DIFFERENCE * max(largest, 1e-2) else difference


def _unsupported(model: PreTrainedModel, reason: str) -> MachineError:
    return MachineError(
        f"rollout.engine = hf does not support {type(model).__name__}: {reason}",
        f"set rollout.engine=vllm, or use another model: {MODELS_HINT}",
    )
