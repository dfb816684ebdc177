"""Check of exported models: the written directory, loaded by transformers, computes what the trained policy computes.

Rounding is separated from faults. The policy is compared with its merged weights in float32, those are rounded in
memory, and the written directory is compared with the rounded weights. So each comparison has the tolerance of float32
sums, whatever the dtype of the export, and the effect of rounding is measured.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from quintet.errors import MachineError
from quintet.loading_lock import LOADING_LOCK
from quintet.policies.model_loading import require_own_head
from quintet.policies.vision.image_encoder import is_vision_language
from quintet.policies.vision.image_probe import image_probe
from quintet.policies.vision.image_processing import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROBE_SHAPE = (2, 16)
"""Sequences and tokens of the probe."""
MAX_DIFFERENCE = 1e-3
"""Tolerance of logits relative to the largest one: float32 sums in another order, through all layers."""


LAST_BITS = 4
"""Units in the last place by which products of adapters may differ."""


class UnequalLogitsError(MachineError):
    """Two models that should be the same have other logits."""


class CannotLoadError(Exception):
    """transformers cannot load a model."""


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """Logits of a model for fixed tokens, and checksums of its weights."""

    logits: Tensor
    """float64 [sequences, tokens, vocabulary]."""
    checksums: Mapping[str, int]
    """Checksum of each parameter."""

    @classmethod
    def of(cls, model: nn.Module, arguments: Mapping[str, Tensor], logits: Tensor | None = None) -> ModelProbe:
        """Return the logits for `arguments`, unless they are given, and the checksums of all parameters."""
        sums = {name: zlib.crc32(_bytes(parameter)) for name, parameter in model.named_parameters()}
        return cls(compute_logits(model, arguments) if logits is None else logits, sums)


def load_plain_model(
    directory: Path, *, config: PreTrainedConfig | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a model in float32 as users of transformers do; `config` replaces that of the directory.

    Raises:
        CannotLoadError: transformers cannot load it.
        MachineError: weights are missing, or the head is another than its configuration says.
    """
    import transformers

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        config = config or transformers.AutoConfig.from_pretrained(directory, **options)
        auto: Any = transformers.AutoModelForCausalLM
        if is_vision_language(config):
            auto = transformers.AutoModelForImageTextToText
        name = next(iter(config.architectures or ()), "")
        with LOADING_LOCK:
            model, loading = getattr(transformers, name, auto).from_pretrained(
                directory, config=config, dtype=torch.float32, output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise CannotLoadError(f"{type(error).__name__}: {error}") from error
    require_own_head(model, loading["missing_keys"], directory)
    plain: PreTrainedModel = model.eval()
    return plain


def probe_arguments(config: PreTrainedConfig, directory: Path) -> dict[str, Tensor]:
    """Return the inputs of the probe: tokens from the whole vocabulary, with an image if the model at `directory` reads
    images."""
    count = PROBE_SHAPE[0] * PROBE_SHAPE[1]
    tokens = torch.arange(count) * 7919 % config.get_text_config().vocab_size
    if is_vision_language(config):
        body = SimpleNamespace(image_processor=ImageProcessor.from_directory(directory))
        return image_probe(SimpleNamespace(config=config, base_model=body), tokens).arguments
    return {"input_ids": tokens.view(PROBE_SHAPE)}


@torch.inference_mode()
def compute_logits(model: nn.Module, arguments: Mapping[str, Tensor]) -> Tensor:
    """Return float64 logits [sequences, tokens, vocabulary] of transformers' own forward pass, which computes in the
    dtype of the model."""
    dtype = next(model.parameters()).dtype
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments.items()}
    logits: Tensor = model(**cast, use_cache=False).logits
    return logits.double()


@torch.no_grad()
def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round all parameters to `dtype`, and keep them in float32.

    Raises:
        MachineError: a weight exceeds the range of `dtype`.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            rounded = parameter.to(dtype)
            if not bool(rounded.isfinite().all()) and bool(parameter.isfinite().all()):
                raise MachineError(f"{name} has values beyond the range of {dtype}", "export with --dtype bfloat16")
            parameter.copy_(rounded)


def require_equal_logits(actual: Tensor, expected: Tensor, message: str) -> None:
    """Compare the logits of two models that differ by the order of float32 sums at most.

    Raises:
        UnequalLogitsError: they differ; `message` names both.
    """
    if actual.shape != expected.shape:
        raise UnequalLogitsError(f"{message}: shape {list(actual.shape)}, not {list(expected.shape)}")
    difference, largest = logit_difference(actual, expected), float(expected.abs().max())
    if not difference <= MAX_DIFFERENCE * max(1.0, largest):
        raise UnequalLogitsError(f"{message}: by up to {difference:.2g}, with logits of up to {largest:.2g}")


@torch.no_grad()
def has_close_weights(model: nn.Module, other: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether two models have the same weights except for the last bits of `dtype`, relative to the largest
    value of each weight."""
    weights, tolerance = dict(other.named_parameters()), LAST_BITS * torch.finfo(dtype).eps

    def is_close(name: str, weight: Tensor) -> bool:
        if weight.shape != weights[name].shape:
            return False
        return float((weight - weights[name]).abs().max()) <= tolerance * float(weight.abs().max())

    named = dict(model.named_parameters())
    return weights.keys() == named.keys() and all(is_close(*item) for item in named.items())


def logit_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits."""
    return float((actual - expected).abs().max())


def check_directory(
    directory: Path, expected: ModelProbe, arguments: Mapping[str, Tensor], *, trust_remote_code: bool = False
) -> None:
    """Load a written directory, and compare it with the model that was written.

    Raises:
        MachineError: it cannot be loaded, or weights or logits differ.
    """
    try:
        model = load_plain_model(directory, trust_remote_code=trust_remote_code)
    except CannotLoadError as error:
        raise MachineError(f"transformers cannot load the exported model: {error}") from error
    actual = ModelProbe.of(model, arguments)
    message = "the exported model has other logits than the trained policy"
    require_equal_logits(actual.logits, expected.logits, message)
    names = sorted(expected.checksums.keys() ^ actual.checksums.keys())
    names += sorted(name for name, value in expected.checksums.items() if actual.checksums.get(name, value) != value)
    if names:
        raise MachineError(f"the exported model has other weights than the trained policy: {names[0]}")


def check_tensors(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Compare the weights in the files of two directories, where transformers cannot load the model: those of `target`
    are those of `source`, cast to `dtype`.

    Raises:
        MachineError: they differ.
    """
    expected, actual = (dict(_stored_names(directory)) for directory in (source, target))
    for name in sorted(expected.keys() | actual.keys()):
        if name not in expected or name not in actual:
            raise MachineError(f"the exported weights do not match those at {source}: {name}")
        with safe_open(expected[name], framework="pt") as theirs, safe_open(actual[name], framework="pt") as ours:
            if not torch.equal(cast_tensor(theirs.get_tensor(name), dtype), ours.get_tensor(name)):
                raise MachineError(f"the exported weights do not match those at {source}: {name}")


def _stored_names(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names of the tensors in a directory, and the files that contain them."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, path) for name in file.keys())  # noqa: SIM118 - not a mapping


def cast_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor of floating-point numbers; without a dtype, and of other numbers, return it unchanged."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _bytes(parameter: Tensor) -> Any:
    """Return the values of a parameter as a buffer."""
    return parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
