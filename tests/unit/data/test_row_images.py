"""If these fail, a policy is shown other images than those of its row, or a wrong image ends a run without a word."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import converter, encoded, grids_and_text, image_tokenizer, prompts_of, question_rows, write_rows
from PIL import Image
from vision_models import random_image

from quintet.config.native.data import DataConfig
from quintet.data import prompt_split
from quintet.data.prompt_dataset import PromptDataset
from quintet.data.prompt_split import PromptSplit
from quintet.errors import ConfigError
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue

PICTURE = random_image(16, 24)
FILE = encoded(PICTURE)
TEXT = b64encode(FILE).decode()
LAYOUTS = {
    "bytes": ([{"bytes": FILE, "path": None}], ".parquet"),
    "bare bytes": ([FILE], ".parquet"),
    "one": ({"bytes": FILE, "path": "x"}, ".parquet"),
    "path": ([{"bytes": None, "path": "images/a.png"}], ".parquet"),
    "bytes in JSON": ([{"bytes": TEXT}], ".jsonl"),
    "paths": (["images/a.png"], ".jsonl"),
    "one path": ("./images/a.png", ".jsonl"),
    "link": ("images/link.png", ".jsonl"),
    "base64": ([TEXT], ".jsonl"),
    "URI": (f"data:image/png;base64,{TEXT}", ".jsonl"),
}


def row(images: Any, content: Any = "Left <image> Right", **fields: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "answer": "5", "images": images, **fields}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "images").mkdir(parents=True)
    (tmp_path / "data/images/a.png").write_bytes(FILE)
    (tmp_path / "b.png").write_bytes(FILE)
    (tmp_path / "data/images/link.png").symlink_to(tmp_path / "b.png")
    return tmp_path / "data"


def one(folder: Path, images: Any, content: Any = "Left <image> Right", **config: Any) -> PromptSplit:
    suffix = ".parquet" if isinstance(images, list) and images and isinstance(images[0], bytes | dict) else ".jsonl"
    return prompts_of(write_rows(folder / f"a{suffix}", [row(images, content)]), **config)


@pytest.mark.proves("verl", "data.image_key")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_and_its_images_are_those_of_an_observation(folder: Path, layout: str) -> None:
    """Token by token and byte by byte, from every place where a row can have an image."""
    images, suffix = LAYOUTS[layout]
    split = prompts_of(write_rows(folder / f"a{suffix}", [row(images)]))
    dialogue = Dialogue(ChatFormat(image_tokenizer(), images=converter()), "", None)
    dialogue.observe("Left <image> Right", [PICTURE])
    (image,) = split.images(0)
    assert (image.grid, image.patches) == (dialogue.images[0].grid, dialogue.images[0].patches)
    prompt = split.prompt(0)
    text = image_tokenizer().encode("<|im_start|>user\nLeft ", add_special_tokens=False)
    shown = converter().tokens(converter().place("<image>", [image]))
    assert prompt[: len(text) + len(shown)] == (*text, *shown)
    assert split[0].messages[0]["content"] == "Left <image> Right"
    assert split[0].extra == ({} if "extra_info" in split[0].extra else {"answer": "5"})


def test_the_placeholders_of_typed_contents_and_of_none_are_those_of_text(folder: Path) -> None:
    other = {"bytes": encoded(random_image(8, 8)), "path": None}
    rows = [{"bytes": FILE, "path": None}, other]
    typed = [{"type": "image", "text": None}, {"type": "image", "text": None}, {"type": "text", "text": "Up"}]
    prompts = [one(folder, rows, content).prompt(0) for content in ("<image><image>Up", typed, "Up")]
    assert prompts[0] == prompts[1] == prompts[2]
    first, second = (token for token in prompts[0] if token < 0 and not (-1 - token) & ((1 << 18) - 1))
    swapped = one(folder, rows[::-1], "<image><image>Up").prompt(0)
    assert [token for token in swapped if token in (first, second)] == [second, first]


def test_rows_without_images_are_text_even_if_they_mention_them(folder: Path) -> None:
    name = write_rows(folder / "a.jsonl", [{"prompt": "Up <image>", "answer": "5"}])
    split = prompts_of(name)
    assert min(split.prompt(0)) >= 0
    assert split.images(0) == ()
    text_policy = PromptSplit.from_config(DataConfig(train_files=(name,), image_key="images"), image_tokenizer(), 200)
    assert text_policy.prompt(0) == split.prompt(0)


PNG_HEADER = b"\x89PNG\r\n\x1a\n"


def bomb(width: int, height: int) -> bytes:
    """A file of a few bytes that claims to be a huge image."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (header, data))
    return PNG_HEADER + b"".join(chunks)


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("images", "content", "problem"),
    [
        ([b"no image"], "<image>", "image 0 cannot be read: cannot identify"),
        ([FILE, bomb(60_000, 60_000)], "<image><image>", "image 1 cannot be read: Image size"),
        ([bomb(10_000, 10_000)], "<image>", "10000 × 10000 pixels, more than 89,478,485"),
        ([bomb(10, 4000)], "<image>", "one side is more than 200 times"),
        ([b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"], "<image>", "cannot identify image file"),
        (["images/none.png"], "<image>", "there is no file"),
        (["images"], "<image>", "there is no file"),
        (["../b.png"], "<image>", "outside"),
        (["/etc/hostname"], "<image>", "outside"),
        (["https://example.com/a.png"], "<image>", "which is not downloaded"),
        (["data:image/png,abc"], "<image>", "begins with data:image/png"),
        ([TEXT[:-1] + "*"], "<image>", "there is no file"),
        ([TEXT[:-1]], "<image>", "not valid base64"),
        ([5], "<image>", "image 0 is int"),
        ([FILE], "<image><image>", "1 images and 2 placeholders"),
        ([], "<image>", "0 images and 1 placeholders"),
        (["images/a.png"] * 3, "<image> <image>", "3 images and 2 placeholders"),
    ],
)
def test_a_wrong_image_is_named_with_file_row_and_column(
    folder: Path, images: list[Any], content: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        one(folder, images, content).prompt(0)
    assert caught.value.key == "data.image_key"
    assert problem in str(caught.value)
    assert "data.image_key = images: " in str(caught.value)
    assert f"{folder}/a." in str(caught.value)
    assert ", row 0" in str(caught.value)


def test_prompts_are_measured_without_decoding_their_images(folder: Path) -> None:
    """A file whose pixels are missing has a length; only its use is an error."""
    damaged = FILE[: len(FILE) // 2]
    split = one(folder, [damaged], filter_long_prompts=True)
    whole = one(folder, [FILE])
    assert grids_and_text(split.prompt(0)) == grids_and_text(whole.prompt(0))
    with pytest.raises(ConfigError, match=r"row 0: image 0 cannot be read"):
        split.images(0)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_rotated_photos_are_upright_in_length_and_pixels(folder: Path, file_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    photo, upright = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (48, 16), "red").save(photo, file_format, exif=exif)
    Image.new("RGB", (16, 48), "red").save(upright, file_format)
    split, expected = one(folder, [photo.getvalue()]), one(folder, [upright.getvalue()])
    assert grids_and_text(split.prompt(0)) == grids_and_text(expected.prompt(0))
    (image,), (other,) = split.images(0), expected.images(0)
    assert replace(image, key=0) == replace(other, key=0)


def test_transparent_pixels_are_white(folder: Path) -> None:
    picture = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    (image,) = one(folder, [encoded(picture)]).images(0)
    assert image == replace(converter().process([np.full((16, 16, 3), 255, np.uint8)])[0], key=image.key)


def test_image_tokens_count_towards_the_limit_and_are_not_cut(folder: Path) -> None:
    """Text beside an image can be cut; a prompt whose image would lose tokens is refused or filtered."""
    rows = [row([{"bytes": FILE, "path": None}], f"<image>{'Up ' * words}") for words in (1, 40)]
    name = write_rows(folder / "a.parquet", rows)
    lengths = [len(prompts_of(name).prompt(number)) for number in (0, 1)]
    assert lengths[0] > 6
    kept = prompts_of(name, limit=lengths[0], filter_long_prompts=True)
    assert (len(kept), kept.num_filtered) == (1, 1)
    right = prompts_of(name, limit=lengths[1] - 10, truncation="right").prompt(1)
    assert sum(token < 0 for token in right) == 6
    for side in ("left", "middle", "error"):
        with pytest.raises(ConfigError, match=r"row 1 has \d+ tokens") as caught:
            prompts_of(name, limit=12, truncation=side).prompt(1)
        assert ("remove a part of an image" in str(caught.value)) == (side != "error")
        assert f"rollout.max_prompt_tokens={lengths[1]}" in str(caught.value)


def test_workers_prepare_the_same_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_split, "MIN_ROWS_PER_WORKER", 1)
    name = write_rows(folder / "a.parquet", question_rows(8))
    here = prompts_of(name)
    there = prompts_of(name, filter_long_prompts=True, filter_workers=2, workers=1)
    there.prepare(range(8))
    try:
        assert [there.prompt(number) for number in range(8)] == [here.prompt(number) for number in range(8)]
    finally:
        there.close()


def test_the_samples_of_a_group_share_their_images_and_the_cache_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = prompts_of(write_rows(folder / "a.parquet", question_rows(3)))
    first = split.images(0)
    assert split.images(0) is first
    monkeypatch.setattr(prompt_split, "MAX_CACHED_BYTES", 1)
    split.images(1)
    assert split.images(0) is not first
    assert split.images(0) == first


def test_a_resumed_run_continues_with_the_next_images(folder: Path) -> None:
    name = write_rows(folder / "a.parquet", question_rows(9))

    def dataset() -> PromptDataset:
        return PromptDataset(prompts_of(name), prompts_of(name))

    through, before = dataset(), dataset()
    numbers = [through.take(3) for _ in range(4)]
    assert before.take(3) == numbers[0]
    resumed = dataset()
    resumed.load(before.state())
    for expected in numbers[1:]:
        taken = resumed.take(3)
        assert taken == expected
        assert [resumed.prompt(number) for number in taken] == [through.prompt(number) for number in expected]
        assert [resumed.images(number) for number in taken] == [through.images(number) for number in expected]


def test_a_text_that_spells_an_image_token_is_refused(folder: Path) -> None:
    """It would be taken for an image, or end the run of an engine that counts them."""
    with pytest.raises(ConfigError, match=r"row 0: the text spells a token"):
        one(folder, ["images/a.png"], "<image> <|image_pad|>").prompt(0)


def test_a_text_policy_refuses_images(folder: Path) -> None:
    name = write_rows(folder / "a.parquet", [row([{"bytes": FILE, "path": None}])])
    split = PromptSplit.from_config(DataConfig(train_files=(name,), image_key="images"), image_tokenizer(), 200)
    with pytest.raises(ConfigError, match="cannot be read by the policy"):
        split.prompt(0)
    assert PromptSplit.from_config(DataConfig(train_files=(name,)), image_tokenizer(), 200).prompt(0)
