"""Engine protocol, its setup and the registry: token ids in, token ids and log-probs out, continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quintet.config.native.rollout import EngineConfig
from quintet.records import Generation, Request
from quintet.registry import Registry
from quintet.rollout.engines.weight_source import WeightSource

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from quintet.rollout.engines.grammars import GrammarCompiler


class EngineError(RuntimeError):
    """An engine died, or rejected weights or a request; the message names the cause."""


class RequestEngine(Protocol):
    """An engine with continuous batching, for those who use it: requests join and leave the running batch at every
    step."""

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt leaves no room for a single token, or the structured output is invalid.
        """

    def step(self) -> list[Generation]:
        """Advance the running requests and return those that finished since the last call. A request that cannot
        continue finishes as `FinishReason.FAILED` without affecting the others.

        Raises:
            EngineError: the engine itself died, together with all its requests.
        """

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """Abort requests and return their partial responses as `FinishReason.ABORT`. Unknown ids are ignored."""

    def reset_prefix_cache(self) -> None:
        """Drop the keys and values of earlier prompts, so that later results do not depend on earlier requests."""


class Engine(RequestEngine, Protocol):
    """An inference engine and its weights."""

    weight_version: int

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and response together."""

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """Load the weights of a source and drop all cached keys and values; running requests continue under the new
        weights. The caller ends the load with `WeightSource.finish`.

        Raises:
            EngineError: a weight is unknown to the engine, or one is missing.
        """

    def sleep(self) -> None:
        """Free the KV cache until `wake_up`; no request may be running."""

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """Release memory and processes for good."""


def take_steps(engine: Engine, count: int) -> list[Generation]:
    """Advance the engine by up to `count` steps while it is busy; return the finished requests.

    Raises:
        EngineError: the engine died, together with all its requests.
    """
    generations: list[Generation] = []
    while count > 0 and engine.busy:
        generations += engine.step()
        count -= 1
    return generations


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Everything that an engine is built from."""

    directory: Path
    """Hugging Face directory: configuration, tokenizer, initial weights."""
    model: PreTrainedModel
    """Model in float32; an engine in this process may use it in place."""
    dtype: torch.dtype
    """Data type of the engine's weights."""
    max_num_seqs: int
    """Maximum number of requests that are decoded at the same time."""
    max_model_len: int
    """Maximum number of tokens of prompt and response together."""
    detokenize: Callable[[Sequence[int]], str]
    """Token ids to text, special tokens included; used for stop strings."""
    options: EngineConfig
    seed: int = 0
    trust_remote_code: bool = False
    grammars: GrammarCompiler | None = None
    """Compiler of structured outputs, for engines that do not have one; None refuses them."""
    is_learner_model: bool = True
    """Whether `model` is the learner's: then it must not be modified, and it always has the newest weights."""
    is_interactive: bool = False
    """Whether clients wait for each token, and log-probs are not compared with a learner's."""
    max_cache_blocks: int | None = None
    """Blocks of the embedded engine's KV cache; None for enough for all concurrent requests."""


ENGINES: Registry[Engine] = Registry("engine", entry_points="quintet.engines")
"""Functions that build an engine from an `EngineSetup`, by name."""
ENGINES.add_file(__file__, "engines.yaml")
