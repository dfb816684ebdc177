"""If these fail, fine-tuning shows other images than those of a conversation, or trains on the tokens of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_files import converter, encoded, grids_and_text, image_tokenizer
from vision_models import random_image

from quintet.config.native.data import DataConfig
from quintet.data.chat_templates import QWEN3
from quintet.data.conversations import ConversationFormat, TokenSequence, parse_conversation
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue

PICTURES = [random_image(16, 24), random_image(8, 8)]
IMAGES = [{"bytes": encoded(picture), "path": None} for picture in PICTURES]
TEXTS = ["Up <image>", "Down <image>!"]
REPLIES = ["Left", "Right"]


def row(contents: list[Any]) -> dict[str, Any]:
    messages = []
    for content, reply in zip(contents, REPLIES, strict=True):
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]
    return {"messages": messages, "images": IMAGES}


def sequences(contents: list[Any], template: str | None = None) -> list[TokenSequence]:
    config = DataConfig(train_files=("x",), messages_key="messages", image_key="images")
    conversation = parse_conversation(row(contents), config, 0, "row 0", directory=Path())
    return ConversationFormat(image_tokenizer(), template, converter()).encode(conversation)


def dialogue_tokens() -> tuple[list[int], list[bool]]:
    """The same conversation as a policy plays it, without a system message."""
    chat = ChatFormat(image_tokenizer(), images=converter())
    dialogue = Dialogue(chat, "", None)
    tokens: list[int] = []
    mask: list[bool] = []
    for text, picture, reply in zip(TEXTS, PICTURES, REPLIES, strict=True):
        _, prompt, _ = dialogue.observe(text, [picture])
        response = (*chat.encode(reply), chat.end_token_id)
        dialogue.add_response(response)
        tokens += [*prompt, *response]
        mask += [False] * len(prompt) + [True] * len(response)
    return tokens, mask


@pytest.mark.proves("verl", "data.image_key")
def test_a_conversation_is_encoded_as_the_policy_plays_it() -> None:
    """verl's and TRL's placeholders, in texts and in typed contents, give the tokens of an episode; replies alone are
    trained."""
    typed = [
        [{"type": "text", "text": "Up "}, {"type": "image", "text": None}],
        [{"type": "text", "text": "Down "}, {"type": "image"}, {"type": "text", "text": "!"}],
    ]
    expected, mask = dialogue_tokens()
    start = expected.index(image_tokenizer().encode("user", add_special_tokens=False)[0]) - 1
    for contents in (TEXTS, typed):
        (sequence,) = sequences(contents)
        assert grids_and_text(sequence.tokens) == grids_and_text(expected[start:])
        assert list(sequence.loss_mask) == mask[start:]


def test_images_of_a_reply_are_not_trained() -> None:
    messages = [{"role": "user", "content": "Up"}, {"role": "assistant", "content": "Left <image> Right"}]
    config = DataConfig(train_files=("x",), messages_key="messages", image_key="images")
    conversation = parse_conversation({"messages": messages, "images": IMAGES[:1]}, config, 0, "row 0")
    (sequence,) = ConversationFormat(image_tokenizer(), None, converter()).encode(conversation)
    trained = [token for token, is_trained in zip(sequence.tokens, sequence.loss_mask, strict=True) if is_trained]
    assert not set(trained) & {*converter().placeholders}
    assert min(trained) >= 0
    assert min(sequence.tokens) < 0


def test_replies_that_a_template_renders_differently_keep_their_images() -> None:
    """Qwen3 drops earlier thoughts, so that a conversation becomes several sequences."""
    replies = [{"role": "assistant", "content": f"<think> safe </think>\n{reply}"} for reply in REPLIES]
    users = [{"role": "user", "content": text} for text in TEXTS]
    messages = [users[0], replies[0], users[1], replies[1]]
    config = DataConfig(train_files=("x",), messages_key="messages", image_key="images")
    conversation = parse_conversation({"messages": messages, "images": IMAGES}, config, 0, "row 0")
    first, second = ConversationFormat(image_tokenizer(), QWEN3, converter()).encode(conversation)
    shown = [[token for token in sequence.tokens if token < 0] for sequence in (first, second)]
    assert len(shown[0]) == 6
    assert shown[1][:6] == shown[0]
    assert len(shown[1]) == 7
