"""The tokens of fine-tuning rows and their loss mask, for `quintet data show --masks`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from quintet.data.conversations import ConversationFormat, TokenSequence, parse_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from quintet.config.native.data import DataConfig

TRAINED: Final = ("bold black on green", "bold black on bright_green")
"""Styles of trained tokens, which alternate so that their borders are visible."""
CONTEXT: Final = ("bright_black", "white")
INCOMPLETE: Final = "\ufffd"
"""Decoded text of a character of which tokens are missing."""


def iter_masks(rows: Any, count: int, config: DataConfig, model: str | None) -> Iterator[Text]:
    """Yield for each sequence of the first rows a line with its numbers of tokens, and its text: trained tokens are
    green and between ⟦ and ⟧.

    Raises:
        ConfigError: a row cannot be read, or the chat template cannot render it.
    """
    tokenizer, images = _tokenizer_and_images(rows, config, model)
    conversations = ConversationFormat(tokenizer, config.template, images)
    for number in range(count):
        location = rows.describe_row(number)
        row = parse_conversation(rows[number], config, number, location, directory=rows.directory(number))
        sequences = conversations.encode(row, location)
        for index, sequence in enumerate(sequences):
            part = f", sequence {index + 1} of {len(sequences)}" if len(sequences) > 1 else ""
            tokens, trained = len(sequence.tokens), sum(sequence.loss_mask)
            yield Text(f"row {number}{part}: {tokens:,} tokens, {trained:,} trained", style="bold")
            yield _masked_text(tokenizer, sequence)


def _tokenizer_and_images(rows: Any, config: DataConfig, model: str | None) -> tuple[Any, Any]:
    """Return the tokenizer and image converter of a model; without one, a tokenizer that is trained on the rows, as in
    a run without a model."""
    from quintet.config.native.policy import PolicyConfig, VisionConfig
    from quintet.pipelines.sft.rows import iter_texts
    from quintet.policies.model_loading import load_tokenizer
    from quintet.policies.tiny_models import get_preset, train_tokenizer
    from quintet.rollout.chat.image_prompts import ImagePrompts

    if model is not None:
        return load_tokenizer(model), ImagePrompts.from_directory(model, VisionConfig())
    preset = get_preset(PolicyConfig.model_fields["preset"].default)
    return train_tokenizer(preset.vocabulary, iter_texts(rows, config), digits=preset.digits), None


def _masked_text(tokenizer: PreTrainedTokenizerFast, sequence: TokenSequence) -> Text:
    text = Text()
    tokens = zip(sequence.tokens, sequence.loss_mask, strict=True)
    for is_trained, span in groupby(tokens, key=lambda pair: pair[1]):
        styles = TRAINED if is_trained else CONTEXT
        pieces = _token_texts(tokenizer, [token for token, _ in span])
        text.append("⟦" if is_trained else "")
        for index, piece in enumerate(pieces):
            text.append(piece, style=styles[index % 2])
        text.append("⟧" if is_trained else "")
    return text


def _token_texts(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> Iterator[str]:
    """Yield the text of each token, or of several that make up a character, and of an image its number of tokens."""
    for is_image, span in groupby(tokens, key=lambda token: token < 0):
        part = list(span)
        if is_image:
            yield f"<image: {len(part):,} tokens>"
            continue
        pending: list[int] = []
        for index, token in enumerate(part):
            pending.append(token)
            text = tokenizer.decode(pending, clean_up_tokenization_spaces=False)
            if not str(text).endswith(INCOMPLETE) or index == len(part) - 1:
                yield str(text)
                pending = []
