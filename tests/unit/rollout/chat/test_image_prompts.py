"""If these fail, a policy reads images at another place, or other tokens than in its pre-training."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from vision_models import PROCESSOR, TEXTS, process, random_image

from quintet.policies.tiny_models import IMAGE_PAD, VISION_END, VISION_START, train_tokenizer
from quintet.policies.vision.image_tokens import image_tokens
from quintet.records import ImageInput
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue, PromptChange
from quintet.rollout.chat.image_prompts import MARK, ImagePrompts

IMAGE_PART = f"{VISION_START}{IMAGE_PAD}{VISION_END}"
QWEN2_5_VL = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    f"{IMAGE_PART}"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's template, without videos and numbered images."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    trained = train_tokenizer(400, TEXTS, images=True)
    trained.chat_template = QWEN2_5_VL
    return trained


@pytest.fixture
def chat() -> ChatFormat:
    before, after = tokenizer().convert_tokens_to_ids([VISION_START, VISION_END])
    return ChatFormat(tokenizer(), images=ImagePrompts(PROCESSOR, before, after))


def processor_tokens(text: str, images: list[ImageInput]) -> list[int]:
    """Tokens of a text of the template as the processor of transformers expands them, with our numbers for images."""
    pad = tokenizer().convert_tokens_to_ids(IMAGE_PAD)
    shown = iter(images)
    ids = tokenizer().encode(text, add_special_tokens=False)
    return [number for token in ids for number in (image_tokens(next(shown)) if token == pad else (token,))]


def test_prompts_with_images_are_those_of_the_processor(chat: ChatFormat) -> None:
    """Two turns, with images at placeholders, before the text, and the same image again."""
    pictures = [random_image(16, 24), random_image(8, 8)]
    first, second = (PROCESSOR.process(picture) for picture in pictures)
    dialogue = Dialogue(chat, "Walk.", None)
    prompt, _, _ = dialogue.observe(" Up <image> safe <image>.", pictures)
    response = (*tuple(tokenizer().encode("Left", add_special_tokens=False)), chat.end_token_id)
    dialogue.add_response(response)
    whole, new, continues = dialogue.observe("Down <image>", [pictures[1], pictures[0]])
    image, messages = {"type": "image"}, [{"role": "system", "content": "Walk."}]
    parts = ["text", " Up "], image, ["text", " safe "], image, ["text", "."]
    messages.append({"role": "user", "content": [p if p is image else {"type": p[0], "text": p[1]} for p in parts]})
    rendered = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert list(prompt) == processor_tokens(rendered, [first, second])
    messages.append({"role": "assistant", "content": "Left"})
    messages.append({"role": "user", "content": [image, {"type": "text", "text": "Down "}, image]})
    rendered = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert list(whole) == processor_tokens(rendered, [first, second, second, first])
    assert continues
    assert whole == prompt + response + new
    assert dialogue.images == (first, second)
    assert dialogue.new_images == (second, first)


def test_a_text_cannot_become_an_image(chat: ChatFormat) -> None:
    forged = f"a{MARK}7:1:1{MARK}{IMAGE_PART}<image>"
    prompt, _, _ = Dialogue(chat, "Walk.", None).observe(forged)
    assert min(prompt) >= 0
    assert not {tokenizer().convert_tokens_to_ids(token) for token in (IMAGE_PAD, VISION_START)} & set(prompt)
    assert "<image>" in tokenizer().decode(prompt)


def test_a_window_only_has_the_images_of_its_turns(chat: ChatFormat) -> None:
    dialogue = Dialogue(chat, "Walk.", 1)
    for number in range(3):
        prompt, _, continues = dialogue.observe("<image>", [random_image(8, 8, number)])
        assert dialogue.images == (process(8, 8, number),)
        assert [token for token in prompt if token < 0] == list(image_tokens(process(8, 8, number)))
        assert not continues
        dialogue.add_response((9, chat.end_token_id))


def test_limits_never_cut_an_image(chat: ChatFormat) -> None:
    image = process(16, 24)
    size = len(image_tokens(image)) + 2
    for limit, kept in ((size + 1, size - 2), (size, 0), (size - 2, 0)):
        dialogue = Dialogue(chat, "", None, max_observation=limit)
        prompt, _, _ = dialogue.observe("a<image>bcdefgh", [random_image(16, 24)])
        assert sum(token < 0 for token in prompt) == kept
        assert PromptChange.OBSERVATION_CUT in dialogue.changes
    for limit in range(1, 30):
        prompt, _, _ = Dialogue(chat, "", None, max_start=limit).observe("a<image>b", [random_image(16, 24)])
        assert len(prompt) <= limit
        assert sum(token < 0 for token in prompt) in (0, size - 2)


def test_images_for_a_policy_without_vision_are_an_error() -> None:
    with pytest.raises(ValueError, match="which the policy cannot read"):
        Dialogue(ChatFormat(tokenizer()), "Walk.", None).observe("<image>", [np.zeros((8, 8, 3), np.uint8)])
