"""Any endpoint with OpenAI's chat completions API as a policy for evaluation.

Such an endpoint takes messages and returns text, without token ids and log-probs. `EndpointEngine` adapts it to the
`Engine` protocol: its tokens are the bytes of the text, with marker tokens around messages. Envs, response formats,
reward functions and results are the same as for other policies; token counts and log-probs are meaningless.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quintet.data.chat_templates import MARKED, MARKER_END, MARKER_START
from quintet.envs.service.png import encode_png, png_data_url
from quintet.errors import ConfigError
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.policies.vision.image_tokens import KEY_BITS, decode_image_tokens
from quintet.records import (
    Failure,
    FinishReason,
    Generation,
    ImageInput,
    Request,
    Trajectory,
    with_opened_thought,
)
from quintet.rewards.chat_endpoint import ChatEndpoint, EndpointError, with_retries
from quintet.rewards.request_threads import RequestThreads
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.engines.weight_source import WeightSource
from quintet.sampling import StructuredOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNLIMITED = 2**31 - 1
"""The endpoint's limits are unknown."""
STEP_SECONDS = 0.05
"""Maximum time that a step waits for responses."""
STOP_REASONS: Mapping[str | None, FinishReason] = {
    None: FinishReason.STOP,
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
}
"""Stop reasons by the endpoint's `finish_reason`; any other one, such as `content_filter`, is a failure."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Address of an endpoint, and how requests are sent to it."""

    url: str
    """Base URL, such as `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model in requests."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the API key; it may be unset."""
    max_concurrent: int = 16
    """Maximum number of concurrent requests."""
    retries: int = 2
    """Further attempts after a failed request."""
    timeout_seconds: float = 300.0
    """Timeout of one response."""

    def check(self) -> None:
        """
        Raises:
            ConfigError: `url` is not an http(s) URL.
        """
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(
                f"--endpoint {self.url}: not an http(s) URL",
                key="--endpoint",
                value=self.url,
                hint="use http://…/v1 or https://…/v1",
            )


