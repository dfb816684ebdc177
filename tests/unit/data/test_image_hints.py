"""If these fail, a hint about the images of data files leads nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hint_cases import HintCase, case, name_of
from image_files import converter, encoded, image_tokenizer, prompts_of, write_rows
from vision_models import random_image

from quintet.config.native.data import DataConfig
from quintet.data.chat_templates import CHATML
from quintet.data.conversations import ConversationFormat, parse_conversation, truncate_sequence
from quintet.data.prompt_split import PromptSplit

FILE = encoded(random_image(16, 24))
NO_TEXT = "{% for m in messages %}{{ m.role }}{% endfor %}"
ONE = {"images": [FILE], "settings": {}}


def used(row: Mapping[str, Any]) -> None:
    """Use a prompt with an image beside its data file."""
    Path("images").mkdir(exist_ok=True)
    Path("images/a.png").write_bytes(FILE)
    suffix = "parquet" if isinstance(row["images"][0], bytes) else "jsonl"
    name = write_rows(
        Path.cwd() / f"rows.{suffix}", [{"prompt": row.get("prompt", "<image> Up"), "images": row["images"]}]
    )
    split = prompts_of(name, **row.get("settings", {}))
    for number in range(len(split)):
        assert split[number]
        split.prompt(number)
        split.images(number)


def used_by_text_policy(image_key: str | None) -> None:
    name = write_rows(Path("rows.parquet"), [{"prompt": "<image> Up", "images": [FILE]}])
    PromptSplit.from_config(DataConfig(train_files=(name,), image_key=image_key), image_tokenizer(), 200).prompt(0)


def learnt(row: Mapping[str, Any]) -> None:
    """Encode a conversation with an image for fine-tuning."""
    config = DataConfig(train_files=("x",), image_key=row.get("image_key", "images"))
    messages = {"prompt": row.get("prompt", "<image> Up"), "response": "Left", "images": [FILE]}
    images = row.get("converter", converter())
    form = ConversationFormat(image_tokenizer(), CHATML, images)
    (sequence,) = form.encode(parse_conversation(messages, config, 0, "row 0"))
    truncate_sequence(sequence, row.get("limit", 200), row.get("truncation", "right"), "row 0")


SMALL = replace(converter(), processor=replace(converter().processor, max_pixels=64))
IMAGE_FILE = "replace the image, or remove the row; formats: PNG, "
CASES = [
    case(
        used, {"images": [5]}, 'an image is {"bytes": …}, ', *({"images": [value]} for value in (FILE, "images/a.png"))
    ),
    case(used, {"images": ["data:image/png,a"]}, "write it as data:image/png;base64,…", ONE),
    case(used, {"images": ["a" * 65]}, "encode the image file again", ONE),
    case(used, {"images": ["http://localhost/a.png"]}, "store the image beside", {"images": ["images/a.png"]}),
    case(used, {"images": ["../a.png"]}, "move the images into ", {"images": ["images/a.png"]}),
    case(used, {"images": ["a.png"]}, "correct the path, which starts at the data file", {"images": ["images/a.png"]}),
    case(used, {"images": [FILE[:60]]}, IMAGE_FILE, ONE),
    case(used, {**ONE, "prompt": "<image><|image_pad|>"}, "remove that token from the text", ONE),
    case(
        used,
        {**ONE, "settings": {"template": NO_TEXT}},
        "use another template, such as data.template=chatml",
        {**ONE, "settings": {"template": "chatml"}},
    ),
    case(
        used,
        {**ONE, "settings": {"limit": 12, "truncation": "left"}},
        "rollout.max_prompt_tokens=",
        {**ONE, "settings": {"limit": 40}},
    ),
    case(
        used,
        {**ONE, "settings": {"keep_raw_tokens": True}},
        "data.keep_raw_tokens=false",
        {**ONE, "settings": {"keep_raw_tokens": False}},
    ),
    case(used_by_text_policy, "images", "train a vision-language model, or data.image_key=null", None),
    case(learnt, {"converter": None}, "train a vision-language model, or data.image_key=null", {"image_key": None}, {}),
    case(learnt, {"prompt": "<image> <|image_pad|>"}, "remove that token from the text", {}),
    case(learnt, {"limit": 6}, "sft.max_tokens=", {"limit": 40}, {"limit": 20, "converter": SMALL}),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_images_removes_its_error(entry: HintCase) -> None:
    entry.check()
