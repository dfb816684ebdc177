"""Prompts and one answer each, judged while the others are still being written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quintet.config.native import RolloutConfig
from quintet.errors import MachineError
from quintet.records import Answer, Generation, Outcome, Question, Request, StopReason, Trajectory, Turn, Verdict
from quintet.rollout.agent_loop import Game, Sampling
from quintet.rollout.engine import Engine

if TYPE_CHECKING:
    from quintet.rewards.judges import Judge

__all__ = ["PromptLoop", "Prompts", "answered", "shown"]


class Prompts(Protocol):
    """Questions by number, and each as the policy sees it."""

    def __getitem__(self, number: int) -> Question: ...

    def prompt(self, number: int) -> tuple[int, ...]:
        """Token ids, cut as the configuration wants it."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question that waits for its answer or for the verdict on it."""

    game: Game
    question: Question
    prompt: tuple[int, ...]
    generation: Generation | None = None
    text: str = ""


class PromptLoop:
    """Has questions answered by one engine and the answers judged. `Game.seed` is a question's number."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        prompts: Prompts,
        judge: Judge,
        config: RolloutConfig,
        *,
        ends: tuple[int, ...],
        max_failed_share: float,
    ) -> None:
        """`ends` are the tokens that end an answer."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._judge = judge
        self._config = config
        self._max_failed_share = max_failed_share
        self._ends = ends

    def play(self, games: Sequence[Game], sampling: Sampling) -> Iterator[Trajectory]:
        """Answer every question; trajectories come as verdicts do, in no particular order.

        An answer whose judgement fails counts as wrong and keeps the cause.

        Raises:
            MachineError: more than `max_failed_share` of the judgements failed.
        """
        self._engine.forget()
        asked: dict[int, _Asked] = {}
        failures: list[Verdict] = []
        for number, game in enumerate(games):
            asked[number] = _Asked(game, self._prompts[game.seed], self._prompts.prompt(game.seed))
            self._engine.submit(self._request(number, asked[number], sampling))
        for verdict in self._verdicts(asked):
            if verdict.failure is not None:
                failures.append(verdict)
            yield _trajectory(asked.pop(verdict.id), verdict)
        if len(failures) > self._max_failed_share * len(games):
            raise _too_many(failures, len(games), self._max_failed_share)

    def close(self) -> None:
        """Let go of the judge's processes."""
        self._judge.close()

    def _request(self, number: int, asked: _Asked, sampling: Sampling) -> Request:
        return Request(
            id=number,
            prompt=asked.prompt,
            max_tokens=self._config.max_response_tokens,
            seed=asked.game.draws(sampling, 0),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_ids=self._ends,
        )

    def _verdicts(self, asked: dict[int, _Asked]) -> Iterator[Verdict]:
        """Judge answers as they end."""
        while self._engine.busy:
            for generation in self._engine.step():
                text = answered(self._tokenizer, generation.tokens, self._ends)
                known = asked[generation.id]
                asked[generation.id] = _Asked(known.game, known.question, known.prompt, generation, text)
                self._judge.submit(Answer(generation.id, known.question, text, len(generation.tokens)))
            yield from self._judge.ready()
        yield from self._judge.drain()


def answered(tokenizer: Any, tokens: Sequence[int], ends: Sequence[int]) -> str:
    """The words of an answer, its end token left out."""
    own = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    return str(tokenizer.decode(list(own), skip_special_tokens=False))


def _trajectory(asked: _Asked, verdict: Verdict) -> Trajectory:
    generation = asked.generation
    if generation is None:
        raise ValueError(f"a verdict on question {asked.question.id}, which nobody answered")
    ended = generation.stop is StopReason.STOP
    turn = Turn(
        observation=shown(asked.question.messages),
        prompt=asked.prompt,
        continues=False,
        tokens=generation.tokens,
        logprobs=generation.logprobs,
        weight_version=generation.weight_version,
        text=asked.text,
        actions=() if verdict.predicted is None else (verdict.predicted,),
        valid_format=ended and verdict.parts.get("format", 1.0) > 0,
        reward=verdict.score,
        stop=generation.stop,
    )
    right = verdict.failure is None and verdict.parts.get("acc", verdict.score) >= 1.0
    return Trajectory(
        world=asked.question.source or "prompts",
        seed=asked.game.seed,
        group=asked.game.group,
        sample=asked.game.sample,
        turns=(turn,),
        outcome=Outcome.SUCCESS if right else Outcome.TERMINATED if ended else Outcome.TRUNCATED,
        failure=verdict.failure,
        parts=verdict.parts,
        predicted=verdict.predicted,
    )


def shown(messages: Iterable[Any]) -> str:
    """A conversation as text, for people."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _too_many(failures: Sequence[Verdict], answers: int, limit: float) -> MachineError:
    first = failures[0].failure
    told = f"{first.kind}: {first.message}" if first else "unknown"
    return MachineError(
        f"{len(failures)} of {answers} answers couldn't be judged (first: {told})",
        f"mend the reward function, or raise reward.max_failed_share (now {limit:g})",
    )
