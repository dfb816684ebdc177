"""The engine protocol: tokens in, tokens and log-probs out, continuous batching."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from quintet.records import Generation, Request
from quintet.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ENGINES", "Engine"]


class Engine(Protocol):
    """Writes turns. Requests join and leave at every step; nobody waits for the longest."""

    weight_version: int

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt leaves no room for a single token.
        """
        ...

    def step(self) -> list[Generation]:
        """Advance every running request by one token; the ones that ended."""
        ...

    @property
    def busy(self) -> bool:
        """Requests wait or run."""
        ...

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, full tensors under Hugging Face names. Forgets cached prefixes."""
        ...

    def forget(self) -> None:
        """Drop computed prompts, so that nothing to come depends on what was asked before."""
        ...

    def sleep(self) -> None:
        """Free the cache until `wake`."""
        ...

    def wake(self) -> None: ...


ENGINES: Registry[Engine] = Registry("engine", entry_points="quintet.engines")
ENGINES.add("hf", "quintet.rollout.hf:HfEngine", help="any transformers causal LM, decoded in this process")
