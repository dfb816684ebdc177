"""Sizes of the vision encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: parameters, tokens, FLOPs and activations."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ASPECT_RATIO = 200
BLOCK_NUMBERS: Mapping[str, tuple[int, int]] = {"qwen2_vl": (11, 3), "qwen2_5_vl": (13, 4), "qwen3_vl": (11, 2)}
"""Numbers that a block of each family saves per patch for its backward pass, in multiples of its width and of that of
its MLP: inputs of norms and linear layers, queries, keys, values, attention output, and the tensors of the activation
function. Attention matrices are not saved."""
MERGER_NUMBERS: Mapping[str, int] = {"qwen2_vl": 4, "qwen2_5_vl": 5, "qwen3_vl": 4}
"""The same of the merger, in multiples of the width."""
DEEPSTACK_NUMBERS = 3
"""The same of a further merger whose input is that of the next block."""


@dataclass(frozen=True, slots=True)
class VisionEncoderShape:
    """Sizes of a vision encoder. A patch is a square of pixels, an image token one of `merge` × `merge` patches."""

    family: str
    """`qwen2_vl`, `qwen2_5_vl` or `qwen3_vl`."""
    depth: int
    width: int
    mlp: int
    heads: int
    out: int
    """Width of the language model."""
    patch: int = 14
    """Side of a patch, pixels."""
    merge: int = 2
    temporal: int = 2
    """Frames per patch."""
    channels: int = 3
    positions: int = 0
    """Learned position embeddings."""
    deepstack: int = 0
    """Further mergers, whose features are added to the states of the language model's first layers."""
    windowed: int = 0
    """Layers that attend within windows."""
    window: int = 112
    """Side of a window, pixels."""
    min_pixels: int = 56 * 56
    """Smaller images are enlarged by the image processor."""
    max_pixels: int = 28 * 28 * 16384
    """Larger images are reduced."""

    @property
    def factor(self) -> int:
        """Side of an image token, pixels."""
        return self.patch * self.merge

    @property
    def pixel_numbers(self) -> int:
        """Numbers of a patch that the encoder reads."""
        return self.channels * self.temporal * self.patch**2

    @property
    def parameters(self) -> int:
        mergers, norm = 1 + self.deepstack, 1 if self.is_gated else 2
        linears = sum(inputs * outputs + outputs for inputs, outputs in self.block_linears)
        merged = sum(inputs * outputs + outputs for inputs, outputs in self.merger_linears)
        # the norms of further mergers are as wide as their inputs
        norms = norm * self.width * (2 * self.depth + 1 + self.deepstack * self.merge**2)
        patches = self.pixel_numbers * self.width + self.width * (self.family == "qwen3_vl")
        return patches + self.positions * self.width + self.depth * linears + mergers * merged + norms

    @property
    def is_gated(self) -> bool:
        """Whether the MLPs are gated, and norms have no bias."""
        return self.family == "qwen2_5_vl"

    @property
    def block_linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers of a block."""
        wide = ((self.width, self.mlp),) * (2 if self.is_gated else 1)
        return ((self.width, 3 * self.width), (self.width, self.width), *wide, (self.mlp, self.width))

    @property
    def merger_linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers of a merger, per image token."""
        merged = self.width * self.merge**2
        return ((merged, merged), (merged, self.out))

    def flops(self, rows: int, columns: int) -> int:
        """Return the FLOPs of a forward pass over an image of `rows` × `columns` tokens: two per weight and patch, and
        four per width and pair of patches that attend to each other."""
        tokens, area = rows * columns, self.merge**2
        linears = self.depth * sum(inputs * outputs for inputs, outputs in self.block_linears)
        weights = tokens * area * (self.pixel_numbers * self.width + linears)
        weights += tokens * (1 + self.deepstack) * sum(inputs * outputs for inputs, outputs in self.merger_linears)
        side = max(1, self.window // self.factor)
        in_windows = _sum_squared_parts(rows, side) * _sum_squared_parts(columns, side)
        pairs = (self.depth - self.windowed) * tokens**2 + self.windowed * in_windows
        return 2 * weights + 4 * self.width * pairs * area**2

    def activations(self, patches: int, width: int, *, recompute: bool = False) -> int:
        """Return the bytes that the encoder saves for its backward pass, at `width` bytes per number; with `recompute`
        the inputs of all blocks and one block at a time."""
        rotary = 2 * self.width // self.heads
        others = self.pixel_numbers + rotary + self.width * self._merger_numbers
        blocks = self.depth * self.width + self._block_numbers if recompute else self.depth * self._block_numbers
        return patches * width * (others + blocks)

    def block_activations(self, patches: int, width: int) -> int:
        """Return the bytes of one block while it computes."""
        return patches * width * self._block_numbers

    @property
    def _block_numbers(self) -> int:
        widths, mlps = BLOCK_NUMBERS[self.family]
        return widths * self.width + mlps * self.mlp

    @property
    def _merger_numbers(self) -> int:
        return MERGER_NUMBERS[self.family] + DEEPSTACK_NUMBERS * self.deepstack


def _sum_squared_parts(length: int, size: int) -> int:
    """Return the sum of the squares of parts of `size`, of which the last may be smaller."""
    return length // size * size**2 + (length % size) ** 2


def read_vision_encoder(config: Mapping[str, Any], out: int) -> VisionEncoderShape | None:
    """Return the encoder of a `config.json`; None if the model is of another family. `out` is the width of the language
    model.

    Raises:
        TypeError, ValueError: a size is invalid.
    """
    vision, family = config.get("vision_config"), str(config.get("model_type"))
    if family not in BLOCK_NUMBERS or not isinstance(vision, Mapping):
        return None
    width = int(vision.get("embed_dim") or vision.get("hidden_size") or 1280)
    depth = int(vision.get("depth") or 32)
    full = vision.get("fullatt_block_indexes")
    is_windowed = family == "qwen2_5_vl"
    return VisionEncoderShape(
        family,
        depth,
        width,
        mlp=int(vision.get("intermediate_size") or width * vision.get("mlp_ratio", 4)),
        heads=int(vision.get("num_heads") or 16),
        out=int(vision.get("out_hidden_size") or out),
        patch=int(vision.get("patch_size") or (16 if family == "qwen3_vl" else 14)),
        merge=int(vision.get("spatial_merge_size") or 2),
        temporal=int(vision.get("temporal_patch_size") or 2),
        channels=int(vision.get("in_channels") or 3),
        positions=int(vision.get("num_position_embeddings") or 2304) if family == "qwen3_vl" else 0,
        deepstack=len(vision.get("deepstack_visual_indexes", (8, 16, 24))) if family == "qwen3_vl" else 0,
        windowed=depth - len((7, 15, 23, 31) if full is None else full) if is_windowed else 0,
        window=int(vision.get("window_size") or 112),
    )


def image_grid(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, max_side: int | None = None
) -> tuple[int, int]:
    """Return rows and columns of tokens of an image of `height` × `width` pixels, as the Qwen-VL image processors
    resize it: to between `min_pixels` and `max_pixels`, with about the same aspect ratio. `factor` is the side of a
    token, pixels.

    Raises:
        ValueError: one side is more than 200 times as long as the other, or has more than `max_side` tokens.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(f"an image of {height}×{width} pixels: one side is more than 200 times the other")
    rows, columns = round(height / factor), round(width / factor)
    pixels = rows * columns * factor**2
    if pixels > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif pixels < min_pixels:
        growth = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * growth / factor) for side in (height, width))
    if max_side is not None and max(rows, columns) > max_side:
        raise ValueError(f"an image of {rows}×{columns} tokens; at most {max_side} per side are supported")
    return rows, columns
