"""Images of requests as vLLM's models read them, without the processors of transformers.

vLLM computes the patches of images by transformers' processors, whose video part needs torchvision. Requests contain
patches already: the processor of this module converts them to pixel values, as the learner does. Importing the module
registers vLLM's models with that processor in this process; processes with a worker import it as the module of the
worker extension.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
)

from quintet.policies.vision.image_processing import ImageProcessor
from quintet.records import ImageInput
from quintet.rollout.engines.vllm.worker_extension import QuintetWorker

__all__ = ["QuintetWorker"]

MODELS = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
}
"""vLLM's classes of `quintet.policies.vision.image_encoder.MODEL_TYPES`, and their modules."""
NEEDS_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
"""Module from which vLLM's models import `smart_resize`."""
WITHOUT_TORCHVISION = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
"""Module of transformers with the same function."""


class ImageInputItems(ProcessorBatchItems[ImageInput]):  # type: ignore[misc]
    """Images of a prompt."""

    def get_item_for_hash(self, index: int) -> str:
        """Return the image's own hash."""
        return f"{self.get(index).key:x}"


class ImageInputParser(MultiModalDataParser):  # type: ignore[misc]
    """Accepts `ImageInput` as images."""

    def _parse_image_data(self, data: Sequence[ImageInput]) -> Any:
        return ImageInputItems(data, "image")


class ImageInfo(BaseProcessingInfo):  # type: ignore[misc]
    """Number and size of images; videos are not supported."""

    @cached_property
    def processor(self) -> ImageProcessor:
        """Image processor of the model's directory."""
        return ImageProcessor.from_directory(self.ctx.model_config.model)

    def get_data_parser(self) -> ImageInputParser:
        """Return the parser of images."""
        return ImageInputParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return the maximum number of items: unlimited images."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the maximum number of tokens of an image in a context of `seq_len`, for which vLLM reserves memory."""
        return {"image": min(seq_len, self.processor.max_pixels // self.processor.factor**2)}


class LargestImages(BaseDummyInputsBuilder[ImageInfo]):  # type: ignore[misc]
    """Images with which vLLM measures the memory that it needs."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return no text: `ImageInputProcessor.get_dummy_inputs` builds the prompt."""
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> Mapping[str, list[ImageInput]]:
        """Return `mm_counts["image"]` of the largest images."""
        processor, count = self.info.processor, mm_counts.get("image", 0)
        grid = _largest_grid(self.info.get_mm_max_tokens_per_item(seq_len, mm_counts)["image"])
        patches = bytes(math.prod(grid) * processor.factor**2 * len(processor.mean))
        return {"image": [ImageInput(number, grid, patches) for number in range(count)]}


def _largest_grid(tokens: int) -> tuple[int, int]:
    """Return rows and columns of a nearly square image with at most this number of tokens."""
    rows = max(1, math.isqrt(tokens))
    return rows, max(1, tokens // rows)


class ImageInputProcessor(BaseMultiModalProcessor[ImageInfo]):  # type: ignore[misc]
    """Converts patches to pixel values, and expands the placeholder of an image to as many as it has tokens."""

    requires_tokenizer = False

    def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]) -> Any:
        """Return the prompt with the largest images."""
        inputs = super().get_dummy_inputs(seq_len, mm_counts, mm_options)
        inputs.prompt = [self._placeholder] * mm_counts.get("image", 0)
        return inputs

    @property
    def _placeholder(self) -> int:
        return int(self.info.get_hf_config().image_token_id)

    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        images: Sequence[ImageInput] = hf_data["images"]
        processor = self.info.processor
        grids = torch.tensor([image.grid for image in images])
        patches = torch.frombuffer(bytearray().join(image.patches for image in images), dtype=torch.uint8)
        pixels = processor.pixel_values(patches.view(int(grids.prod(1).sum()), -1))
        frames = torch.ones(len(images), 1, dtype=torch.long)
        grid_thw = torch.cat([frames, grids * processor.merge_size], 1)
        return BatchFeature({"pixel_values": pixels.to(self.info.ctx.model_config.dtype), "image_grid_thw": grid_thw})

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Tensor], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        sizes = hf_inputs.get("image_grid_thw", torch.empty(0, 3, dtype=torch.long)).prod(-1)
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        def replacement(index: int) -> list[int]:
            num_patches = int(out_mm_kwargs["image"][index]["image_grid_thw"].data.prod())
            return [self._placeholder] * (num_patches // self.info.processor.merge_size**2)

        return [PromptReplacement(modality="image", target=[self._placeholder], replacement=replacement)]


def _register() -> None:
    register = MULTIMODAL_REGISTRY.register_processor(ImageInputProcessor, info=ImageInfo, dummy_inputs=LargestImages)
    for name, module in MODELS.items():
        model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
        del model._processor_factory  # else vLLM warns that it is replaced
        # as a class: vLLM would import its own module in another process to inspect the model
        ModelRegistry.register_model(name, register(model))


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Replace the module that needs torchvision while vLLM's models are imported, if torchvision is missing."""
    is_missing = importlib.util.find_spec("torchvision") is None
    if is_missing:
        sys.modules[NEEDS_TORCHVISION] = importlib.import_module(WITHOUT_TORCHVISION)
    try:
        yield
    finally:
        if is_missing:
            del sys.modules[NEEDS_TORCHVISION]


with _without_torchvision():
    _register()
