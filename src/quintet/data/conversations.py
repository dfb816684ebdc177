"""Conversations to imitate: rows of files to tokens of which those of the assistant are learnt.

The tokenizer's chat template says how a conversation reads. What it writes for a reply is found by rendering the
conversation up to there with and without it, and once more with a mark in place of the words: what follows them is
their end. Learnt are the reply's words and its end token, not the header before them.

Where a template reads earlier replies otherwise than the last (Qwen3 drops their thoughts), they can't all stand in
one sequence: the conversation then gives one for each reply, in which it stands as the policy would have written it.
Where it leaves out words of the very reply, they are learnt as they were given, behind what the policy is asked with.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quintet.config.native import DataConfig
from quintet.data.prompts import Truncation, truncate
from quintet.data.questions import RowReader
from quintet.data.templates import KEY, chat_template
from quintet.errors import ConfigError, nearest
from quintet.records import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "Conversation",
    "ConversationFormat",
    "Conversations",
    "Passage",
    "conversation_of",
    "cut",
]

Message = Mapping[str, Any]
Piece = tuple[str, bool]
"""Some text, and whether it is learnt."""

ASSISTANT = "assistant"
MARK = "\ue000R\ue000"
SPACE = "▁"
"""SentencePiece's space; tokenizers that put one before every text can't encode piece by piece."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a row holds: messages, the replies from number `first` on to be learnt; or, where the template is
    applied already, a prompt and its answer as text."""

    messages: tuple[Message, ...] = ()
    first: int = 0
    prompt: str | None = None
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Passage:
    """A token sequence: token ids, and which of them are learnt."""

    tokens: tuple[int, ...]
    own: tuple[bool, ...]


def conversation_of(
    row: Mapping[str, Any], config: DataConfig, number: int, place: str, *, rendered: bool = False
) -> Conversation:
    """What a row says, by the columns that the configuration names: a whole conversation, or a prompt and the answer
    to it. `number` counts rows over all files, `place` is where it stands, for messages; `rendered` says that the
    template is applied to prompts already.

    Raises:
        ConfigError: a column is missing or holds something else.
    """
    if config.messages_key is not None:
        return Conversation(_with_system(_messages(row, config.messages_key, place), config.system_prompt))
    question = RowReader(config).read(row, number, place)
    if question.response is None:
        told = f"{place} has no answer to learn"
        hint = f"name its column as data.response_key; there are {', '.join(row)}"
        raise ConfigError(told, key="data.response_key", value=config.response_key, source=place, hint=hint)
    if rendered:
        return Conversation(prompt=str(question.messages[-1]["content"]), answer=question.response)
    answer = {"role": ASSISTANT, "content": question.response}
    return Conversation((*question.messages, answer), first=len(question.messages))


def _messages(row: Mapping[str, Any], column: str, place: str) -> tuple[Message, ...]:
    """Chat messages; fields that are null are left out, as files with columns fill them in everywhere."""
    given = _inside(row, column)
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, list | tuple) or not all(map(_is_message, given)):
        key = "data.messages_key"
        close = None if column in row else nearest(column, row)
        hint = f"set {key}={close}" if close else "a message is a mapping with `role` and `content`"
        told = f"{key} = {column}: {place} has no chat messages there"
        raise ConfigError(told, key=key, value=column, source=place, hint=hint)
    return tuple({name: part for name, part in message.items() if part is not None} for message in given)


def _inside(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column; a dot leads into a mapping, and a cell of text may hold JSON."""
    value: Any = row.get(column)
    if column not in row:
        value = row
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _with_system(messages: tuple[Message, ...], system: str | None) -> tuple[Message, ...]:
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)


