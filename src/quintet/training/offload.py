"""What a learner has on a GPU lies in main memory while others compute.

Between the calls of a learner its weights and its optimizer's moments are moved away, as `memory.offload_parameters`
and `memory.offload_optimizer` say, and come back for the next call, bit for bit. Gradients never outlast a step.
Activations are moved as the forward pass saves them, and come back as the backward pass asks for them.
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
from quintet.policies.spread import spread_tensor

__all__ = ["Offload", "activations_away", "keeping_activations", "moved"]

SMALL_BYTES = 2**16
"""Smaller activations aren't worth the way."""

logger = logging.getLogger(__name__)


class Offload:
    """Where a learner's weights and moments are. Nothing is moved by default."""

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        parameters: bool = False,
        optimizer: bool = False,
        pin: bool = False,
        home: torch.device | None = None,
        away: torch.device | None = None,
    ) -> None:
        """Of the module's `parameters`, and the moments of optimizers that are watched, while nobody is `at_hand`;
        `pin`ned memory is copied from and to faster. They live on `home`, that of the weights, and go to `away`."""
        self._module = module
        self._parameters, self._optimizer = parameters, optimizer
        self._pin = pin
        self._home = home or (next(module.parameters()).device if module is not None else torch.device("cpu"))
        self._away = away or torch.device("cpu")
        self._watched: list[tuple[Any, Callable[[], None]]] = []
        self._needed = {"parameters": 0, "optimizer": 0}
        if parameters:
            self._move_weights(self._put)

    @classmethod
    def of(cls, memory: MemoryConfig, module: nn.Module, name: str, *, played: bool = False) -> Offload:
        """As the configuration of the learner called `name` has it. `played` says that an engine plays with the very
        weights, which then stay. What there is no other place for is said once, and stays where it is."""
        home = next(module.parameters()).device
        for option in ("parameters", "optimizer", "gradients"):
            if home.type == "cpu" and getattr(memory, f"offload_{option}"):
                logger.info("%s.memory.offload_%s: they are in main memory already", name, option)
        if home.type == "cpu":
            return cls()
        if memory.offload_parameters and played:
            logger.info("%s.memory.offload_parameters: the engine plays with the same weights, so they stay", name)
        return cls(
            module,
            parameters=memory.offload_parameters and not played,
            optimizer=memory.offload_optimizer,
            pin=memory.pin,
        )

    def watch(self, optimizer: Any, forget: Callable[[], None]) -> None:
        """Move the moments of that optimizer, too; `forget` has others let go of where they were."""
        if self._optimizer:
            self._watched.append((optimizer, forget))

    @contextmanager
    def at_hand(self, *, optimizer: bool = False) -> Iterator[None]:
        """Have the weights at home, and with `optimizer` the moments; inside another one nothing is moved."""
        wanted = ["parameters"] * self._parameters + ["optimizer"] * (self._optimizer and optimizer)
        for part in wanted:
            self._needed[part] += 1
            if self._needed[part] == 1:
                self._move(part, self._fetch)
        try:
            yield
        finally:
            for part in wanted:
                self._needed[part] -= 1
                if not self._needed[part]:
                    self._move(part, self._put)

    def _move(self, part: str, way: Callable[[Tensor], Tensor]) -> None:
        if part == "parameters":
            self._move_weights(way)
        else:
            self._move_moments(way)

    def _put(self, tensor: Tensor) -> Tensor:
        return moved(tensor, self._away, pin=self._pin)

    def _fetch(self, tensor: Tensor) -> Tensor:
        return moved(tensor, self._home)

    @torch.no_grad()
    def _move_weights(self, way: Callable[[Tensor], Tensor]) -> None:
        """FSDP2 looks for its shards again by itself; FSDP has to be shown where its pieces are."""
        if self._module is None:
            return
        units = [part for part in self._module.modules() if getattr(part, "_handle", None) is not None]
        for unit in units:
            _move_flat(unit, way)
        if not units:
            self._module._apply(way)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _move_moments(self, way: Callable[[Tensor], Tensor]) -> None:
        for optimizer, forget in self._watched:
            forget()
            for fields in optimizer.state.values():
                for name, value in fields.items():
                    if isinstance(value, Tensor):
                        fields[name] = way(value)


def _move_flat(unit: Any, way: Callable[[Tensor], Tensor]) -> None:
    """A unit's piece of flat weights, another name for it, and the views that a model's own parameters are."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle = unit._handle
    if handle.uses_sharded_strategy and not handle.is_sharded(handle.flat_param):
        _reshard(unit, handle, free_unsharded_flat_param=True)
    handle.flat_param.data = handle.flat_param._local_shard = way(handle.flat_param.data)
    if handle._use_orig_params:
        handle._use_sharded_views()


def moved(tensor: Tensor, device: torch.device, *, pin: bool = False) -> Tensor:
    """A copy there; of a sharded tensor this rank's part is moved."""
    if isinstance(tensor, DTensor):
        local = moved(tensor.to_local(), device, pin=pin)
        return spread_tensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    there = torch.empty_like(tensor, device=device, pin_memory=pin and device.type == "cpu")
    there.copy_(tensor, non_blocking=False)
    return there


def keeping_activations(
    memory: MemoryConfig, device: torch.device, name: str
) -> Callable[[], AbstractContextManager[Any]]:
    """What goes around a forward pass so that its activations are where `memory.offload_activations` wants them."""
    if not memory.offload_activations:
        return nullcontext
    if device.type == "cpu":
        logger.info("%s.memory.offload_activations: they are in main memory already", name)
        return nullcontext
    return lambda: activations_away(torch.device("cpu"), pin=memory.pin)


@contextmanager
def activations_away(away: torch.device, *, pin: bool = False) -> Iterator[None]:
    """What a forward pass saves for the backward pass lies there in between: all but weights and what is small."""

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        stays = isinstance(tensor, nn.Parameter | DTensor) or (tensor._base is not None and _is_weight(tensor._base))
        if stays or tensor.numel() * tensor.element_size() < SMALL_BYTES:
            return tensor
        return tensor.device, moved(tensor.detach(), away, pin=pin)

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else moved(kept[1], kept[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
