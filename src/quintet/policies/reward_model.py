"""Reward models: transformers classifiers with one output that scores the last response of a conversation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from quintet.config.native.data import RewardConfig, RewardModelConfig
from quintet.data.chat_template_renderer import TemplateInput, render_chat_templates
from quintet.errors import ConfigError, MachineError, UserError
from quintet.loading_lock import LOADING_LOCK
from quintet.policies.model_loading import load_tokenizer
from quintet.records import Failure, PromptRow, Response, RewardResult
from quintet.rewards.reward_computation import RewardComputation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

KEY = "reward.model.path"
MAX_TOKENS_PER_PASS = 16384
"""Tokens of a forward pass, padding included, if `sequences_per_pass` is not set."""
MIN_BATCH_RESPONSES = 64
"""Minimum number of pending responses to score a batch while others are still being generated."""


class ResponseScorer(Protocol):
    """Interface of a reward model, which may run in another process."""

    @property
    def offloads(self) -> bool:
        """Whether each call of `score` moves the weights to the device and back."""

    def score(self, prompt_rows: Sequence[PromptRow], responses: Sequence[str]) -> list[float]:
        """Return the model's raw scores `[responses]`; they may be NaN."""


@dataclass(frozen=True, slots=True)
class _SequenceEncoder:
    """Encodes a prompt and a response for the reward model.

    `policy_end_token` is set if the policy has another tokenizer: then prompt and response are formatted with the
    reward model's chat template. Otherwise the model gets the policy's prompt, response and end token.
    """

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int
    policy_end_token: str | None = None

    def encode(self, prompt_rows: Sequence[PromptRow], responses: Sequence[str]) -> list[list[int]]:
        """Return token ids of each prompt and response, truncated at the end to `max_tokens`."""
        pairs = list(zip(prompt_rows, responses, strict=True))
        texts = render_chat_templates(self.tokenizer, [self._template_input(*pair) for pair in pairs])
        if self.policy_end_token is None:
            end = self.tokenizer.eos_token or ""
            texts = [f"{text}{response}{end}" for text, response in zip(texts, responses, strict=True)]
        return [list(self.tokenizer.encode(text, add_special_tokens=False))[: self.max_tokens] for text in texts]

    def _template_input(self, prompt_row: PromptRow, response: str) -> TemplateInput:
        if self.policy_end_token is None:
            return prompt_row.messages, True
        content = response.replace(self.policy_end_token, "") if self.policy_end_token else response
        return [*prompt_row.messages, {"role": "assistant", "content": content}], False