def message_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes, with marker tokens around messages."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(marker, normalized=False, special=True) for marker in (MARKER_START, MARKER_END)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MARKER_END,
        pad_token=MARKER_END,
        additional_special_tokens=[MARKER_START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = MARKED
    return fast


class _PngProcessor(ImageProcessor):
    """Encodes images as PNG files, since the patches of the endpoint's model are unknown."""

    def _process(self, image: np.ndarray) -> ImageInput:
        """Return the file as a single image token."""
        file = encode_png(image)
        digest = blake2b(file, digest_size=8).digest()
        return ImageInput(int.from_bytes(digest) >> (64 - KEY_BITS), (1, 1), file)


class EndpointImages(ImagePrompts):
    """Images of prompts for an endpoint: a token for each, without tokens around it."""

    @classmethod
    def build(cls) -> Self:
        """Return the converter of RGB images to PNG files."""
        return cls(_PngProcessor(), 0, 0)

    def tokens(self, marker: str) -> tuple[int, ...]:
        return super().tokens(marker)[1:-1]


def without_tokens(trajectory: Trajectory) -> Trajectory:
    """Return an episode for storage, without the bytes that stood for tokens and the files that stood for patches."""
    turns = tuple(replace(turn, prompt=(), tokens=(), logprobs=(), image_inputs=()) for turn in trajectory.turns)
    return replace(trajectory, turns=turns)


class EndpointEngine:
    """An `Engine` for evaluation that sends concurrent requests to an endpoint.

    A request that fails after all retries finishes as `FinishReason.FAILED` with its cause.
    """

    weight_version = 0
    max_model_len = UNLIMITED

    def __init__(self, settings: EndpointSettings, tokenizer: PreTrainedTokenizerFast) -> None:
        """`tokenizer` is a `message_tokenizer`."""
        self._settings = settings
        self._endpoint = ChatEndpoint.at(settings.url, settings.key_variable, settings.timeout_seconds)
        self._tokenizer = tokenizer
        self._start = int(tokenizer.convert_tokens_to_ids(MARKER_START))
        self._end = int(tokenizer.convert_tokens_to_ids(MARKER_END))
        self._attempt_ids = itertools.count()
        self._unfinished: dict[int, int] = {}
        self._closed = threading.Event()
        self._threads = RequestThreads(self._answer, settings.max_concurrent, "endpoint", self._closed)
        self._lock = threading.Lock()
        """Held while `_counts` are changed or read."""
        self._length_field = "max_tokens"
        self._counts: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        return bool(self._unfinished)

    @property
    def counts(self) -> dict[str, int]:
        """Number of requests, failed requests, and prompt and completion tokens as reported by the endpoint."""
        with self._lock:
            return {name: self._counts[name] for name in ("requests", "failed", "prompt_tokens", "completion_tokens")}

    def add_request(self, request: Request) -> None:
        serial = self._unfinished[request.id] = next(self._attempt_ids)
        self._threads.submit((serial, request))

    def step(self) -> list[Generation]:
        """See `Engine.step`; waits up to `STEP_SECONDS` for the first response."""
        done: list[Generation] = []
        deadline = time.monotonic() + STEP_SECONDS
        while self._unfinished and not done:
            answers = self._threads.wait(max(0.0, deadline - time.monotonic()))
            if not answers:
                break
            for serial, generation in answers:
                if self._unfinished.get(generation.id) == serial:
                    del self._unfinished[generation.id]
                    done.append(generation)
        return done

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`; responses to requests in flight are discarded."""
        aborted = [number for number in ids if self._unfinished.pop(number, None) is not None]
        return [Generation(number, (), (), FinishReason.ABORT, 0) for number in aborted]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """
        Raises:
            ConfigError: always.
        """
        raise ConfigError("the model of an endpoint cannot be trained", key="--endpoint")

    def reset_prefix_cache(self) -> None:
        """Do nothing: the endpoint manages its cache."""

    def sleep(self) -> None:
        """Do nothing: no memory is allocated here."""

    def wake_up(self) -> None:
        """Do nothing: no memory is allocated here."""

    def close(self) -> None:
        """See `Engine.close`; responses to requests in flight are discarded."""
        self._unfinished.clear()
        self._threads.close()

    def _answer(self, attempt: tuple[int, Request]) -> tuple[int, Generation]:
        """Return the attempt's number and the completion of its request, which is not sent if it was aborted before."""
        serial, request = attempt
        if self._unfinished.get(request.id) != serial:
            return serial, Generation(request.id, (), (), FinishReason.ABORT, 0)
        return serial, self._complete(request)

    def _complete(self, request: Request) -> Generation:
        """The completion of a request, or its failure."""
        try:
            generation = with_retries(lambda: self._ask(request), self._settings.retries, self._closed)
        except EndpointError as error:
            return self._failed(request, error.error_type, str(error))
        except Exception as error:  # noqa: BLE001 - an unexpected error must fail only its own request
            return self._failed(request, type(error).__name__, str(error))
        self._count(requests=1)
        return generation

    def _failed(self, request: Request, kind: str, message: str) -> Generation:
        self._count(requests=1, failed=1)
        return Generation(request.id, (), (), FinishReason.FAILED, 0, failure=Failure("engine", kind, message))

    def _ask(self, request: Request) -> Generation:
        """Send the request once."""
        body = self._body(request)
        try:
            reply = self._endpoint.complete(body)
        except EndpointError as error:
            # newer OpenAI models accept the limit only under another name
            if error.error_type != "Http400" or "max_completion_tokens" not in str(error) or "max_tokens" not in body:
                raise
            self._length_field = "max_completion_tokens"
            reply = self._endpoint.complete(self._body(request))
        usage = reply.usage
        self._count(**{name: usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")})
        return self._generation(request, reply.choice)

    def _body(self, request: Request) -> dict[str, Any]:
        """The request body. Parameters with default values are left out, because not every endpoint supports them."""
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": self._messages(request),
            self._length_field: request.max_tokens,
            "temperature": request.temperature,
        }
        if request.temperature > 0:
            body["seed"] = request.seed
        parameters = {
            "top_p": (request.top_p, 1.0),
            "top_k": (request.top_k, 0),
            "min_p": (request.min_p, 0.0),
            "repetition_penalty": (request.repetition_penalty, 1.0),
            "min_tokens": (request.min_tokens, 0),
            "stop": (list(request.stop_strings), []),
            "ignore_eos": (not request.stop_token_ids, False),
        }
        body |= {name: value for name, (value, default) in parameters.items() if value != default}
        return body | _response_format(request.structured_output)

    def _messages(self, request: Request) -> list[dict[str, Any]]:
        """The messages of a prompt, without the generation prompt at its end."""
        urls = {image.key: png_data_url(image.patches) for image in request.images}
        messages: list[dict[str, Any]] = []
        tokens: list[int] = []
        for token in request.prompt:
            if token == self._start:
                tokens = []
            elif token == self._end:
                messages.append(self._message(tokens, urls))
            else:
                tokens.append(token)
        return messages

    def _message(self, tokens: Sequence[int], urls: Mapping[int, str]) -> dict[str, Any]:
        """The message of tokens that start with its role; `urls` are those of images by their keys."""
        parts: list[dict[str, Any]] = []
        for is_image, part in itertools.groupby(tokens, lambda token: token < 0):
            if not is_image:
                parts.append({"type": "text", "text": self._text(list(part))})
                continue
            keys = decode_image_tokens(np.array(list(part), np.int64)).keys.tolist()
            parts += [{"type": "image_url", "image_url": {"url": urls[key]}} for key in keys]
        role, _, parts[0]["text"] = parts[0]["text"].partition("\n")
        if len(parts) == 1:
            return {"role": role, "content": parts[0]["text"]}
        return {"role": role, "content": [part for part in parts if part.get("text") != ""]}

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _generation(self, request: Request, choice: Mapping[str, Any]) -> Generation:
        """
        Raises:
            EndpointError: the response is malformed.
        """
        content = choice["message"]["content"]
        stop = STOP_REASONS.get(choice.get("finish_reason"))
        if stop is None or not isinstance(content, str | None):
            message = f"finish_reason {choice.get('finish_reason')!r}, content {content!r:.80}"
            raise EndpointError("BadReply", message, retryable=False)
        text = with_opened_thought(content or "").translate({ord(MARKER_START): "\ufffd", ord(MARKER_END): "\ufffd"})
        tokens = list(self._tokenizer.encode(text, add_special_tokens=False))
        tokens += [self._end] if stop is FinishReason.STOP else []
        return Generation(request.id, tuple(tokens), (0.0,) * len(tokens), stop, 0)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def _response_format(output: StructuredOutput | None) -> dict[str, Any]:
    """Fields of a structured output: OpenAI's, or vLLM's where OpenAI has none."""
    if output is None:
        return {}
    if output.kind in ("regex", "choice"):
        return {"structured_outputs": {output.kind: output.spec if output.kind == "regex" else json.loads(output.spec)}}
    schema = {"name": "response", "schema": json.loads(output.spec or "{}"), "strict": True}
    return {"response_format": {"type": output.kind} | ({"json_schema": schema} if output.spec else {})}
