"""Weight sync to vLLM: check of completeness, names, and tied weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from quintet.policies.hf_weight_names import hf_named_weights
from quintet.rollout.engines.engine import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Names and shapes of the weights that a weight sync must have."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: tuple[tuple[str, str], ...]
    """`(alias, name)` of tied weights. vLLM keeps a packed copy of a tied head: without the alias, the head silently
    keeps its old weights."""
    model: PreTrainedModel | None = None
    """Model whose Hugging Face file names vLLM reads."""

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> WeightPlan:
        """Read names and shapes from the learner's model, with LoRA adapters merged."""
        first: dict[int, str] = {}
        aliases = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if ".lora_" in name:
                continue
            plain = name.replace(".base_layer.", ".")
            first_name = first.setdefault(id(parameter), plain)
            if first_name != plain:
                aliases.append((plain, first_name))
        shapes = {
            name.replace(".base_layer.", "."): tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if ".lora_" not in name
        }
        return cls(shapes, tuple(aliases), model)

    def collect(self, stream: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Collect all weights of a stream except aliases, under the names of the model's files. The stream is read
        completely before vLLM is modified.

        Raises:
            EngineError: a weight is missing, unknown, or of another shape.
        """
        names = self.shapes.keys() | {alias for alias, _ in self.aliases}
        weights = {}
        for name, tensor in stream:
            if name not in names:
                raise EngineError(f"the engine has no weight {name!r}")
            if name in self.shapes:
                self._check_shape(name, tensor)
                weights[name] = tensor.detach()
        if missing := [name for name in self.shapes if name not in weights]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise EngineError(f"the weight sync lacks {missing[0]!r}{more}")
        return weights if self.model is None else dict(hf_named_weights(self.model, weights.items()))

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self.shapes[name]:
            raise EngineError(
                f"weight {name!r} has shape {list(tensor.shape)}, the engine expects {list(self.shapes[name])}"
            )

    def with_aliases(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights and their aliases."""
        yield from weights.items()
        for alias, name in self.aliases:
            yield alias, weights[name]
