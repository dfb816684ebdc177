"""Token-exact chat prompts: each message is encoded once, and sampled responses are never re-tokenized."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from quintet.config.native.rollout import RolloutConfig
from quintet.records import ImageInput, Observation
from quintet.rollout.chat.image_prompts import ImagePrompts, is_marker, place_images, split_at_markers
from quintet.rollout.chat.response_instruction import response_instruction, states_form
from quintet.rollout.chat.template_analysis import Renderer, TemplateParts, TemplateReport, analyze_template
from quintet.rollout.chat.template_comparison import DialogueComparison, ResponseText, compare
from quintet.rollout.chat.tokens import MessageFrame, TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
REPLACEMENT_CHARACTER = "\ufffd"
"""Decoded text of an incomplete UTF-8 sequence."""


class ChatFormat:
    """Encodes the messages of a dialogue between the literals of a chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        template: str | None = None,
        thinking: bool | None = None,
        extra_stop_token_ids: Sequence[int] = (),
        images: ImagePrompts | None = None,
    ) -> None:
        """`template` names a chat template (default: the tokenizer's); `thinking` is passed to templates with that
        option (Qwen3's `enable_thinking`); `extra_stop_token_ids` end a response besides the end tokens of template and
        tokenizer.

        Raises:
            ConfigError: there is no template, or it is not a sequence of messages whose responses end with a token.
        """
        self._tokenizer = tokenizer
        self._render = Renderer(tokenizer, template, thinking=thinking)
        special_tokens, added_tokens = special_and_added_tokens(tokenizer)
        self.has_answer_token = "<answer>" in added_tokens
        """Whether the vocabulary was made for responses with `<answer>`, as that of a preset is."""
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        stop_tokens = tokenizer.convert_ids_to_tokens([*eos, *extra_stop_token_ids])
        parts = analyze_template(self._render, special_tokens, added_tokens, stop_tokens)
        self.template_parts: TemplateParts = parts
        self._encoder = TextEncoder(tokenizer, parts.control, images)
        self.images = images
        """Converts images of observations; None if the policy reads none."""
        self.end_token_id: int = tokenizer.convert_tokens_to_ids(parts.end)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((self.end_token_id, *eos, *extra_stop_token_ids)))
        """Tokens that end a response, the template's first."""
        self._first = MessageFrame(self._encoder, parts.first, first=True)
        self._closed = MessageFrame(self._encoder, (parts.end + parts.after_end, parts.header))
        # a prompt that opens a thought has begun the response in another way than the template writes earlier ones
        self._response = MessageFrame(self._encoder, ("" if parts.prompt_only else parts.history_only, ""))
        self._open = MessageFrame(self._encoder, (parts.before_end + parts.end + parts.after_end, parts.header))

    @classmethod
    def from_config(
        cls,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerFast,
        extra_stop_token_ids: Sequence[int] = (),
        images: ImagePrompts | None = None,
    ) -> ChatFormat:
        """Build the format with the template's thinking option from the configuration."""
        thinking = config.think if config.template_thinking is None else config.template_thinking
        return cls(tokenizer, thinking=thinking, extra_stop_token_ids=extra_stop_token_ids, images=images)

    @property
    def report(self) -> TemplateReport:
        """The template's end tokens and differences."""
        stop_tokens = tuple(map(str, self._tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))))
        return TemplateReport(self.template_parts.end, stop_tokens, self.template_parts.differences)

    @property
    def response_prefix(self) -> str:
        """The start of the response that is already in the prompt: `<think>` and a newline with templates that add
        them, else empty."""
        return self.template_parts.response_prefix

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode the text of a message without producing control tokens."""
        return self._encoder.encode(text)

    def contains_control_token(self, text: str) -> bool:
        """Return whether the text spells a control token, which is encoded as plain characters then."""
        return self._encoder.contains_control_token(text)

    def initial_prompt(self, system: str, user: str) -> tuple[int, ...]:
        """Encode the prompt of a new dialogue."""
        return self._first.encode(*self.template_parts.opening_texts(system, user))

    def next_prompt(self, user: str, *, closed: bool) -> tuple[int, ...]:
        """Encode the literals and the message after a response; `closed` says that the response itself ends with the
        end token."""
        text = self.template_parts.next_user(user)
        if not closed:
            return self._open.encode(text)
        # text behind the end token is encoded together with it
        return self._closed.encode(text)[1:]

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Encode a demonstrated response as it follows the generation prompt, with the end token. Whitespace that the
        template would strip is kept."""
        prefix = self.response_prefix
        text = text.removeprefix(prefix) if text.startswith(prefix) else text.removeprefix(prefix.strip())
        return (*self._response.encode(text), self.end_token_id)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode a response without its end token."""
        return self._decode(tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens)

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return the longest prefix of the text with at most `max_tokens` tokens, without splitting a character or an
        image."""
        if self.images is None:
            return self._truncate_text(text, max_tokens)
        parts: list[str] = []
        for part in split_at_markers(text):
            size = len(self.images.tokens(part)) if is_marker(part) else len(self.encode(part))
            if size > max_tokens:
                return "".join(parts) + ("" if is_marker(part) else self._truncate_text(part, max_tokens))
            parts.append(part)
            max_tokens -= size
        return text

    def _truncate_text(self, text: str, max_tokens: int) -> str:
        tokens = self.encode(text)
        if len(tokens) <= max_tokens:
            return text
        prefix = self._decode(tokens[:max_tokens]).rstrip(REPLACEMENT_CHARACTER)
        # some tokenizers drop the first space when decoding; a prefix may need more tokens than the text's first ones
        length = len(prefix) + (not text.startswith(prefix))
        while len(self.encode(text[:length])) > max_tokens:
            length -= 1
        return text[:length]

    def response_text(self, tokens: Sequence[int]) -> ResponseText:
        """Decode a response as part of a dialogue."""
        if tokens and tokens[-1] in self.stop_token_ids:
            end_token = str(self._tokenizer.convert_ids_to_tokens(tokens[-1]))
            return ResponseText(self._encoder.decode(tokens[:-1]), end_token)
        return ResponseText(self._encoder.decode(tokens), "")

    def compare(
        self, system: str, observations: Sequence[str], responses: Sequence[Sequence[int]]
    ) -> DialogueComparison:
        """Compare a dialogue with the template over the whole dialogue. There is one more observation than
        responses."""
        texts = [self.response_text(tokens) for tokens in responses]
        return compare(self.template_parts, self._render, system, observations, texts)

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def special_and_added_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[set[str], set[str]]:
    """Special tokens, and all tokens added to the vocabulary. The unknown token and byte tokens count as ordinary,
    because any text may contain them."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    special -= {"", tokenizer.unk_token}
    return {token for token in special if not BYTE_TOKEN.fullmatch(token)}, {token.content for token in added}


class PromptChange(StrEnum):
    """Changes to observations on their way into a prompt; counted under `prompt/<value>`."""

    OBSERVATION_CUT = "observation_cut"
    """The end of an observation beyond `max_observation_tokens` was cut off."""
    START_CUT = "start_cut"
    """The beginning of a first prompt beyond `max_start_tokens` was cut off."""
    WINDOW = "window"
    """Turns before the last `window_size` were left out."""
    CONTROL_AS_TEXT = "control_as_text"
    """The observation spells a control token, which was encoded as plain characters."""
    RESPONSE_CLOSED = "reply_closed"
    """The previous response lacked its end token, which was added."""


class Dialogue:
    """The prompt of one episode: the whole history, or its last `window` observations."""

    def __init__(
        self,
        chat: ChatFormat,
        system: str,
        window: int | None,
        *,
        max_start: int | None = None,
        max_observation: int | None = None,
        response_form: str = "",
    ) -> None:
        """`max_observation` limits the tokens of an observation, whose end is cut off; `max_start` those of the first
        prompt, whose beginning is cut off; `response_form` is what the policy is told after an invalid response."""
        self.response_form = response_form
        self._chat = chat
        self._max_start = max_start
        self._max_observation = max_observation
        self._system = without_surrogates(system)
        self._window = window
        self._first_shown = 0
        self._observations: list[str] = []
        self._images: list[tuple[ImageInput, ...]] = []
        self._responses: list[tuple[int, ...]] = []
        self._prompt: tuple[int, ...] = ()
        self._changes: list[PromptChange] = []

    @classmethod
    def from_config(
        cls, config: RolloutConfig, chat: ChatFormat, system: str, actions: Sequence[str] = (), observation: str = ""
    ) -> Dialogue:
        """Start a dialogue with the limits of the configuration. The system message describes the form of responses as
        `rollout.format_instruction` says; `actions` and `observation` are those at the start of the episode."""
        form, is_told = response_instruction(config, actions, f"{system}\n{observation}"), config.format_instruction
        is_stated = is_told is None and states_form(system, observation)
        is_told = not chat.has_answer_token if is_told is None else is_told
        demands_sections = config.thoughts is not None and config.think
        if demands_sections or (is_told and not is_stated):
            system = "\n".join(filter(None, (system, form)))
        return cls(
            chat,
            system,
            config.window_size,
            max_start=config.max_start_tokens,
            max_observation=config.max_observation_tokens,
            response_form=form if is_told else "",
        )

    @property
    def changes(self) -> tuple[PromptChange, ...]:
        """Changes to the last observation and its prompt."""
        return tuple(self._changes)

    @property
    def new_images(self) -> tuple[ImageInput, ...]:
        """Images of the last observation."""
        return self._images[-1]

    @property
    def images(self) -> tuple[ImageInput, ...]:
        """Distinct images in the prompt."""
        shown = (image for images in self._images[self._first_shown :] for image in images)
        return tuple({image.key: image for image in shown}.values())

    def observe(self, text: str, images: Sequence[np.ndarray] = ()) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Add an observation and return `(prompt, new_tokens, continues)`. The new tokens are the end of the prompt if
        the turn continues the previous sequence, else the whole prompt.

        Raises:
            ValueError: the policy reads no images, or not these.
        """
        self._changes = []
        self._images.append(self._process(images))
        text = without_surrogates(text)
        marked = text if self._chat.images is None else place_images(text, self._images[-1])
        self._observations.append(self._truncate(marked))
        if self._responses and not self._is_closed(self._responses[-1]):
            self._changes.append(PromptChange.RESPONSE_CLOSED)
        self._first_shown = oldest = self._oldest
        if oldest == 0 and self._responses:
            new_tokens = self._next_prompt(self._responses[-1], self._observations[-1])
            self._prompt += self._responses[-1] + new_tokens
            return self._prompt, new_tokens, True
        if oldest:
            self._changes.append(PromptChange.WINDOW)
        self._prompt = self._build_prompt(oldest)
        return self._prompt, self._prompt, False

    def with_problem(self, observation: Observation, problem: str) -> Observation:
        """Return an observation that states the problem of the last response and the expected form, unless there is
        none, or the env states the form itself."""
        if not problem or not self.response_form or states_form(observation.text):
            return observation
        text = f"Your last response was invalid: {problem}. {self.response_form}\n{observation.text}"
        return replace(observation, text=text)

    def add_response(self, tokens: tuple[int, ...]) -> None:
        """Add the policy's response as sampled."""
        self._responses.append(tokens)

    def compare(self) -> DialogueComparison:
        """Compare the prompt with the template over the same messages. If the last message is a response, an empty
        observation is added."""
        ends_with_response = len(self._responses) == len(self._observations)
        oldest = max(0, self._oldest - ends_with_response)
        observations = self._observations[oldest:] + [""] * ends_with_response
        return self._chat.compare(self._system, observations, self._responses[oldest:])

    @property
    def _oldest(self) -> int:
        """Index of the first observation in the prompt."""
        return 0 if self._window is None else max(0, len(self._responses) + 1 - self._window)

    def _build_prompt(self, oldest: int) -> tuple[int, ...]:
        prompt = self._chat.initial_prompt(self._system, self._observations[oldest])
        if self._max_start is not None and len(prompt) > self._max_start:
            self._changes.append(PromptChange.START_CUT)
            prompt = prompt[-self._max_start :]
            # an image is whole or absent
            begin = next((index for index, token in enumerate(prompt) if token >= 0), len(prompt))
            prompt = prompt[begin:]
        for response, observation in zip(self._responses[oldest:], self._observations[oldest + 1 :], strict=True):
            prompt += response + self._next_prompt(response, observation)
        return prompt

    def _next_prompt(self, response: tuple[int, ...], observation: str) -> tuple[int, ...]:
        return self._chat.next_prompt(observation, closed=self._is_closed(response))

    def _is_closed(self, response: tuple[int, ...]) -> bool:
        return response[-1:] == (self._chat.end_token_id,)

    def _process(self, images: Sequence[np.ndarray]) -> tuple[ImageInput, ...]:
        if not images:
            return ()
        if self._chat.images is None:
            raise ValueError("the environment shows images, which the policy cannot read")
        return self._chat.images.process(images)

    def _truncate(self, text: str) -> str:
        if self._chat.contains_control_token(text):
            self._changes.append(PromptChange.CONTROL_AS_TEXT)
        if self._max_observation is None:
            return text
        truncated = self._chat.truncate(text, self._max_observation)
        if len(truncated) < len(text):
            self._changes.append(PromptChange.OBSERVATION_CUT)
        return truncated


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