class RewardModel:
    """Scores responses with a transformers classifier that has one output.

    A sequence classifier returns the score; for a token classifier, as in verl, it is the score of the last token.
    Responses of similar length share a forward pass, padded on the right.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: _SequenceEncoder,
        *,
        sequences_per_pass: int | None = None,
        offload: bool = False,
        device: str = "cpu",
        num_passes: Callable[[int], int] = int,
    ) -> None:
        """With `offload`, the weights are on the CPU except while scoring. `num_passes` returns how many forward passes
        a call of `score` makes that needs so many; further ones have no responses."""
        self._model = model.eval().requires_grad_(False)
        self._encoder = encoder
        self._sequences_per_pass = sequences_per_pass
        self._offload = offload and device != "cpu"
        self._device = device
        self._pad_token_id: int | None = model.config.get_text_config().pad_token_id
        self._is_token_classifier = type(model).__name__.endswith("ForTokenClassification")
        self._num_passes = num_passes
        if not self._offload:
            self._model.to(device)

    @classmethod
    def load(
        cls,
        config: RewardModelConfig,
        policy_dir: Path,
        max_length: int,
        *,
        shard: Callable[[PreTrainedModel], None] | None = None,
        num_passes: Callable[[int], int] = int,
    ) -> RewardModel:
        """Load the configured model, on a GPU if there is one.

        `policy_dir` is the policy's directory, `max_length` the largest number of tokens of prompt and response.
        `shard` replaces its weights by shards; for `num_passes`, see `__init__`.

        Raises:
            ConfigError: the directory contains no reward model, or one of its libraries cannot be imported.
            MachineError: the model cannot be loaded.
        """
        import_libraries(config.external_libs, "reward.model.external_libs")
        directory = Path(config.path).expanduser() if config.path else policy_dir
        model = _load_classifier(directory, trust_remote_code=config.trust_remote_code)
        tokenizer = load_tokenizer(directory, trust_remote_code=config.trust_remote_code)
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{KEY} = {str(directory)!r}: the tokenizer has no chat template",
                key=KEY,
                value=str(directory),
                hint="add the chat template of its training as chat_template.jinja to the directory",
            )
        policy_end_token = None
        if config.tokenizer is not None:
            # only the vocabulary is read: no code of that directory runs
            policy_end_token = load_tokenizer(Path(config.tokenizer).expanduser()).eos_token or ""
        if shard is not None:
            shard(model)
        return cls(
            model,
            _SequenceEncoder(tokenizer, config.max_tokens or max_length, policy_end_token),
            sequences_per_pass=config.sequences_per_pass,
            offload=config.offload_parameters,
            device="cuda" if torch.cuda.is_available() else "cpu",
            num_passes=num_passes,
        )

    @property
    def offloads(self) -> bool:
        """Whether each call of `score` moves the weights to the device and back."""
        return self._offload

    def score(self, prompt_rows: Sequence[PromptRow], responses: Sequence[str]) -> list[float]:
        """Return the model's raw scores of the responses; they may be NaN."""
        sequences = self._encoder.encode(prompt_rows, responses)
        scores = [math.nan] * len(sequences)
        batches = list(self._batches(sequences))
        num_empty = self._num_passes(len(batches)) - len(batches)
        with self._on_device():
            for indices in batches:
                results = self._forward([sequences[index] for index in indices]).tolist()
                for index, score in zip(indices, results, strict=True):
                    scores[index] = score
            for _ in range(num_empty):
                self._forward([[0]])
        return scores

    def _batches(self, sequences: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield the indices of the sequences of each pass, longest first, to minimize padding."""
        remaining = sorted(
            (index for index, sequence in enumerate(sequences) if sequence), key=lambda n: -len(sequences[n])
        )
        while remaining:
            size = self._sequences_per_pass or max(1, MAX_TOKENS_PER_PASS // len(sequences[remaining[0]]))
            yield remaining[:size]
            remaining = remaining[size:]

    @torch.no_grad()
    def _forward(self, sequences: Sequence[list[int]]) -> Tensor:
        """Return the scores of token sequences, float32 [sequences]."""
        pad_token_id = self._choose_pad_token(sequences)
        max_length = max(map(len, sequences))
        tokens = torch.tensor(
            [sequence + [pad_token_id] * (max_length - len(sequence)) for sequence in sequences], device=self._device
        )
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self._device)
        mask = (torch.arange(max_length, device=self._device) < lengths[:, None]).long()
        logits: Tensor = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        if self._is_token_classifier:
            logits = logits[torch.arange(len(sequences), device=self._device), lengths - 1]
        return logits.float().squeeze(-1)

    def _choose_pad_token(self, sequences: Sequence[list[int]]) -> int:
        """Return the model's padding token, or else a token with which no sequence ends.

        A model without padding token reads its score at the last token that is not padding.
        """
        if self._pad_token_id is not None:
            return self._pad_token_id
        last_tokens = {sequence[-1] for sequence in sequences}
        pad_token_id = next(token for token in range(len(last_tokens) + 1) if token not in last_tokens)
        self._model.config.get_text_config().pad_token_id = pad_token_id
        return pad_token_id

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        self._model.to(self._device)
        try:
            yield
        finally:
            self._model.to("cpu")
            torch.cuda.empty_cache()


def import_libraries(modules: Sequence[str], key: str) -> None:
    """Import modules that register models or reward functions.

    Raises:
        ConfigError: a module cannot be imported.
    """
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"{key} = {name!r} cannot be imported: {error}",
                key=key,
                value=name,
                hint="install it, or add its directory to PYTHONPATH",
            ) from error


def _load_classifier(directory: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load the classifier in `directory` in float32, or in bfloat16 for a GPU, as verl does."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    if not (directory / "config.json").is_file():
        raise MachineError(f"no model at {directory}", f"set {KEY} to a directory with config.json and weights")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        hint = f"set {KEY} to a sequence or token classifier"
        raise MachineError(f"cannot load a reward model from {directory}: {error}", hint) from error
    architectures = tuple(getattr(config, "architectures", None) or ())
    auto_class = (
        AutoModelForTokenClassification if _is_token_level(architectures) else AutoModelForSequenceClassification
    )
    _check_single_output(directory, config, architectures)
    try:
        with LOADING_LOCK:
            model, loading = auto_class.from_pretrained(
                directory,
                config=config,
                dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        hint = f"set {KEY} to a sequence or token classifier"
        raise MachineError(f"cannot load a reward model from {directory}: {error}", hint) from error
    if missing := sorted(loading["missing_keys"]):
        raise _not_a_reward_model(directory, f"missing weights: {', '.join(missing[:3])}")
    classifier: PreTrainedModel = model
    return classifier


def _is_token_level(architectures: tuple[str, ...]) -> bool:
    return any(name.endswith("ForTokenClassification") for name in architectures)


def _check_single_output(directory: Path, config: PreTrainedConfig, architectures: tuple[str, ...]) -> None:
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise _not_a_reward_model(directory, f"it is a language model, {architectures[0]}")
    if config.num_labels != 1:
        raise _not_a_reward_model(directory, f"it has {config.num_labels} outputs")


def _not_a_reward_model(directory: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{KEY} = {directory} is not a reward model: {reason}",
        key=KEY,
        value=str(directory),
        hint="use a sequence or token classifier with one output (num_labels 1)",
    )


class RewardModelScorer:
    """Scores responses by a reward model: score times `reward.scale`, plus format reward and length penalty.

    The raw score is reported as `model_score`. A response whose score is not finite, or whose forward pass raises, gets
    the reward of a wrong response and a recorded failure.
    """

    def __init__(self, model: ResponseScorer, config: RewardConfig, max_response_tokens: int) -> None:
        self._model = model
        self._terms = RewardComputation(config, max_response_tokens)
        self._pending: list[Response] = []

    def submit(self, response: Response) -> None:
        """Queue a response."""
        self._pending.append(response)

    def ready(self) -> list[RewardResult]:
        """Return results if enough responses are pending and the model is not offloaded."""
        return [] if self._model.offloads or len(self._pending) < MIN_BATCH_RESPONSES else self.drain()

    def drain(self) -> list[RewardResult]:
        """Return the results of all pending responses."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        scores = self._score(pending)
        if isinstance(scores, Failure) and len(pending) > 1:
            # score one by one, so that only the response that causes the failure fails
            return [self._result(response, _single_score(self._score([response]))) for response in pending]
        results = [_single_score(scores)] if isinstance(scores, Failure) else scores
        return [self._result(response, score) for response, score in zip(pending, results, strict=True)]

    def close(self) -> None:
        """Discard pending responses."""
        self._pending.clear()

    def _score(self, responses: Sequence[Response]) -> list[float] | Failure:
        try:
            return self._model.score(
                [response.prompt_row for response in responses], [response.text for response in responses]
            )
        except UserError:
            # a template that exceeds its limits would do so for every response
            raise
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything; the failure is recorded
            return Failure("reward", type(error).__name__, str(error))

    def _result(self, response: Response, score: float | Failure) -> RewardResult:
        if not isinstance(score, Failure) and not math.isfinite(score):
            score = Failure("reward", "NotFinite", f"the reward model returned {score}")
        return self._terms.raw_reward(response, score)


def _single_score(scores: list[float] | Failure) -> float | Failure:
    return scores if isinstance(scores, Failure) else scores[0]
