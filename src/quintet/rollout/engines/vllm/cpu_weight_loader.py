"""Weight loading into vLLM's model on a CPU, with one copy of each tensor and one packing of each layer.

vLLM's `reload_weights` allocates every layer anew and passes each tensor through several Python functions, which takes
longer than the copies for small models. Its CPU kernels compute with packed weights that they allocate: only layers of
which this is known are loaded here, and only if together they use all weights; vLLM loads other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter of vLLM's model, and the weights that it consists of, one below the other."""

    module: Any
    parameter: str
    sources: tuple[str, ...]
    packed_shape: tuple[int, int] | None = None
    """Shape before packing of a weight that vLLM keeps only packed."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed_shape or tuple(getattr(self.module, self.parameter).shape)

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Return whether the weights exist and fill the parameter; an embedding may be padded by further rows."""
        shapes = [tuple(weights[name].shape) for name in self.sources if name in weights]
        if len(shapes) < len(self.sources) or any(shape[1:] != self.shape[1:] for shape in shapes):
            return False
        rows = sum(shape[0] for shape in shapes)
        return rows <= self.shape[0] if _is_embedding(self.module) else rows == self.shape[0]


class CpuWeightLoader:
    """Loads full weights into the model of a single vLLM worker on a CPU."""

    def __init__(self, targets: list[_Target], dtype: torch.dtype) -> None:
        """`dtype` is the data type of the packed weights."""
        self._targets = targets
        self._dtype = dtype
        sizes = (target.shape[0] * target.shape[1] for target in targets if target.packed_shape)
        self._buffer = torch.empty(max(sizes, default=0), dtype=dtype)
        """Receives the parts of a layer that consists of several weights, or of another type."""

    @classmethod
    def build(cls, model: nn.Module, weights: Mapping[str, Tensor]) -> CpuWeightLoader | Literal[False]:
        """Return a loader for weights of these names and shapes, or False if it does not support the model."""
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size

        if get_tensor_model_parallel_world_size() > 1 or get_pp_group().world_size > 1:
            return False
        parameters = list(model.parameters())
        if any(parameter.device.type != "cpu" for parameter in parameters):
            return False
        targets = list(_iter_targets(model))
        used = {name for target in targets if target is not None for name in target.sources}
        if used != weights.keys() or not all(target is not None and target.fits(weights) for target in targets):
            return False
        return cls([target for target in targets if target is not None], parameters[0].dtype)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights with the names and shapes of `build`, which are not kept."""
        for target in self._targets:
            parts = [weights[name] for name in target.sources]
            if target.packed_shape is None:
                _copy(parts, getattr(target.module, target.parameter))
            else:
                packed = self._joined(parts, target.packed_shape)
                target.module.weight = nn.Parameter(packed, requires_grad=False)
            if target.parameter == "weight" and _has_kernel(target.module):
                target.module.quant_method.process_weights_after_loading(target.module)

    def _joined(self, parts: list[Tensor], shape: tuple[int, int]) -> Tensor:
        """Return the parts as one tensor; a single one is not copied."""
        if len(parts) == 1 and parts[0].dtype == self._dtype and parts[0].is_contiguous():
            return parts[0]
        joined = self._buffer[: shape[0] * shape[1]].view(shape)
        _copy(parts, joined)
        return joined


def _copy(parts: list[Tensor], target: Tensor) -> None:
    """Copy the parts one below the other into the target."""
    row = 0
    for part in parts:
        target[row : row + part.shape[0]].copy_(part)
        row += part.shape[0]


def _iter_targets(model: nn.Module) -> Iterator[_Target | None]:
    """Yield the model's parameters, shared ones once per module; None for an unsupported parameter."""
    parts: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        prefix, _, name = path.rpartition(".")
        names = [f"{prefix}.{part}" if prefix else part for part in parts.get(name, [name])]
        if _derives_weights(module):
            yield None
        for parameter in module._parameters:
            if module._parameters[parameter] is not None:
                yield _target(module, parameter, tuple(f"{module_name}.{parameter}" for module_name in names))


def _target(module: nn.Module, parameter: str, sources: tuple[str, ...]) -> _Target | None:
    if parameter != "weight" or not hasattr(module, "quant_method"):
        return _Target(module, parameter, sources)
    if not _has_kernel(module):
        return None
    if _is_embedding(module):
        return _Target(module, parameter, sources)
    weight: Any = module.weight
    is_packed = weight.numel() == 0  # otherwise the kernel would keep a view of the source
    shape: Any = (module.output_size_per_partition, module.input_size_per_partition)
    return _Target(module, parameter, sources, shape) if is_packed else None


def _has_kernel(module: nn.Module) -> bool:
    """Return whether the weight is an ordinary matrix that a CPU kernel packs."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    method = getattr(module, "quant_method", None)
    return type(method) is UnquantizedLinearMethod or _is_embedding(module)


def _is_embedding(module: nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    return type(getattr(module, "quant_method", None)) is UnquantizedEmbeddingMethod


def _derives_weights(module: nn.Module) -> bool:
    """Return whether a module computes others from its weights after loading, as latent attention does."""
    from vllm.model_executor.layers.attention import Attention

    return hasattr(module, "process_weights_after_loading") and type(module) is not Attention
