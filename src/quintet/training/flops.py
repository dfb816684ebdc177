"""Floating-point operations of a pass, and what share of a device's peak they make use of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["forward_flops", "peak_flops", "training_flops", "utilisation"]

PEAKS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A100": 312e12,
    "A800": 312e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Dense bfloat16 matrix products a second by NVIDIA's datasheets; a longer name comes before one that it holds."""


def forward_flops(config: Any, lengths: Tensor, places: int | None = None) -> int:
    """Of a forward pass over whole sequences, int64 [B] tokens each: two for each weight that a token meets, and for
    attention two for each number of a query and of a value at each token seen, the causal half alone. Logits are made
    at so many `places`, everywhere without.

    As in Narayanan et al. 2021 (arXiv:2104.04473, appendix) and verl's `flops_counter`, which both count attention
    over the future, too, and the head at every token. Norms, positions and gates aren't counted; of a mixture of
    experts only those that a token is sent to are. `config` is the model's, of Hugging Face.
    """
    config = config.get_text_config()
    tokens = int(lengths.sum())
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    pairs = int((lengths * (lengths + 1) // 2).sum())
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    projections = config.hidden_size * dim * (2 * heads + 2 * kv_heads)
    layer = tokens * (projections + _transform(config)) + 2 * heads * dim * pairs
    head = (tokens if places is None else places) * config.hidden_size * config.vocab_size
    return int(2 * (config.num_hidden_layers * layer + head))


def _transform(config: Any) -> int:
    """Weights that a token meets in a layer's gated feed-forward part."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts:
        return int(3 * hidden * config.intermediate_size)
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(hidden * (3 * width * config.num_experts_per_tok + 3 * shared + experts))


def training_flops(config: Any, lengths: Tensor, places: int | None = None) -> int:
    """The same of a forward and a backward pass, which takes twice as many: by the inputs and by the weights. What is
    computed anew to save memory isn't counted."""
    return 3 * forward_flops(config, lengths, places)


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 operations a second of a device of that name; None of one that isn't known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def utilisation(flops: float, seconds: float, devices: int = 1, device: str | None = None) -> dict[str, float]:
    """`perf/tflops/actor`, 10¹² operations a second on each of the `devices`, and `perf/mfu/actor`, their share of the
    peak, where that of the `device` is known; the one in use where none is named."""
    name = device or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    pace, peak = flops / max(seconds, 1e-9) / devices, peak_flops(name)
    found = {"perf/tflops/actor": pace / 1e12}
    return found | ({"perf/mfu/actor": pace / peak} if peak else {})
