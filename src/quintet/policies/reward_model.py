"""Reward models: a classifier whose only output is how good a conversation's last answer is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.config.native.data import RewardConfig, RewardModelConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.causal_lm import load_tokenizer
from quintet.records import Answer, Failure, Question, Verdict
from quintet.rewards.appraisal import overlong_penalty
from quintet.rewards.form import has_form

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["RewardModel", "RewardModelJudge", "import_libraries"]

KEY = "reward.model.path"
PASS_TOKENS = 16384
"""Tokens of one forward pass, padding included, where `sequences_per_pass` isn't given."""
AT_LEAST = 64
"""Answers that wait until they are judged together, while others are still being written."""


@dataclass(frozen=True, slots=True)
class _Wording:
    """How a question and an answer become the model's tokens.

    `foreign` is the end token, as text, of a policy whose tokenizer isn't the model's own: then question and answer
    are one conversation under the model's chat template. Else the model sees what the policy saw and wrote: the
    prompt, the answer and the end token.
    """

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int
    foreign: str | None = None

    def encode(self, question: Question, answer: str) -> list[int]:
        """Token ids; what is over `max_tokens` is cut off the end."""
        messages: list[Mapping[str, Any]] = [*question.messages]
        if self.foreign is None:
            text = self._render(messages, prompt=True) + answer + (self.tokenizer.eos_token or "")
        else:
            own = answer.replace(self.foreign, "") if self.foreign else answer
            text = self._render([*messages, {"role": "assistant", "content": own}], prompt=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))[: self.max_tokens]

    def _render(self, messages: list[Mapping[str, Any]], *, prompt: bool) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


class RewardModel:
    """Scores answers with a transformers classifier of one output.

    A sequence classifier gives its score itself; of a token classifier, as verl uses them, the score at the last
    token counts. Answers of like length share a forward pass, padded on the right.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        wording: _Wording,
        *,
        sequences_per_pass: int | None = None,
        offload: bool = False,
        device: str = "cpu",
    ) -> None:
        """`offload` has the weights lie on the CPU but for the time of scoring."""
        self._model = model.eval().requires_grad_(False)
        self._wording = wording
        self._per_pass = sequences_per_pass
        self._offload = offload and device != "cpu"
        self._device = device
        self._padding: int | None = model.config.get_text_config().pad_token_id
        self._token_level = type(model).__name__.endswith("ForTokenClassification")
        if not self._offload:
            self._model.to(device)

    @classmethod
    def load(cls, config: RewardModelConfig, policy: Path, longest: int) -> RewardModel:
        """The model that a configuration names, on the GPU where there is one. `policy` is the policy's directory,
        `longest` what its prompt and reply may hold, in tokens.

        Raises:
            ConfigError: the directory holds no reward model, or a library of it can't be imported.
            MachineError: it can't be read.
        """
        import_libraries(config.external_libs, "reward.model.external_libs")
        directory = Path(config.path).expanduser() if config.path else policy
        model = _load_classifier(directory, trust_remote_code=config.trust_remote_code)
        tokenizer = load_tokenizer(directory, trust_remote_code=config.trust_remote_code)
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{KEY} = {str(directory)!r}: its tokenizer has no chat template",
                key=KEY,
                value=str(directory),
                hint="put the template that it was trained with into chat_template.jinja there",
            )
        foreign = None
        if config.tokenizer is not None:
            # its vocabulary alone is read: no code of that directory runs
            foreign = load_tokenizer(Path(config.tokenizer).expanduser()).eos_token or ""
        return cls(
            model,
            _Wording(tokenizer, config.max_tokens or longest, foreign),
            sequences_per_pass=config.sequences_per_pass,
            offload=config.offload_parameters,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )

    @property
    def offloads(self) -> bool:
        """Each call of `score` moves the weights to the device and back."""
        return self._offload

    def score(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        """How good each answer to its question is, in the model's own unit, as it comes: it may be no number."""
        rows = [self._wording.encode(question, text) for question, text in zip(questions, answers, strict=True)]
        scores = [math.nan] * len(rows)
        with self._placed():
            for numbers in self._passes(rows):
                found = self._forward([rows[number] for number in numbers]).tolist()
                for number, score in zip(numbers, found, strict=True):
                    scores[number] = score
        return scores

    def _passes(self, rows: Sequence[list[int]]) -> Iterator[list[int]]:
        """Numbers of the rows of each pass, longest first, so that little is padded."""
        order = sorted((number for number, row in enumerate(rows) if row), key=lambda n: -len(rows[n]))
        while order:
            size = self._per_pass or max(1, PASS_TOKENS // len(rows[order[0]]))
            yield order[:size]
            order = order[size:]

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]]) -> Tensor:
        """Scores of token sequences, float32 [rows]."""
        padding = self._padding_for(rows)
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [padding] * (longest - len(row)) for row in rows], device=self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        mask = (torch.arange(longest, device=self._device) < lengths[:, None]).long()
        logits: Tensor = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        if self._token_level:
            logits = logits[torch.arange(len(rows), device=self._device), lengths - 1]
        return logits.float().squeeze(-1)

    def _padding_for(self, rows: Sequence[list[int]]) -> int:
        """The model's own padding token. One that has none reads its score at the last token that isn't padding:
        any will do that ends no row here."""
        if self._padding is not None:
            return self._padding
        last = {row[-1] for row in rows}
        padding = next(token for token in range(len(last) + 1) if token not in last)
        self._model.config.get_text_config().pad_token_id = padding
        return padding

    @contextmanager
    def _placed(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        self._model.to(self._device)
        try:
            yield
        finally:
            self._model.to("cpu")
            torch.cuda.empty_cache()


def import_libraries(names: Sequence[str], key: str) -> None:
    """Import what registers models or rules.

    Raises:
        ConfigError: one of them can't be imported.
    """
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"{key} = {name!r} can't be imported: {error}",
                key=key,
                value=name,
                hint="install it, or put its directory into PYTHONPATH",
            ) from error


