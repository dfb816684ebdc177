"""Offloading of weights, optimizer state and activations to host memory.

Between calls of a learner its weights and optimizer state are offloaded, as `memory.offload_parameters` and
`memory.offload_optimizer` say, and loaded back bit-equal for the next call. Gradients never outlast a step.
Activations are offloaded when the forward pass saves them, and loaded back when the backward pass needs them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintet.config.native.learners import MemoryConfig
from quintet.policies.parallel.dtensor_shards import dtensor_from_shard

MIN_ACTIVATION_BYTES = 2**16
"""Activations smaller than this stay on the device: moving them costs more than it saves."""

logger = logging.getLogger(__name__)


class Offload:
    """Offloading of a learner's weights and optimizer state; by default nothing is offloaded."""

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        parameters: bool = False,
        optimizer: bool = False,
        pin: bool = False,
        device: torch.device | None = None,
        offload_device: torch.device | None = None,
    ) -> None:
        """Offload the module's `parameters`, and the state of registered optimizers, to `offload_device` (default: CPU)
        except inside `on_device`, where they are on `device` (default: the weights' device). Copies from and to
        `pin`ned memory are faster."""
        self._module = module
        self._parameters, self._optimizer = parameters, optimizer
        self._pin = pin
        self._device = device or (next(module.parameters()).device if module is not None else torch.device("cpu"))
        self._offload_device = offload_device or torch.device("cpu")
        self._registered: list[tuple[Any, Callable[[], None]]] = []
        self._users = {"parameters": 0, "optimizer": 0}
        if parameters:
            self._move_weights(self._offload)

    @classmethod
    def from_config(
        cls, memory: MemoryConfig, module: nn.Module, name: str, *, shared_with_engine: bool = False
    ) -> Offload:
        """Return the offloading that `<name>.memory` configures. Weights that are `shared_with_engine` are not
        offloaded, and on the CPU nothing is; either case is logged."""
        device = next(module.parameters()).device
        for option in ("parameters", "optimizer", "gradients"):
            if device.type == "cpu" and getattr(memory, f"offload_{option}"):
                logger.info("%s.memory.offload_%s has no effect: the learner computes on the CPU", name, option)
        if device.type == "cpu":
            return cls()
        if memory.offload_parameters and shared_with_engine:
            logger.info("%s.memory.offload_parameters has no effect: the engine generates with the same weights", name)
        return cls(
            module,
            parameters=memory.offload_parameters and not shared_with_engine,
            optimizer=memory.offload_optimizer,
            pin=memory.pin,
        )

    def register_optimizer(self, optimizer: Any, clear_cache: Callable[[], None]) -> None:
        """Offload this optimizer's state, too; `clear_cache` is called before its tensors move."""
        if self._optimizer:
            self._registered.append((optimizer, clear_cache))

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keep the weights, and with `optimizer` its state, on the device while inside; contexts can be nested."""
        parts = ["parameters"] * self._parameters + ["optimizer"] * (self._optimizer and optimizer)
        for part in parts:
            self._users[part] += 1
            if self._users[part] == 1:
                self._move(part, self._onload)
        try:
            yield
        finally:
            for part in parts:
                self._users[part] -= 1
                if not self._users[part]:
                    self._move(part, self._offload)

    def _move(self, part: str, move: Callable[[Tensor], Tensor]) -> None:
        if part == "parameters":
            self._move_weights(move)
        else:
            self._move_optimizer_state(move)

    def _offload(self, tensor: Tensor) -> Tensor:
        return copy_to_device(tensor, self._offload_device, pin=self._pin)

    def _onload(self, tensor: Tensor) -> Tensor:
        return copy_to_device(tensor, self._device)

    @torch.no_grad()
    def _move_weights(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move the weights. FSDP2 tracks moved shards itself; FSDP1's flat parameters must be replaced."""
        if self._module is None:
            return
        units = [part for part in self._module.modules() if getattr(part, "_handle", None) is not None]
        for unit in units:
            _move_flat_parameter(unit, move)
        if not units:
            self._module._apply(move)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _move_optimizer_state(self, move: Callable[[Tensor], Tensor]) -> None:
        for optimizer, clear_cache in self._registered:
            clear_cache()
            for fields in optimizer.state.values():
                for name, value in fields.items():
                    if isinstance(value, Tensor):
                        fields[name] = move(value)


def _move_flat_parameter(unit: Any, move: Callable[[Tensor], Tensor]) -> None:
    """Move a unit's shard of the flat parameter, its alias, and the views that are the model's parameters."""
    reshard_flat_parameter(unit)
    handle = unit._handle
    handle.flat_param.data = handle.flat_param._local_shard = move(handle.flat_param.data)
    if handle._use_orig_params:
        handle._use_sharded_views()


def copy_to_device(tensor: Tensor, device: torch.device, *, pin: bool = False) -> Tensor:
    """Return a copy on the device; of a DTensor the local shard is copied."""
    if isinstance(tensor, DTensor):
        local = copy_to_device(tensor.to_local(), device, pin=pin)
        return dtensor_from_shard(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    target = torch.empty_like(tensor, device=device, pin_memory=pin and device.type == "cpu")
    target.copy_(tensor, non_blocking=False)
    return target


def activation_offloading(
    memory: MemoryConfig, device: torch.device, name: str
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of the context for a forward pass that offloads activations, if `memory.offload_activations`."""
    if not memory.offload_activations:
        return nullcontext
    if device.type == "cpu":
        logger.info("%s.memory.offload_activations has no effect: the learner computes on the CPU", name)
        return nullcontext
    return lambda: offload_activations(torch.device("cpu"), pin=memory.pin)


@contextmanager
def offload_activations(offload_device: torch.device, *, pin: bool = False) -> Iterator[None]:
    """Offload what a forward pass saves for the backward pass, except weights and small tensors."""

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        keep = isinstance(tensor, nn.Parameter | DTensor) or (tensor._base is not None and _is_weight(tensor._base))
        if keep or tensor.numel() * tensor.element_size() < MIN_ACTIVATION_BYTES:
            return tensor
        return tensor.device, copy_to_device(tensor.detach(), offload_device, pin=pin)

    def unpack(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return saved if isinstance(saved, Tensor) else copy_to_device(saved[1], saved[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def reshard(module: nn.Module) -> None:
    """Free the gathered weights of all units. The root keeps those of the last forward pass, which changes of the
    shards would not reach."""
    for part in module.modules():
        unit: Any = part
        if hasattr(unit, "_get_fsdp_state"):
            unit.reshard()
        elif getattr(unit, "_handle", None) is not None:
            reshard_flat_parameter(unit)


def reshard_flat_parameter(unit: Any) -> None:
    """Free the gathered weights of a unit of FSDP1; the root keeps them even while it uses its shard."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle = unit._handle
    if not handle.uses_sharded_strategy:
        return
    gathered = getattr(handle.flat_param, "_full_param_padded", None)
    if not handle.is_sharded(handle.flat_param):
        _reshard(unit, handle, free_unsharded_flat_param=True)
    elif gathered is not None and gathered.untyped_storage().size():
        handle._free_unsharded_flat_param()