class ConversationFormat:
    """How one tokenizer writes conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None = None) -> None:
        """`template` names another chat template than the tokenizer's own.

        Raises:
            ConfigError: there is no such template.
        """
        self._tokenizer = tokenizer
        self._template = chat_template(template)
        added = tokenizer.added_tokens_decoder.values()
        named = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._special = named - {""}
        first = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0]
        self._encode = self._at_once if first.startswith(SPACE) else self._piece_by_piece

    def passages(self, conversation: Conversation, place: str = "the conversation") -> list[Passage]:
        """Token sequences in which every reply to be learnt stands once.

        Raises:
            ConfigError: there is no reply, or the template refuses the conversation or hides a reply.
        """
        if conversation.prompt is not None:
            return [self._passage([(conversation.prompt, False), (conversation.answer, True)], closed=False)]
        if not (self._template.text or self._tokenizer.chat_template):
            raise ConfigError("the tokenizer has no chat template", key=KEY, hint=f"{KEY}=chatml gives it one")
        return list(self._sequences(conversation, place))

    def _sequences(self, conversation: Conversation, place: str) -> Iterator[Passage]:
        messages = conversation.messages
        replies = [i for i in range(conversation.first, len(messages)) if messages[i]["role"] == ASSISTANT]
        if not replies:
            raise ConfigError(f"{place} has no reply to learn", key="data.train_files", hint="remove it")
        pieces: list[Piece] = []
        closed = False
        for number in replies:
            before, own, ends = self._reply(messages, number, place)
            written = "".join(text for text, _ in pieces)
            if pieces and not before.startswith(written):
                yield self._passage(pieces, closed=closed)
                pieces, written = [], ""
            pieces += [(before[len(written) :], False), (own, True)]
            closed = ends
        yield self._passage(pieces, closed=closed)

    def _reply(self, messages: Sequence[Message], number: int, place: str) -> tuple[str, str, bool]:
        """What stands before a reply, the reply with its end token, and whether the template gave it one."""
        history, reply = messages[:number], messages[number]
        given = reply.get("content")
        whole = self._render([*history, reply], place)
        head, found, tail = self._render([*history, {**reply, "content": MARK}], place).partition(MARK)
        header = self._render(history, place, begin_reply=True) if history else head
        said = whole.removeprefix(header)
        if whole.startswith(header) and (not isinstance(given, str) or given.strip() in said):
            # what follows the words of a reply that calls tools holds marks of its own
            known = bool(found) and said.endswith(tail) and "tool_calls" not in reply
            words = said.removesuffix(tail) if known else ""
            return header, *self._ended(words, said[len(words) :], first=known)
        if not found or not isinstance(given, str) or not header.startswith(head):
            told = f"{place}: the chat template writes message {number} so that its words can't be found"
            raise ConfigError(told, key=KEY, source=place, hint=f"take another template by {KEY}, such as chatml")
        # the template leaves out thoughts, or begins them itself where the policy is to answer
        return header, *self._ended(given.removeprefix(header[len(head) :]), tail, first=True)

    def _ended(self, words: str, rest: str, *, first: bool) -> tuple[str, bool]:
        """The words and what follows them up to their end token, the first or the last there; whether there is one."""
        places = ((rest.find(token) if first else rest.rfind(token), token) for token in self._special)
        ends = [at + len(token) for at, token in places if at >= 0]
        if ends:
            return words + rest[: min(ends) if first else max(ends)], True
        return (words or rest).rstrip("\n"), False

    def _render(self, messages: Sequence[Message], place: str, *, begin_reply: bool = False) -> str:
        from jinja2 import TemplateError

        told = {} if self._template.thinking is None else {"enable_thinking": self._template.thinking}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=self._template.text,
                    tokenize=False,
                    add_generation_prompt=begin_reply,
                    **told,
                )
            )
        except (TemplateError, TypeError, KeyError) as error:
            message = f"{place}: the chat template refuses the conversation: {error}"
            raise ConfigError(message, key=KEY, source=place, hint="mend the row, or take another template") from error

    def _passage(self, pieces: Sequence[Piece], *, closed: bool) -> Passage:
        """Tokens of the pieces; where nothing closes the last reply, the end token does."""
        tokens, own = self._encode([piece for piece in pieces if piece[0]])
        end = self._tokenizer.eos_token_id
        if not closed and end is not None and tokens[-1:] != [end]:
            tokens, own = [*tokens, end], [*own, True]
        # nothing stands before the first token that could predict it
        return Passage(tuple(tokens), (False, *own[1:]))

    def _piece_by_piece(self, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
        """Each piece by itself, as an engine meets a prompt and writes a reply."""
        tokens: list[int] = []
        own: list[bool] = []
        for text, learnt in pieces:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            tokens += encoded
            own += [learnt] * len(encoded)
        return tokens, own

    def _at_once(self, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
        """All in one; a token belongs to the piece in which it ends."""
        text = "".join(part for part, _ in pieces)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        bounds = list(accumulate(len(part) for part, _ in pieces))
        own: list[bool] = []
        piece = 0
        for _, end in found["offset_mapping"]:
            while piece < len(bounds) - 1 and end > bounds[piece]:
                piece += 1
            own.append(pieces[piece][1])
        return list(found["input_ids"]), own


def cut(passage: Passage, limit: int, truncation: Truncation, place: str) -> Passage:
    """The passage in at most `limit` tokens, as `truncate` has it.

    Raises:
        ConfigError: it is longer and `truncation` is `error`.
    """
    length = len(passage.tokens)
    if length <= limit:
        return passage
    if truncation == "error":
        told = f"{place} has {length:,} tokens, more than sft.max_tokens = {limit:,}"
        hint = f"set it to {length} or more, or data.truncation to left, right or middle"
        raise ConfigError(told, key="sft.max_tokens", value=limit, source=place, hint=hint)
    kept = truncate(range(length), limit, truncation)
    own = [passage.own[at] for at in kept]
    return Passage(tuple(passage.tokens[at] for at in kept), (False, *own[1:]))


class Conversations:
    """Rows as token sequences, end to end; a row has one, or several where the template asks for it.

    In memory: five bytes a token. Rows of which cutting left nothing to learn are left out.
    """

    def __init__(self, rows: Iterable[Sequence[Passage]]) -> None:
        self.kept: list[int] = []
        """Which of the given rows are there; the others teach nothing."""
        self.given = 0
        self._tokens = array("i")
        self._own = bytearray()
        self._ends = array("q", [0])
        """Where each sequence ends among the tokens, and the next begins."""
        self._sequences = array("q", [0])
        """Where each row ends among the sequences, and the next begins."""
        for row in rows:
            self._add([passage for passage in row if any(passage.own)])

    def _add(self, passages: Sequence[Passage]) -> None:
        for passage in passages:
            self._tokens.extend(passage.tokens)
            self._own.extend(passage.own)
            self._ends.append(len(self._tokens))
        if passages:
            self._sequences.append(len(self._ends) - 1)
            self.kept.append(self.given)
        self.given += 1

    def __len__(self) -> int:
        """Rows that are there."""
        return len(self.kept)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The sequences of those rows, in their order; each row is a trajectory of its own."""
        of_row = [range(self._sequences[row], self._sequences[row + 1]) for row in rows]
        spans = [slice(self._ends[i], self._ends[i + 1]) for sequences in of_row for i in sequences]
        columns = (np.frombuffer(self._tokens, np.int32), np.frombuffer(self._own, np.bool_))
        tokens, own = (torch.from_numpy(np.concatenate([column[span] for span in spans])) for column in columns)
        lengths = torch.tensor([span.stop - span.start for span in spans])
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        following = torch.cat([own[1:], own.new_zeros(1)])
        return Batch(
            tokens=tokens.long(),
            positions=torch.arange(len(tokens)) - starts,
            lengths=lengths,
            loss_mask=own,
            turn=torch.zeros(len(tokens), dtype=torch.long),
            turn_end=own & ~following,
            trajectory=torch.tensor([number for number, sequences in enumerate(of_row) for _ in sequences]),
            group=torch.tensor(rows),
            logprobs=torch.zeros(len(tokens)),
            rewards=torch.zeros(len(tokens)),
        )
