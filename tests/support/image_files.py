"""Data files with images, and the converter of a small policy that reads them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from transformers import PreTrainedTokenizerFast
from vision_models import PROCESSOR, TEXTS

from quintet.config.native.data import DataConfig
from quintet.data.prompt_split import PromptSplit
from quintet.policies.tiny_models import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, train_tokenizer
from quintet.rollout.chat.image_prompts import ImagePrompts

COLORS = {"red": (220, 38, 38), "green": (22, 163, 74), "blue": (37, 99, 235)}


def encoded(image: np.ndarray | Image.Image, file_format: str = "PNG") -> bytes:
    """Return the bytes of an image file."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, file_format)
    return file.getvalue()


def squares(colors: Sequence[str], side: int = 16) -> np.ndarray:
    """Return squares of these colors side by side, RGB `uint8[side, side * n, 3]`."""
    return np.concatenate([np.full((side, side, 3), COLORS[color], np.uint8) for color in colors], 1)


def question_rows(count: int) -> list[dict[str, Any]]:
    """Return rows as verl's script for Geometry3k writes them, which ask for the number of red squares."""
    rows = []
    for index in range(count):
        shown = [("red", "green", "blue")[digit] for digit in np.random.default_rng(index).integers(0, 3, 2)]
        answer = str(shown.count("red"))
        rows.append(
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [{"role": "user", "content": f"<image>Squares {index % 4}: how many are red?"}],
                "images": [{"bytes": encoded(squares(shown)), "path": None}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": "train", "index": index, "question": "how many are red?"},
                "response": f"<think> </think> \\boxed{{{answer}}}",
            }
        )
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a Parquet or JSON Lines file and return its name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@cache
def image_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the placeholders of images."""
    return train_tokenizer(400, TEXTS, images=True)


def converter() -> ImagePrompts:
    """Return the converter of a policy with this tokenizer."""
    names = [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]
    before, after, *others = image_tokenizer().convert_tokens_to_ids(names)
    return ImagePrompts(PROCESSOR, before, after, frozenset({before, after, *others}))


def prompts_of(*files: str, limit: int = 200, **config: Any) -> PromptSplit:
    """Return the prompts of files with images."""
    data = DataConfig(train_files=files, **{"image_key": "images", **config})
    return PromptSplit.from_config(data, image_tokenizer(), limit, images=converter())


def grids_and_text(tokens: Sequence[int]) -> list[int]:
    """Return tokens without the hashes of images, which are of pixels or of files."""
    return [token if token >= 0 else -1 - (-1 - token & (1 << 18) - 1) for token in tokens]
