"""The engine protocol: tokens in, tokens and log-probs out, continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quintet.config.native import EngineConfig
from quintet.records import Generation, Request
from quintet.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["ENGINES", "Engine", "EngineFault", "EngineSetup"]


class EngineFault(RuntimeError):
    """An engine died, or can't take what it is given; the message names the cause."""


class Engine(Protocol):
    """Writes turns. Requests join and leave at every step; nobody waits for the longest."""

    weight_version: int

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt leaves no room for a single token.
        """
        ...

    def step(self) -> list[Generation]:
        """Let the running requests advance; those that ended since the last call. A request that the engine can't go
        on with ends as `StopReason.FAILED` and takes no other along.

        Raises:
            EngineFault: the engine itself is gone, with all that it ran.
        """
        ...

    @property
    def busy(self) -> bool:
        """Requests wait or run."""
        ...

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """Drop requests; what they had written so far, as `StopReason.ABORT`. Unknown ids are passed over."""
        ...

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, full tensors under Hugging Face names; an engine that shares the learner's model doesn't
        read the stream. Forgets what is computed; running requests go on under the new weights.

        Raises:
            EngineFault: a weight has no place in the engine, or the stream lacks one.
        """
        ...

    def forget(self) -> None:
        """Drop computed prompts, so that nothing to come depends on what was asked before."""
        ...

    def sleep(self) -> None:
        """Free the cache until `wake`; no request may be running."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """Let go of memory and processes, for good."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is opened with."""

    directory: Path
    """Hugging Face directory: configuration, tokenizer, first weights."""
    model: PreTrainedModel
    """In float32; an engine in this process may run it as it is."""
    dtype: torch.dtype
    """Type of the engine's weights."""
    slots: int
    """Most requests side by side."""
    context: int
    """Most tokens of prompt and answer together."""
    decode: Callable[[Sequence[int]], str]
    """Tokens to text, special tokens included, for stops that are texts."""
    options: EngineConfig
    seed: int = 0
    trust_remote_code: bool = False
    learner_owns: bool = True
    """The model is the learner's own, which must stay as it is and whose weights are always the newest."""


ENGINES: Registry[Engine] = Registry("engine", entry_points="quintet.engines")
"""Names to functions that open an engine with an `EngineSetup`."""
ENGINES.add("hf", "quintet.rollout.hf:open_hf", help="any transformers causal LM, decoded in this process")
ENGINES.add(
    "vllm",
    "quintet.rollout.vllm:open_vllm",
    help="vLLM, in this process or its own",
    requires=("vllm",),
    how="pip install vllm; without a GPU: bash scripts/install_vllm_cpu.sh",
)
ENGINES.add("sglang", "quintet.rollout.sglang:open_sglang", help="SGLang, in this process", requires=("sglang",))
ENGINES.add("sglang-server", "quintet.rollout.sglang:open_sglang_server", help="SGLang, behind its HTTP server")
