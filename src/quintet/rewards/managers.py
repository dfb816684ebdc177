"""Who calls the rules, and when: the reward managers of verl, each a `Judge`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quintet.records import Answer, Failure, Question, Verdict
from quintet.rewards.appraisal import Appraiser
from quintet.rewards.pool import Job, Lane, Pool, Result
from quintet.rewards.sources import Route, route

__all__ = ["END_MARKS", "BatchJudge", "Judge", "PoolJudge", "without_end_marks"]

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
"""How models end their words; `dapo` takes them off."""
BY_FUNCTION = Lane(seal=False)


class Judge(Protocol):
    """Takes answers, gives verdicts in the order in which they come."""

    def submit(self, answer: Answer) -> None:
        """Have an answer judged; doesn't wait.

        Raises:
            ConfigError: nobody knows by which rules.
        """
        ...

    def ready(self) -> list[Verdict]:
        """What has been judged since; doesn't wait."""
        ...

    def drain(self) -> list[Verdict]:
        """What was submitted and not yet taken, once it is judged."""
        ...

    def close(self) -> None:
        """End what judges."""
        ...


def without_end_marks(text: str) -> str:
    """A text without the marks of its end that stand there as text."""
    text = text.rstrip()
    while mark := next((mark for mark in END_MARKS if text.endswith(mark)), None):
        text = text.removesuffix(mark).rstrip()
    return text


def told(source: str, text: str, question: Question) -> dict[str, Any]:
    """What a user's function is told of an answer."""
    return {
        "data_source": source,
        "solution_str": text,
        "ground_truth": question.truth,
        "extra_info": dict(question.extra),
    }


class PoolJudge:
    """One answer at a time in each process: `naive` and `gdpo` with one process, `prime` with many, `dapo` without
    the marks of the end, `rate_limited` with pauses, `remote` at an address."""

    def __init__(self, pool: Pool, appraiser: Appraiser, *, strip_end_marks: bool = False) -> None:
        self._pool, self._appraiser, self._strip = pool, appraiser, strip_end_marks
        self._config = appraiser.config
        self._routes: dict[str, Route] = {}
        self._asked: dict[int, Answer] = {}
        self._numbers = itertools.count()

    def submit(self, answer: Answer) -> None:
        text = without_end_marks(answer.text) if self._strip else answer.text
        lane, message = self._message(text, answer.question)
        number = next(self._numbers)
        self._asked[number] = answer
        self._pool.submit(Job(number, lane, message, self._config.timeout_seconds))

    def ready(self) -> list[Verdict]:
        return [self._verdict(result) for result in self._pool.ready()]

    def drain(self) -> list[Verdict]:
        return [self._verdict(result) for result in self._pool.drain()]

    def close(self) -> None:
        self._pool.close()

    def _message(self, text: str, question: Question) -> tuple[Lane, Mapping[str, Any]]:
        if self._config.function is not None:
            return BY_FUNCTION, {"told": told(question.source, text, question)}
        if question.source not in self._routes:
            self._routes[question.source] = route(question.source, self._config.kind)
        found = self._routes[question.source]
        extra = {**question.extra, **found.extra}
        return found.lane, {"verifier": found.verifier, "text": text, "truth": question.truth, "extra": extra}

    def _verdict(self, result: Result) -> Verdict:
        outcome = result.failure or result.reply
        return self._appraiser.verdict(self._asked.pop(result.key), _present(outcome))


def _present(outcome: Mapping[str, Any] | Failure | None) -> Mapping[str, Any] | Failure:
    return Failure("reward", "RuntimeError", "a process gave nothing") if outcome is None else outcome


class BatchJudge:
    """A user's function that is called once for all answers, with lists: verl's `batch`.

    The call has the time of one answer for each of them; where it fails, all have failed.
    """

    def __init__(self, pool: Pool, appraiser: Appraiser) -> None:
        self._pool, self._appraiser = pool, appraiser
        self._waiting: list[Answer] = []

    def submit(self, answer: Answer) -> None:
        self._waiting.append(answer)

    def ready(self) -> list[Verdict]:
        """Nothing before `drain`: the function wants all answers."""
        return []

    def drain(self) -> list[Verdict]:
        answers, self._waiting = self._waiting, []
        if not answers:
            return []
        seconds = self._appraiser.config.timeout_seconds * len(answers)
        self._pool.submit(Job(0, BY_FUNCTION, {"told": _all_told(answers)}, seconds))
        (result,) = self._pool.drain()
        outcomes = _each(result, len(answers))
        return [self._appraiser.verdict(answer, outcome) for answer, outcome in zip(answers, outcomes, strict=True)]

    def close(self) -> None:
        self._pool.close()


def _all_told(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    each = [told(answer.question.source, answer.text, answer.question) for answer in answers]
    return {f"{name}s": [one[name] for one in each] for name in each[0]}


def _each(result: Result, count: int) -> Sequence[Mapping[str, Any] | Failure]:
    if result.reply is None:
        return [result.failure or Failure("reward", "RuntimeError", "a process gave nothing")] * count
    outcomes: list[Mapping[str, Any]] = result.reply["many"]
    return outcomes
