"""Tokenization of conversations for supervised fine-tuning: assistant replies are trained.

The tokenizer's chat template formats a conversation. Replies of plain text are found in renderings of the whole
conversation (`plain_replies.py`). Otherwise the text of a reply is determined by rendering the conversation
up to it with and without the reply, and once more with a placeholder instead of its content: the text after the
placeholder ends the reply. The reply's content and end token are trained, its header is not.

Some templates format earlier replies differently from the last one (Qwen3 drops their thoughts). Then the conversation
becomes one sequence per reply, each as the policy would have generated it. If a template omits part of the last reply
itself, the original content is trained after the generation prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quintet.config.native.data import DataConfig
from quintet.data.chat_messages import ASSISTANT, Cell, Message, is_trained, parse_messages
from quintet.data.chat_templates import KEY, chat_template
from quintet.data.dialogue_renderer import DialogueRenderer
from quintet.data.plain_replies import render_plain_replies
from quintet.data.prompt_format import Truncation, kept_positions
from quintet.data.reply_rendering import RenderedReply, render_reply
from quintet.data.row_images import PromptImages, RowImage, keeps_images, place_in_messages
from quintet.data.row_reader import RESPONSE_COLUMNS, RowReader
from quintet.errors import ConfigError
from quintet.records import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TextPiece = tuple[str, bool]
"""Text, and whether it is trained."""

MESSAGES_KEY = "data.messages_key"
SENTENCEPIECE_SPACE = "▁"
"""SentencePiece's space; tokenizers that prepend it to every text cannot encode pieces separately."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, of which replies from index `first_trained` are trained; or a rendered prompt and its response."""

    messages: tuple[Message, ...] = ()
    first_trained: int = 0
    prompt: str | None = None
    answer: str = ""
    images: tuple[RowImage, ...] = ()
    """Images of the placeholders in the messages, in order."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template: `tools`, `enable_thinking`."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids, and which of them are trained."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def parse_conversation(
    row: Mapping[str, Any],
    config: DataConfig,
    number: int,
    row_name: str,
    *,
    rendered: bool = False,
    directory: Path = Path(),
) -> Conversation:
    """Read a conversation, or a prompt and its response, from the configured columns of a row.

    `number` is the row number over all files, `row_name` names the row in errors; `rendered` means that prompts have
    the chat template applied already; `directory` contains the row's file.

    Raises:
        ConfigError: a column is missing or has an unexpected type, or messages and images do not fit together.
    """
    reader = RowReader(config)
    images = reader.images(row, row_name, directory)
    variables = reader.template_variables(row, row_name)
    if reader.messages_column(row) is not None:
        messages = reader.place_images(row, reader.conversation(row, row_name), row_name)
        return Conversation(messages, images=images, variables=variables)
    prompt, response = reader.prompt_and_reply(row, row_name)
    if not response:
        raise _no_response(row, config, row_name)
    if rendered:
        return Conversation(prompt=str(prompt[-1]["content"]), answer=response[0]["content"])
    prompt = reader.place_images(row, prompt, row_name)
    return Conversation((*prompt, *response), first_trained=len(prompt), images=images, variables=variables)


def _no_response(row: Mapping[str, Any], config: DataConfig, row_name: str) -> ConfigError:
    """Return the error for a row without a response, with the column that contains something else, if any."""
    message, hint = f"{row_name} has no response to train on", ""
    columns = RESPONSE_COLUMNS if config.response_key is None else ()
    if wrong := next((name for name in columns if not isinstance(row.get(name), str | None)), None):
        message += f": {wrong} contains {type(row[wrong]).__name__}"
        hint = "a response is text, or a list of chat messages; "
    hint += f"set data.response_key to its column; columns: {', '.join(row)}"
    return ConfigError(message, key="data.response_key", value=config.response_key, source=row_name, hint=hint)


class ConversationFormat:
    """Tokenizes conversations with the chat template of a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template: str | None = None, images: PromptImages | None = None
    ) -> None:
        """`template` replaces the tokenizer's chat template; `images` converts images, None if the policy reads none.

        Raises:
            ConfigError: unknown template.
        """
        self._images = images
        self._tokenizer = tokenizer
        self._template = chat_template(template)
        self._renderer = DialogueRenderer(tokenizer, self._template)
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._special_tokens = special - {""}
        first_token = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0]
        self._encode = self._encode_jointly if first_token.startswith(SENTENCEPIECE_SPACE) else self._encode_separately

    def encode(self, conversation: Conversation, row_name: str = "the conversation") -> list[TokenSequence]:
        """Return token sequences in which each trained reply occurs once.

        Raises:
            ConfigError: there is no reply, the template cannot render the conversation or omits a reply, or an image
                cannot be read.
        """
        if conversation.prompt is not None:
            return [self._tokenize([(conversation.prompt, False), (conversation.answer, True)], is_closed=False)]
        if not (self._template.text or self._tokenizer.chat_template):
            raise ConfigError(
                "the tokenizer has no chat template", key=KEY, hint=f"set {KEY}, for example {KEY}=chatml"
            )
        try:
            return list(self._sequences(conversation, row_name))
        except _PlaceholderError as error:
            hint = "remove that token from the text"
            raise ConfigError(f"{row_name}: {error}", key="data.train_files", source=row_name, hint=hint) from error

    def _shown_messages(self, conversation: Conversation) -> Sequence[Message]:
        """Return the messages with markers of their images."""
        if self._images is None:
            if conversation.images:
                hint = "train a vision-language model, or data.image_key=null for the text"
                raise conversation.images[0].read_error("cannot be read by the policy", hint)
            return conversation.messages
        measured = [image.measure(self._images) for image in conversation.images]
        return place_in_messages(conversation.messages, measured, self._images)

    def _sequences(self, conversation: Conversation, row_name: str) -> Iterator[TokenSequence]:
        shown = parse_messages(self._shown_messages(conversation), Cell(MESSAGES_KEY, "messages", row_name))
        reply_indices = [
            i
            for i in range(conversation.first_trained, len(shown))
            if shown[i]["role"] == ASSISTANT and is_trained(shown[i])
        ]
        if not reply_indices:
            raise ConfigError(f"{row_name} has no reply to train on", key="data.train_files", hint="remove the row")
        messages = self._renderer.messages(shown[: reply_indices[-1] + 1], row_name)
        pieces: list[TextPiece] = []
        is_closed = False
        plain = render_plain_replies(self._renderer, messages, reply_indices, row_name, conversation.variables)
        one_by_one = (
            render_reply(self._renderer, messages[: number + 1], row_name, conversation.variables)
            for number in reply_indices
        )
        for reply in plain or one_by_one:
            rendered = "".join(text for text, _ in pieces)
            if pieces and not reply.prompt.startswith(rendered):
                yield self._tokenize(pieces, is_closed=is_closed)
                pieces, rendered = [], ""
            context = reply.prompt[len(rendered) :]
            if pieces and not is_closed:
                # such as GLM's <|user|> and <|observation|>
                end = next(filter(context.startswith, self._special_tokens), "")
                pieces, context = [*pieces, (end, True)], context[len(end) :]
            trained, is_closed = self._through_end_token(reply)
            pieces += [(context, False), (trained, True)]
        self._renderer.check_tools(reply.dialogue, row_name, conversation.variables)
        if plain is None:
            self._renderer.check_shown(messages, reply.dialogue, row_name, conversation.variables, reply_indices)
        yield self._tokenize(pieces, is_closed=is_closed)

    def _through_end_token(self, reply: RenderedReply) -> tuple[str, bool]:
        """Return the reply with its end token, the first or last special token after it, and whether there is one."""
        suffix, first = reply.suffix, reply.is_delimited
        positions = ((suffix.find(token) if first else suffix.rfind(token), token) for token in self._special_tokens)
        ends = [position + len(token) for position, token in positions if position >= 0]
        if ends:
            return reply.body + suffix[: min(ends) if first else max(ends)], True
        return (reply.body or suffix).rstrip("\n"), False

    def _tokenize(self, pieces: Sequence[TextPiece], *, is_closed: bool) -> TokenSequence:
        """Tokenize the pieces, and add the end token unless the last reply is closed."""
        tokens, loss_mask = self._encode([piece for piece in pieces if piece[0]])
        end = self._tokenizer.eos_token_id
        if not is_closed and end is not None and tokens[-1:] != [end]:
            tokens, loss_mask = [*tokens, end], [*loss_mask, True]
        # the first token cannot be predicted
        return TokenSequence(tuple(tokens), (False, *loss_mask[1:]))

    def _encode_separately(self, pieces: Sequence[TextPiece]) -> tuple[list[int], list[bool]]:
        """Encode each piece separately, like the prompts and responses of an engine."""
        tokens: list[int] = []
        loss_mask: list[bool] = []
        for text, is_reply in pieces:
            for encoded, is_image in self._encode_parts(text):
                tokens += encoded
                loss_mask += [is_reply and not is_image] * len(encoded)
        return tokens, loss_mask

    def _encode_parts(self, text: str) -> Iterator[tuple[Sequence[int], bool]]:
        """Yield the tokens of texts and images, and whether they are an image's."""
        if self._images is None:
            yield self._encode_text(text), False
            return
        try:
            yield from self._images.encode_parts(text, self._encode_text)
        except ValueError as error:
            raise _PlaceholderError(error) from error

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_jointly(self, pieces: Sequence[TextPiece]) -> tuple[list[int], list[bool]]:
        """Encode all pieces at once; a token belongs to the piece in which it ends."""
        text = "".join(part for part, _ in pieces)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        piece_ends = list(accumulate(len(part) for part, _ in pieces))
        loss_mask: list[bool] = []
        piece = 0
        for _, end in encoding["offset_mapping"]:
            while piece < len(piece_ends) - 1 and end > piece_ends[piece]:
                piece += 1
            loss_mask.append(pieces[piece][1])
        return list(encoding["input_ids"]), loss_mask


