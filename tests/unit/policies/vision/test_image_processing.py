"""If these fail, a policy sees other pixels than its processor in transformers shows it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quintet.errors import MachineError
from quintet.policies.vision.image_processing import ImageProcessor


def random_image(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("size", [(56, 56), (128, 128), (100, 37), (300, 500), (10, 10)])
@pytest.mark.parametrize("settings", [{"patch_size": 14}, {"patch_size": 7, "merge_size": 2}, {"patch_size": 16}])
def test_patches_are_those_of_transformers(tmp_path: Path, size: tuple[int, int], settings: dict[str, int]) -> None:
    limits = {"shortest_edge": 28 * 28, "longest_edge": 200 * 200}
    theirs = Qwen2VLImageProcessorPil(size=limits, **settings)
    theirs.save_pretrained(tmp_path)
    image = random_image(*size)
    expected = theirs(images=[image], return_tensors="pt", input_data_format="channels_last")
    ours = ImageProcessor.from_directory(tmp_path)
    result = ours.process(image)
    assert expected["image_grid_thw"].tolist() == [[1, *(2 * side for side in result.grid)]]
    patches = torch.frombuffer(bytearray(result.patches), dtype=torch.uint8).view(math.prod(result.grid), -1)
    torch.testing.assert_close(ours.pixel_values(patches), expected["pixel_values"], rtol=0, atol=0)


def test_the_same_image_has_the_same_key_and_another_one_another() -> None:
    processor = ImageProcessor(min_pixels=784)
    image = random_image(56, 56)
    changed = image.copy()
    changed[3, 5, 1] ^= 1
    assert processor.process(image) == processor.process(image.copy())
    assert processor.process(image).key != processor.process(changed).key
    assert (
        processor.process(np.zeros((28, 56, 3), np.uint8)).key != processor.process(np.zeros((56, 28, 3), np.uint8)).key
    )


def test_pixel_limits_of_the_run_replace_those_of_the_model(tmp_path: Path) -> None:
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    processor = ImageProcessor.from_directory(tmp_path, min_pixels=784, max_pixels=3136)
    assert processor.process(random_image(400, 400)).grid == (2, 2)
    assert processor.process(random_image(28, 28)).grid == (1, 1)


def test_a_model_without_an_image_processor_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="has no image processor") as caught:
        ImageProcessor.from_directory(tmp_path)
    assert "preprocessor_config.json" in str(caught.value.hint)


def test_an_extremely_long_image_is_refused() -> None:
    with pytest.raises(ValueError, match="200 times"):
        ImageProcessor().process(np.zeros((2, 500, 3), np.uint8))
    with pytest.raises(ValueError, match="at most 512 per side"):
        ImageProcessor(max_pixels=2**40).process(np.zeros((100, 600 * 28, 3), np.uint8))
