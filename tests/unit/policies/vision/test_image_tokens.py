"""If these fail, tokens have other positions than in the training of the model, which is then silently worse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from quintet.policies.vision.image_tokens import (
    MAX_SIDE,
    contains_images,
    decode_image_tokens,
    image_tokens,
    mrope_positions,
    position_shift,
)
from quintet.records import ImageInput

KEY = (1 << 44) - 5
IMAGE, VIDEO = 9, 10


def tokens_of(key: int, rows: int, columns: int) -> tuple[int, ...]:
    return image_tokens(ImageInput(key, (rows, columns), b""))


def rope_index(tokens: list[int], grids: list[tuple[int, int]]) -> torch.Tensor:
    """Positions [n, 3] by transformers, for image tokens with the grids (rows, columns)."""
    config = Qwen2_5_VLConfig(image_token_id=IMAGE, video_token_id=VIDEO)
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    ids = torch.tensor([[IMAGE if token < 0 else token for token in tokens]])
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
    return model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grid)[0][:, 0].T


@pytest.mark.parametrize("grids", [[(4, 4)], [(2, 5), (5, 2)], [(1, 1), (3, 3), (3, 3)], [(1, 9), (6, 1)]])
def test_positions_are_those_of_transformers(grids: list[tuple[int, int]]) -> None:
    tokens = [1, 2, 3]
    for number, grid in enumerate(grids):
        tokens += [4, *tokens_of(KEY - number // 2, *grid), 5, 6]
    ours = mrope_positions(tokens)
    assert ours.tolist() == rope_index(tokens, grids).tolist()
    assert position_shift(tokens) == ours[-1].max() + 1 - len(tokens)


def test_images_directly_behind_each_other_are_separate() -> None:
    twice = [*tokens_of(7, 2, 2), *tokens_of(7, 2, 2), *tokens_of(8, 1, 1)]
    assert mrope_positions(twice)[:, 0].tolist() == [0] * 4 + [2] * 4 + [4]


def test_text_counts_on() -> None:
    assert mrope_positions([5, 6, 7]).tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert mrope_positions([]).shape == (0, 3)
    assert position_shift((5, 6, 7)) == 0
    assert not contains_images((5, 6))


def test_tokens_name_image_row_and_column() -> None:
    tokens = tokens_of(KEY, 3, MAX_SIDE)
    assert len(set(tokens)) == 3 * MAX_SIDE
    assert max(tokens) < 0
    assert contains_images((1, *tokens))
    for decoded in (decode_image_tokens(np.array(tokens)), decode_image_tokens(torch.tensor(tokens))):
        assert set(decoded.keys.tolist()) == {KEY}
        assert decoded.rows.tolist() == [row for row in range(3) for _ in range(MAX_SIDE)]
        assert decoded.columns.tolist() == list(range(MAX_SIDE)) * 3
