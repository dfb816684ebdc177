"""Positions up to which rotary embeddings do not depend on the longest sequence of a pass.

`longrope` and `dynamic` embeddings (transformers' names) have other frequencies in all sequences of a pass as soon as
one of them exceeds the original context. Packed or batched with it, a shorter sequence would be computed differently
than alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from quintet.errors import MachineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def limit_positions(model: PreTrainedModel) -> None:
    """Make the model's rotary embeddings raise a `MachineError` for positions at which their frequencies change."""
    for module in model.modules():
        if hasattr(module, "inv_freq") and (limits := list(_limits(getattr(module, "config", None)))):
            module.register_forward_pre_hook(partial(_check_positions, min(limits)), with_kwargs=True)


def _limits(config: Any) -> Iterator[int]:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return
    for parameters in rope.values() if all(isinstance(value, Mapping) for value in rope.values()) else [rope]:
        if parameters.get("rope_type") == "longrope":
            yield int(parameters["original_max_position_embeddings"])
        elif parameters.get("rope_type") == "dynamic":
            yield int(config.max_position_embeddings)


def _check_positions(limit: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if (longest := int(positions.max()) + 1) > limit:
        raise MachineError(
            f"a sequence has {longest} tokens, but the rotary embedding of this model ({type(module).__name__}) changes"
            f" for all sequences of a pass beyond {limit}, which is not supported yet",
            f"limit rollout.max_prompt_tokens + rollout.max_response_tokens, and sft.max_tokens, to {limit}",
        )
