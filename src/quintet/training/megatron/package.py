"""The package `megatron-core`: whether it is there, and Megatron's own code on machines without CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quintet.errors import ConfigError

__all__ = ["at_home", "device", "require_megatron"]


def require_megatron() -> None:
    """See that `megatron.core` can be imported; it warns of Apex and Transformer Engine only once here.

    Raises:
        ConfigError: it isn't installed.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ConfigError(
            "the Megatron learner needs the package megatron-core",
            key="actor.backend",
            value="megatron",
            hint="pip install 'quintet[megatron]'",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
        from megatron.core.transformer.moe import moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 asks for it where Transformer Engine is absent, and forgot to say so


def device() -> torch.device:
    """Where Megatron computes: this process's GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


ON_CUDA = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class _ToCpu(TorchFunctionMode):
    """Tensors that Megatron's code makes on `cuda` lie on the CPU, and those on the CPU count as CUDA's where it asks
    for their type."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        named = given.get("device")
        if named is not None and torch.device(named).type == "cuda":
            given = {**given, "device": torch.device("cpu")}
        result = func(*args, **given)
        if func is torch.Tensor.type and isinstance(result, str):
            return ON_CUDA.get(result, result)
        return result


class _Stream:
    """A queue of kernels where everything is computed at once."""

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self


def _replacements() -> list[tuple[ModuleType, str, Any]]:
    """What asks for a GPU in Megatron's optimizer, schedules and recomputation, and what answers in its place."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def nothing(*_: object, **__: object) -> None:
        return None

    def state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def put(new: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(new)

    def at_once(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    return [
        (token_dispatcher, "maybe_move_tensor_to_cpu", at_once),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "get_rng_state", state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (random, "_get_cuda_rng_state", state),
        (random, "_set_cuda_rng_state", put),
    ]


@contextmanager
def _replaced(module: ModuleType, name: str, stand_in: Any) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        setattr(module, name, own)


@contextmanager
def at_home() -> Iterator[None]:
    """Megatron's code as it is, on a GPU where there is one. Without one, its names of CUDA mean the CPU inside, so
    that its optimizer, its gradient buffers and its pipeline schedules run there too."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        for module, name, stand_in in _replacements():
            stack.enter_context(_replaced(module, name, stand_in))
        stack.enter_context(_ToCpu())
        yield
