"""The reward managers of verl, each a `RewardScorer`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from quintet.records import Failure, PromptRow, Response, RewardResult
from quintet.rewards.data_sources import Route, route
from quintet.rewards.dispatcher import VerifierResult
from quintet.rewards.ground_truths import raise_data_error
from quintet.rewards.reward_computation import RewardComputation
from quintet.rewards.verifier_pool import VerifierPool
from quintet.rewards.verifier_process import ProcessKind, VerifierJob

END_MARKS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<|end_of_text|>",
)
"""End-of-sequence tokens as text, which `dapo` strips."""
SAMPLED_TEXT_ONLY = frozenset({"math_rule", "code_sandbox", "crossthinkqa", "multiple_choice_boxed", "ifeval_roll"})
"""Verifiers that read a response without a thought that its prompt has opened, as ROLL's classes do."""
FUNCTION_PROCESS = ProcessKind(confined=False)
_NO_REPLY = Failure("reward", "RuntimeError", "a process returned nothing")


class RewardScorer(Protocol):
    """Scores responses: verifiers, a user's function, a reward model, or an LLM judge."""

    def submit(self, response: Response) -> None:
        """Queue a response.

        Raises:
            ConfigError: there is no verifier for its source.
        """

    def ready(self) -> list[RewardResult]:
        """Return the results since the last call, without waiting.

        Raises:
            ConfigError: a verifier cannot compare with the ground truth of a row.
        """

    def drain(self) -> list[RewardResult]:
        """Wait for all responses and return the results that were not returned yet.

        Raises:
            ConfigError: a verifier cannot compare with the ground truth of a row.
        """

    def close(self) -> None:
        """End all processes and threads."""


def strip_end_marks(text: str) -> str:
    """Return a text without end-of-sequence tokens at its end."""
    text = text.rstrip()
    while mark := next((mark for mark in END_MARKS if text.endswith(mark)), None):
        text = text.removesuffix(mark).rstrip()
    return text


def _function_arguments(source: str, text: str, prompt_row: PromptRow) -> dict[str, Any]:
    """Return the arguments of a user's function, by verl's names."""
    return {
        "data_source": source,
        "solution_str": text,
        "ground_truth": prompt_row.ground_truth,
        "extra_info": dict(prompt_row.extra),
    }


class PooledRewardScorer:
    """Scores one response per call: `naive` and `gdpo` with one process, `prime` with many, `dapo` without end marks,
    `rate_limited` with pauses, `remote` over HTTP."""

    def __init__(self, pool: VerifierPool, terms: RewardComputation, *, strip_end_marks: bool = False) -> None:
        self._pool, self._terms, self._strips = pool, terms, strip_end_marks
        self._config = terms.config
        self._routes: dict[str, Route] = {}
        self._pending: dict[int, Response] = {}
        self._numbers = itertools.count()

    def submit(self, response: Response) -> None:
        if self._strips:
            response = replace(response, text=strip_end_marks(response.text))
        process_kind, message = self._message(response)
        number = next(self._numbers)
        self._pending[number] = response
        self._pool.submit(VerifierJob(number, process_kind, message, self._config.timeout_seconds))

    def ready(self) -> list[RewardResult]:
        return [self._reward(result) for result in self._pool.ready()]

    def drain(self) -> list[RewardResult]:
        return [self._reward(result) for result in self._pool.drain()]

    def close(self) -> None:
        self._pool.close()

    def _message(self, response: Response) -> tuple[ProcessKind, Mapping[str, Any]]:
        text, prompt_row = response.text, response.prompt_row
        if self._config.function is not None:
            return FUNCTION_PROCESS, {"arguments": _function_arguments(prompt_row.data_source, text, prompt_row)}
        if prompt_row.data_source not in self._routes:
            self._routes[prompt_row.data_source] = route(prompt_row.data_source, self._config)
        chosen = self._routes[prompt_row.data_source]
        extra = {**prompt_row.extra, **chosen.extra}
        if chosen.verifier not in SAMPLED_TEXT_ONLY:
            text = response.whole_text
        message = {"verifier": chosen.verifier, "text": text, "ground_truth": prompt_row.ground_truth, "extra": extra}
        options = dict(chosen.options)
        if chosen.verifier == "math_rule" and response.response_prefix:
            options["thinking_started"] = True
        return chosen.process_kind, message | {"options": options}

    def _reward(self, result: VerifierResult) -> RewardResult:
        response = self._pending.pop(result.key)
        if result.failure is not None and (chosen := self._routes.get(response.prompt_row.data_source)) is not None:
            raise_data_error(response.prompt_row, chosen, result.failure)
        return self._terms.reward(response, result.failure or result.reply or _NO_REPLY)


class BatchRewardScorer:
    """Scores all responses in one call of a user's function, with lists: verl's `batch`.

    Its time limit is the limit of one response times the number of responses. If the call fails, all responses have
    failed.
    """

    def __init__(self, pool: VerifierPool, terms: RewardComputation) -> None:
        self._pool, self._terms = pool, terms
        self._pending: list[Response] = []

    def submit(self, response: Response) -> None:
        self._pending.append(response)

    def ready(self) -> list[RewardResult]:
        """Return nothing: the function is called in `drain`, with all responses."""
        return []

    def drain(self) -> list[RewardResult]:
        responses, self._pending = self._pending, []
        if not responses:
            return []
        seconds = self._terms.config.timeout_seconds * len(responses)
        self._pool.submit(VerifierJob(0, FUNCTION_PROCESS, {"arguments": _batch_arguments(responses)}, seconds))
        (result,) = self._pool.drain()
        outcomes = _outcomes(result, len(responses))
        return [self._terms.reward(response, outcome) for response, outcome in zip(responses, outcomes, strict=True)]

    def close(self) -> None:
        self._pool.close()


def _batch_arguments(responses: Sequence[Response]) -> dict[str, list[Any]]:
    rows = [
        _function_arguments(response.prompt_row.data_source, response.text, response.prompt_row)
        for response in responses
    ]
    return {f"{name}s": [row[name] for row in rows] for name in rows[0]}


def _outcomes(result: VerifierResult, count: int) -> Sequence[Mapping[str, Any] | Failure]:
    if result.reply is None:
        return [result.failure or _NO_REPLY] * count
    outcomes: list[Mapping[str, Any]] = result.reply["many"]
    return outcomes


class DomainScorers:
    """See `RewardScorer`: a scorer for each of some data sources, and one for all others."""

    def __init__(self, others: RewardScorer, by_source: Mapping[str, RewardScorer]) -> None:
        self._others, self._by_source = others, by_source

    @property
    def _scorers(self) -> tuple[RewardScorer, ...]:
        return (self._others, *self._by_source.values())

    def submit(self, response: Response) -> None:
        self._by_source.get(response.prompt_row.data_source, self._others).submit(response)

    def ready(self) -> list[RewardResult]:
        return [result for scorer in self._scorers for result in scorer.ready()]

    def drain(self) -> list[RewardResult]:
        return [result for scorer in self._scorers for result in scorer.drain()]

    def close(self) -> None:
        for scorer in self._scorers:
            scorer.close()