def truncate_sequence(sequence: TokenSequence, limit: int, truncation: Truncation, row_name: str) -> TokenSequence:
    """Truncate a sequence to at most `limit` tokens, like `truncate`.

    Raises:
        ConfigError: the sequence is longer and `truncation` is `error`, or an image would be removed.
    """
    length = len(sequence.tokens)
    if length <= limit:
        return sequence
    positions = kept_positions(length, limit, truncation)
    if truncation != "error" and keeps_images(sequence.tokens, positions):
        loss_mask = [sequence.loss_mask[position] for position in positions]
        return TokenSequence(tuple(sequence.tokens[position] for position in positions), (False, *loss_mask[1:]))
    message = f"{row_name} has {length:,} tokens, more than sft.max_tokens = {limit:,}"
    hint = f"sft.max_tokens={length}, or data.truncation=left, right or middle"
    if truncation != "error":
        message += f", and data.truncation = {truncation} would remove a part of an image"
        hint = f"sft.max_tokens={length}, or a smaller policy.vision.max_pixels"
    raise ConfigError(message, key="sft.max_tokens", value=limit, source=row_name, hint=hint)


class _PlaceholderError(Exception):
    """A text spells a token that stands for images."""


class TokenizedConversations:
    """Concatenated token sequences of rows, five bytes per token in memory, or nine with images, which are read when
    they are used.

    A row has one or several sequences. Rows without trained tokens, for example after truncation, are dropped.
    """

    def __init__(
        self, rows: Iterable[Sequence[TokenSequence]], add_images: Callable[[Batch, list[int]], Batch] | None = None
    ) -> None:
        """`add_images` adds the images of input rows to their batch; None if the policy reads none."""
        self._add_images = add_images
        self.included_rows: list[int] = []
        """Indices of the input rows that are not dropped."""
        self.num_input_rows = 0
        self._tokens = array("i" if add_images is None else "q")
        self._loss_mask = bytearray()
        self._ends = array("q", [0])
        """Boundaries of the sequences in `_tokens`."""
        self._sequences = array("q", [0])
        """Boundaries of the rows in `_ends`."""
        for row in rows:
            self._add([sequence for sequence in row if any(sequence.loss_mask)])

    def _add(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._tokens.extend(sequence.tokens)
            self._loss_mask.extend(sequence.loss_mask)
            self._ends.append(len(self._tokens))
        if sequences:
            self._sequences.append(len(self._ends) - 1)
            self.included_rows.append(self.num_input_rows)
        self.num_input_rows += 1

    def __len__(self) -> int:
        """Return the number of rows that are not dropped."""
        return len(self.included_rows)

    def prepare(self, rows: Sequence[int]) -> None:
        """Do nothing: all rows are encoded."""

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the sequences of rows as a batch in which each row is a trajectory."""
        sequences_by_row = [range(self._sequences[row], self._sequences[row + 1]) for row in rows]
        spans = [slice(self._ends[i], self._ends[i + 1]) for sequences in sequences_by_row for i in sequences]
        columns = (np.frombuffer(self._tokens, self._tokens.typecode), np.frombuffer(self._loss_mask, np.bool_))
        tokens, loss_mask = (torch.from_numpy(np.concatenate([column[span] for span in spans])) for column in columns)
        lengths = torch.tensor([span.stop - span.start for span in spans])
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        following = torch.cat([loss_mask[1:], loss_mask.new_zeros(1)])
        batch = Batch(
            tokens=tokens.long(),
            positions=torch.arange(len(tokens)) - starts,
            lengths=lengths,
            loss_mask=loss_mask,
            turn=torch.zeros(len(tokens), dtype=torch.long),
            turn_end=loss_mask & ~following,
            trajectory=torch.tensor([number for number, sequences in enumerate(sequences_by_row) for _ in sequences]),
            group=torch.tensor(rows),
            logprobs=torch.zeros(len(tokens)),
            rewards=torch.zeros(len(tokens)),
        )
        return batch if self._add_images is None else self._add_images(batch, [self.included_rows[row] for row in rows])
