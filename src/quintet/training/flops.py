"""FLOPs of forward and backward passes, and model FLOPs utilization (MFU)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintet.config.plan.vision_encoder import read_vision_encoder
from quintet.package_files import read_yaml

PEAK_FLOPS = {name: teraflops * 1e12 for name, teraflops in read_yaml(__file__).items()}
"""Peak dense bfloat16 FLOP/s; a longer name comes before its prefix."""


def forward_flops(config: Any, lengths: Tensor, num_logits: int | None = None) -> int:
    """Return the FLOPs of a forward pass over sequences of `lengths`, int64 [B] tokens: two per weight and token, and
    for causal attention two per element of query and value and attended token. Logits are computed at `num_logits`
    positions (default: all).

    As in Narayanan et al. 2021 (arXiv:2104.04473, appendix) and verl's `flops_counter`, except that both count
    attention without the causal mask, and the head at every token. Norms, positional encoding and gates are not
    counted, and only the active experts of a mixture are. `config` is the Hugging Face model configuration.
    """
    config = config.get_text_config()
    tokens = int(lengths.sum())
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    pairs = int((lengths * (lengths + 1) // 2).sum())
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    projections = config.hidden_size * dim * (2 * heads + 2 * kv_heads)
    layer = tokens * (projections + _mlp_weights(config)) + 2 * heads * dim * pairs
    head = (tokens if num_logits is None else num_logits) * config.hidden_size * config.vocab_size
    return int(2 * (config.num_hidden_layers * layer + head))


def _mlp_weights(config: Any) -> int:
    """Return the number of active MLP weights per token in a layer."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts:
        return int(3 * hidden * config.intermediate_size)
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(hidden * (3 * width * config.num_experts_per_tok + 3 * shared + experts))


def image_flops(config: Any, grids: Tensor) -> int:
    """Return the FLOPs of a forward pass of a vision encoder over images with `grids`, int64 [I, 2] rows and columns of
    image tokens, with the windows of attention of Qwen2.5-VL; see `VisionEncoderShape.flops`."""
    encoder = read_vision_encoder(config.to_dict(), config.get_text_config().hidden_size)
    if encoder is None:
        return 0
    sizes, counts = torch.unique(grids, dim=0, return_counts=True)
    pairs = zip(sizes.tolist(), counts.tolist(), strict=True)
    return sum(count * encoder.flops(rows, columns) for (rows, columns), count in pairs)


def training_flops(
    config: Any,
    lengths: Tensor,
    num_logits: int | None = None,
    image_grids: Tensor | None = None,
    *,
    trains_encoder: bool = True,
) -> int:
    """Return the FLOPs of forward and backward pass, three times those of the forward pass, without recomputation. A
    vision encoder that is not trained has no backward pass."""
    images = 0 if image_grids is None else image_flops(config, image_grids)
    return 3 * forward_flops(config, lengths, num_logits) + (3 if trains_encoder else 1) * images


def peak_flops(device: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a device by its name; None if it is unknown."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device), None)


def utilization(flops: float, seconds: float, devices: int = 1, device: str | None = None) -> dict[str, float]:
    """Return `perf/tflops/actor`, TFLOP/s per device, and `perf/mfu/actor`, the MFU, if the peak of the `device`
    (default: the current GPU) is known."""
    name = device or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    achieved, peak = flops / max(seconds, 1e-9) / devices, peak_flops(name)
    metrics = {"perf/tflops/actor": achieved / 1e12}
    return metrics | ({"perf/mfu/actor": achieved / peak} if peak else {})
