"""A GPU without a GPU: tensors that report the device `gpu:0` and compute on the CPU.

An operation on tensors of both devices raises the error that it raises on a GPU, so that tests find tensors that are on
the wrong one. Speed, memory, kernels and autocast are not simulated.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("gpu")
CPU, GPU = torch.device("cpu"), torch.device("gpu", 0)
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense")
"""Operators that move values between devices."""
CPU_INDICES = ("aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
"""Operators that take indices on the CPU for a tensor on a GPU."""


class GpuTensor(torch.Tensor):
    """A tensor that reports a GPU. `values` holds its values on the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> GpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=GPU,
            requires_grad=values.requires_grad,
        )
        tensor.values = values
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    @property
    def data(self) -> GpuTensor:
        return GpuTensor(self.values.data)

    @data.setter
    def data(self, tensor: GpuTensor) -> None:
        torch.Tensor.data.__set__(self, tensor)  # type: ignore[attr-defined]
        self.values = tensor.values

    def __deepcopy__(self, copies: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = GpuTensor(self.values.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return copies.setdefault(id(self), copied)

    def tolist(self) -> Any:
        return self.values.tolist()

    def new_tensor(self, data: Any, **options: Any) -> GpuTensor:
        return GpuTensor(self.values.new_tensor(data, **options))

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def __repr__(self) -> str:
        return f"GpuTensor({self.values!r})"


class _FactoryMode(TorchDispatchMode):
    """Lets factories such as `torch.arange(device="cuda")` return a `GpuTensor`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU. Raise if its tensors are on two devices."""
    name = function.name()
    if name == "aten::_fused_sdp_choice":
        return 0  # plain matrix products
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    is_gpu = any(isinstance(tensor, GpuTensor) for tensor in tensors)
    if is_gpu and not name.startswith(COPIES):
        _check_devices(name, tensors, args)
    device = kwargs.get("device")
    if device is not None:
        is_gpu = torch.device(device).type == "gpu"
        kwargs = {**kwargs, "device": CPU}
    elif name == "aten::copy_":
        is_gpu = isinstance(args[0], GpuTensor)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    inner_args, inner_kwargs = tree_map_only(GpuTensor, lambda each: each.values, (args, kwargs))
    result = function(*inner_args, **inner_kwargs)
    if not is_gpu:
        return result
    result = tree_map_only(torch.Tensor, GpuTensor, result)
    return return_and_correct_aliasing(function, args, kwargs, result)


def _check_devices(name: str, tensors: list[torch.Tensor], args: Any) -> None:
    if name.startswith(CPU_INDICES):
        tensors = [args[0], *args[2:3]]
    on_cpu = [
        tensor
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, GpuTensor) and tensor.dim()
    ]
    if on_cpu:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found gpu:0 and cpu")


_cpu_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """Make the copy, which torch makes out of sight of dispatch modes."""
    tensor = _cpu_tensor(data, **options)
    return tensor if device is None else tensor.to(device)


def _enter_no_grad(mode: torch.inference_mode) -> None:
    mode._inference_mode_context = torch.no_grad()  # type: ignore[assignment]
    mode._inference_mode_context.__enter__()


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Let this process's learners and engines compute on a simulated GPU."""
    with pytest.MonkeyPatch.context() as patch, _FactoryMode():
        for module in ("quintet.runtime.device", "quintet.training.megatron.core_package"):
            former = importlib.import_module(module).compute_device
            for name, other in list(sys.modules.items()):
                if name.startswith("quintet.") and vars(other).get("compute_device") is former:
                    patch.setattr(other, "compute_device", lambda: GPU)
        patch.setattr(torch, "tensor", _tensor)
        # torch cannot make views of subclasses in inference mode
        patch.setattr(torch.inference_mode, "__enter__", _enter_no_grad)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
