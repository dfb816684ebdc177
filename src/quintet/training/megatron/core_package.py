"""Import of the package `megatron-core`, and emulation of CUDA for its code on machines without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quintet import hardware
from quintet.errors import ConfigError


def require_megatron() -> None:
    """Import `megatron.core`, without its warnings about Apex and Transformer Engine.

    Raises:
        ConfigError: it is not installed.
    """
    if not hardware.is_installed("megatron.core"):
        raise ConfigError(
            "the Megatron learner needs the package megatron-core",
            key="actor.backend",
            value="megatron",
            hint=hardware.install_command(hardware.extra_packages("megatron")),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
        from megatron.core.transformer.moe import moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 reads it without defining it if Transformer Engine is absent


def compute_device() -> torch.device:
    """Return the device on which Megatron computes: this process's GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


CUDA_TYPE_NAMES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class _CudaToCpu(TorchFunctionMode):
    """Create tensors on the CPU instead of `cuda`, and report CUDA type names for CPU tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        requested = kwargs.get("device")
        if requested is not None and torch.device(requested).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return CUDA_TYPE_NAMES.get(result, result)
        return result


class _Stream:
    """CUDA stream without effect."""

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self


def _replacements() -> list[tuple[ModuleType, str, Any]]:
    """Return replacements of CUDA functions that Megatron's optimizer, schedules and recomputation call."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def no_op(*_: object, **__: object) -> None:
        return None

    def get_rng_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    def without_copy(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    return [
        (token_dispatcher, "maybe_move_tensor_to_cpu", without_copy),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", no_op),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "get_rng_state", get_rng_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (random, "_get_cuda_rng_state", get_rng_state),
        (random, "_set_cuda_rng_state", set_rng_state),
    ]


@contextmanager
def _replaced(module: ModuleType, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def emulate_cuda() -> Iterator[None]:
    """Run Megatron's code unchanged: on a GPU if there is one, otherwise with CUDA calls redirected to the CPU, so that
    its optimizer, gradient buffers and pipeline schedules run there."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        for module, name, replacement in _replacements():
            stack.enter_context(_replaced(module, name, replacement))
        stack.enter_context(_CudaToCpu())
        yield