def _load_classifier(directory: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """The classifier in that directory, float32, or bfloat16 where a GPU runs it, as in verl."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    if not (directory / "config.json").is_file():
        raise MachineError(f"no model at {directory}", f"{KEY} names a directory with config.json and weights")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise MachineError(f"can't load a reward model from {directory}: {error}", "give a classifier") from error
    names = tuple(getattr(config, "architectures", None) or ())
    kind = AutoModelForTokenClassification if _is_token_level(names) else AutoModelForSequenceClassification
    _one_output(directory, config, names)
    try:
        model, loading = kind.from_pretrained(
            directory,
            config=config,
            dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise MachineError(f"can't load a reward model from {directory}: {error}", "give a classifier") from error
    if missing := sorted(loading["missing_keys"]):
        raise _no_reward_model(directory, f"its weights lack {', '.join(missing[:3])}")
    loaded: PreTrainedModel = model
    return loaded


def _is_token_level(architectures: tuple[str, ...]) -> bool:
    return any(name.endswith("ForTokenClassification") for name in architectures)


def _one_output(directory: Path, config: PreTrainedConfig, architectures: tuple[str, ...]) -> None:
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise _no_reward_model(directory, f"it is a language model, {architectures[0]}")
    if config.num_labels != 1:
        raise _no_reward_model(directory, f"it has {config.num_labels} outputs")


def _no_reward_model(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{KEY}: {directory} is no reward model: {why}",
        key=KEY,
        value=str(directory),
        hint="give a sequence or token classifier with one output (num_labels 1)",
    )


class RewardModelJudge:
    """Judges answers by a reward model: score times `reward.scale`, and what form and length are worth on top. Its own
    score is told as `model_score`.

    An answer whose score is no number, or whose pass raises, keeps the cause and gets the reward of a wrong one.
    """

    def __init__(self, model: RewardModel, config: RewardConfig, longest_reply: int) -> None:
        """`longest_reply` counts tokens."""
        self._model = model
        self._config = config
        self._longest = longest_reply
        self._waiting: list[Answer] = []

    def submit(self, answer: Answer) -> None:
        """Take an answer."""
        self._waiting.append(answer)

    def ready(self) -> list[Verdict]:
        """Verdicts, once enough answers wait for a pass to pay; none where the weights would have to move."""
        return [] if self._model.offloads or len(self._waiting) < AT_LEAST else self.drain()

    def drain(self) -> list[Verdict]:
        """Verdicts on all answers that wait."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        scores = self._scores(waiting)
        if isinstance(scores, Failure) and len(waiting) > 1:
            # the others needn't suffer from the one that it is about
            return [self._verdict(answer, _first(self._scores([answer]))) for answer in waiting]
        found = [_first(scores)] if isinstance(scores, Failure) else scores
        return [self._verdict(answer, score) for answer, score in zip(waiting, found, strict=True)]

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _scores(self, answers: Sequence[Answer]) -> list[float] | Failure:
        try:
            return self._model.score([answer.question for answer in answers], [answer.text for answer in answers])
        except Exception as error:  # noqa: BLE001 - whatever a model raises is kept as data
            return Failure("reward", type(error).__name__, str(error))

    def _verdict(self, answer: Answer, score: float | Failure) -> Verdict:
        if not isinstance(score, Failure) and not math.isfinite(score):
            score = Failure("reward", "NotFinite", f"the reward model gave {score}")
        additions = self._additions(answer)
        worth = self._config.format_reward * additions.get("format", 0.0) + additions.get("overlong", 0.0)
        if isinstance(score, Failure):
            return Verdict(answer.id, self._config.worst * self._config.scale + worth, additions, failure=score)
        return Verdict(answer.id, score * self._config.scale + worth, {"model_score": score, **additions})

    def _additions(self, answer: Answer) -> dict[str, float]:
        """`format`: 1 where the answer has the form; `overlong`: what its length costs, at most 0."""
        config, found = self._config, {}
        if config.format is not None:
            found["format"] = float(has_form(config.format, answer.text))
        if config.overlong is not None:
            found["overlong"] = overlong_penalty(answer.tokens, self._longest, config.overlong)
        return found


def _first(scores: list[float] | Failure) -> float | Failure:
    return scores if isinstance(scores, Failure) else scores[0]
