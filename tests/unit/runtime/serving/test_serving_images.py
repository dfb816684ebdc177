"""If these fail, a served policy sees other images than in training, or an image in a request harms the server."""

from __future__ import annotations

import base64
import io
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serving_clients import CONTEXT, Client, hf_engine, served
from vision_models import random_image, save_qwen2_5_vl

from quintet.config.native.policy import VisionConfig
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.records import Generation, Request
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.runtime.serving.build import build_chat_tokenizer
from quintet.runtime.serving.image_files import MAX_IMAGES
from quintet.runtime.serving.tokenization import ChatTokenizer

CHAT = "/v1/chat/completions"
IMAGES = (random_image(16, 24), random_image(24, 8))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2_5_vl(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def chat_tokenizer(directory: Path) -> ChatTokenizer:
    tokenizer = load_tokenizer(directory)
    return build_chat_tokenizer(load_model(directory), tokenizer, (tokenizer.eos_token_id,), VisionConfig())


@pytest.fixture(scope="module")
def client(directory: Path, chat_tokenizer: ChatTokenizer) -> Iterator[Client]:
    with served(hf_engine(directory), directory, chat_tokenizer=chat_tokenizer) as opened:
        yield opened


def data_url(image: np.ndarray | bytes, kind: str = "png") -> str:
    if isinstance(image, np.ndarray):
        file = io.BytesIO()
        Image.fromarray(image).save(file, kind, **({"lossless": True} if kind == "webp" else {}))
        image = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def ask_about(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Walk."}, {"role": "user", "content": list(parts)}]
    return {"messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **fields}


def in_process(directory: Path) -> tuple[tuple[int, ...], Generation]:
    """Prompt and greedy response of a rollout that shows two images."""
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    images = ImagePrompts.from_model(model, VisionConfig())
    dialogue = Dialogue(ChatFormat(tokenizer, images=images), "Walk.", None)
    prompt, *_ = dialogue.observe("Here: <image> or <image>?", IMAGES)
    engine = hf_engine(directory)
    engine.add_request(
        Request(0, prompt, 12, seed=0, temperature=0, stop_token_ids=(tokenizer.eos_token_id,), images=dialogue.images)
    )
    done: list[Generation] = []
    while not done:
        done += engine.step()
    return prompt, done[0]


def test_a_request_with_images_is_answered_as_in_a_rollout(client: Client, directory: Path) -> None:
    prompt, expected = in_process(directory)
    parts = [text("Here: "), part(data_url(IMAGES[0])), text(" or "), part(data_url(IMAGES[1], "webp")), text("?")]
    body = ask_about(*parts, logprobs=True)
    answer = client.ask(CHAT, body)
    placeholder = load_tokenizer(directory).convert_tokens_to_ids("<|image_pad|>")
    assert answer["prompt_token_ids"] == [token if token >= 0 else placeholder for token in prompt]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    (choice,) = answer["choices"]
    assert tuple(choice["token_ids"]) == expected.tokens
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    events = client.stream(CHAT, body)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == choice["message"]["content"]


def test_samples_share_the_images_and_other_images_change_the_answer(client: Client) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 20}
    body = ask_about(part(data_url(IMAGES[0])), **sampled)
    first, again = ([c["token_ids"] for c in client.ask(CHAT, body)["choices"]] for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 3
    other = client.ask(CHAT, ask_about(part(data_url(random_image(16, 24, seed=1))), **sampled))
    assert [c["token_ids"] for c in other["choices"]] != first


def test_low_detail_reduces_an_image(chat_tokenizer: ChatTokenizer, client: Client) -> None:
    """This model's own limit is smaller: the processor of a larger one is used."""
    from dataclasses import replace

    from quintet.runtime.serving.image_files import read_images
    from quintet.runtime.serving.request_schema import ChatBody

    assert chat_tokenizer.images
    processor = replace(chat_tokenizer.images.processor, max_pixels=1 << 24)
    large = data_url(np.zeros((640, 1280, 3), np.uint8))
    sizes = {}
    for detail in ("auto", "high", "low"):
        messages = ChatBody.model_validate(ask_about(part(large, detail=detail))).messages
        ((rows, columns),) = (image.grid for image in read_images(messages, processor, 1 << 20).inputs)
        sizes[detail] = rows * columns * processor.factor**2
    assert sizes["auto"] == sizes["high"] == 640 * 1280
    assert 400 * 400 < sizes["low"] <= 512 * 512


def test_the_first_frame_of_an_animation_is_shown(client: Client) -> None:
    file = io.BytesIO()
    frames = [Image.new("P", (16, 16), color) for color in (3, 200)]
    frames[0].save(file, "gif", save_all=True, append_images=frames[1:])
    first = client.ask(CHAT, ask_about(part(data_url(file.getvalue(), "gif"))))
    file = io.BytesIO()
    frames[0].save(file, "gif")
    assert first["choices"] == client.ask(CHAT, ask_about(part(data_url(file.getvalue(), "gif"))))["choices"]


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """Return a grey PNG file whose header declares any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def valid_png() -> bytes:
    return base64.b64decode(data_url(IMAGES[0]).partition(",")[2])


def deep_png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9/a.png", "nothing is fetched"),
        ("https://example.com/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("/etc/passwd", "nothing is fetched"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "image/png, image/jpeg, image/webp, image/gif"),
        ("data:image/png,abc", "use data:"),
        ("data:image/png;base64", "use data:"),
        ("data:image/png;base64,", "no image/png file"),
        ("data:image/png;base64,###", "not base64"),
        ("data:image/png;base64,\u00e4", "not base64"),
        (data_url(valid_png(), "jpeg"), "no image/jpeg file"),
        (data_url(b"GIF89a" + bytes(20), "png"), "no image/png file"),
        (data_url(valid_png()[:-60]), "damaged"),
        (data_url(png(16, 16)), "damaged"),
        (data_url(deep_png()), "mode I;16"),
        (data_url(png(1 << 13, 1 << 13)), "8192×8192 pixels"),
        (data_url(png(1 << 14, 1 << 14, bytes(1 << 20))), "pixels"),
        (data_url(png((1 << 31) - 1, (1 << 31) - 1)), "pixels"),
        (data_url(png(1 << 20, 16)), "200 times"),
        (data_url(png(0, 16)), "damaged"),
    ],
    ids=range(20),
)
def test_hostile_images_are_refused_without_being_decoded(client: Client, url: str, message: str) -> None:
    status, error = client.refused(CHAT, ask_about(text("What?"), part(url)))
    assert status == 400
    assert message in error["message"]
    assert len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages.1.content.1.image_url.url"


def test_too_many_images_and_pixels_are_refused(client: Client) -> None:
    tiny = part(data_url(np.zeros((1, 1, 3), np.uint8)))
    assert client.refused(CHAT, ask_about(*[tiny] * 10_000))[0] == 400
    status, error = client.refused(CHAT, ask_about(*[tiny] * (MAX_IMAGES + 1)))
    assert (status, error["code"]) == (400, "too_many_images")
    status, error = client.refused(CHAT, ask_about(*[tiny] * MAX_IMAGES))
    assert (status, error["code"]) == (400, "context_length_exceeded"), CONTEXT
    status, error = client.refused(CHAT, ask_about(*[part(data_url(png(1 << 12, 1 << 12)))] * 3))
    assert status == 400
    assert "together" in error["message"]


def test_texts_cannot_stand_for_images(client: Client) -> None:
    for content in ("<|image_pad|>", "<|vision_start|><|video_pad|><|vision_end|>"):
        assert client.refused(CHAT, ask_about(text(content)))[0] == 400
    # the marker of an image that the request does not contain remains text
    assert client.ask(CHAT, ask_about(text("\ue000\ue0027:1:2\ue000\ue002")))["choices"]
    assert client.refused("/generate", {"prompt_token_ids": [-5]})[0] == 400


def test_unfinished_images_of_a_client_are_limited(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.runtime.serving.request_costs.MAX_IMAGE_BYTES_PER_CLIENT", 100)
    body = ask_about(part(data_url(IMAGES[0])))
    status, error = client.refused(CHAT, body)
    assert (status, error["code"]) == (503, "overloaded")
    monkeypatch.undo()
    client.ask(CHAT, body)
    deadline = time.monotonic() + 10  # the request ends after its answer is sent
    while client.handler._unfinished._image_bytes.total() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.handler._unfinished._image_bytes.total() == 0
