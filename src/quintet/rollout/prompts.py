"""Prompts and one answer each, judged while the others are still being written."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from quintet.config.native import RolloutConfig
from quintet.errors import MachineError
from quintet.records import Answer, Failure, Generation, Outcome, Question, StopReason, Trajectory, Turn, Verdict
from quintet.rollout.agent_loop import EMPTY, LOST, UNEXPLAINED, Game, Sampling
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


@dataclass(slots=True)
class _Asked:
    """A question that waits for its answer or for the verdict on it."""

    game: Game
    question: Question
    prompt: tuple[int, ...]
    ends: tuple[int, ...]
    """Tokens that end its answer."""
    generation: Generation | None = None
    text: str = ""


class PromptLoop:
    """Has questions answered by one engine and the answers judged. `Game.seed` is a question's number.

    `play` answers a round from start to end. `begin` and `advance` answer the same questions in pieces, so that they
    may be kept running over an update of the weights.
    """

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
        """`ends` are the tokens that end an answer, unless a round's sampling names others."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._judge = judge
        self._config = config
        self._ends = ends
        self._numbers = count()
        self._asked: dict[int, _Asked] = {}
        self._ended: list[tuple[int, Trajectory]] = []
        self._toll = _Toll(max_failed_share)
        self._engine_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Questions wait for an answer or for its verdict, or have both and weren't taken yet."""
        return bool(self._asked or self._ended)

    def play(self, games: Sequence[Game], sampling: Sampling) -> Iterator[Trajectory]:
        """Answer every question; trajectories come as verdicts do, in no particular order. Others that are being
        answered go on beside them; where none are, what the engine knows from earlier rounds is forgotten first, so
        that a round's numbers are its own, to the last bit.

        An answer whose judgement fails counts as wrong and keeps the cause.

        Raises:
            MachineError: more than `max_failed_share` of the answers couldn't be judged, or written.
        """
        own = self._begin(games, sampling)
        try:
            while own:
                self._advance()
                ended, self._ended = self._ended, []
                self._ended = [one for one in ended if one[0] not in own]
                for number, trajectory in ended:
                    if number in own:
                        own.remove(number)
                        yield trajectory
                self._toll.check()
        finally:
            # whoever asked may have gone, or a fault ends the run
            self._abort(own)

    def begin(self, games: Sequence[Game], sampling: Sampling) -> None:
        """Ask questions beside those that are being answered; `advance` carries them on."""
        self._begin(games, sampling)

    def advance(self) -> list[Trajectory]:
        """Let the engine go on by a step; the games that ended. Where all answers are written, waits for verdicts.

        Raises:
            MachineError: see `play`.
            EngineFault: the engine died, and nothing watches over it.
        """
        self._advance()
        self._toll.check()
        ended, self._ended = self._ended, []
        return [trajectory for _, trajectory in ended]

    def abort(self, groups: Collection[int]) -> list[Trajectory]:
        """Give up the questions of groups, as far as they were answered: `Outcome.ABORTED`, without a reward. Those
        that were judged and weren't taken yet are handed out beside them."""
        through = [game for _, game in self._ended if game.group in groups]
        self._ended = [one for one in self._ended if one[1].group not in groups]
        return through + self._abort({number for number, asked in self._asked.items() if asked.game.group in groups})

    def measures(self) -> dict[str, float]:
        """Metrics since this was asked last: seconds in the engine."""
        spent, self._engine_seconds = self._engine_seconds, 0.0
        return {"timing_s/engine": spent}

    def close(self) -> None:
        """Give up what is asked and let go of the judge's processes."""
        self._abort(set(self._asked))
        self._judge.close()

    def _begin(self, games: Sequence[Game], sampling: Sampling) -> set[int]:
        """The numbers of the questions that were asked."""
        if not self._asked:
            self._engine.forget()
            self._toll.restart()
        self._toll.expect(len(games))
        ends = self._ends if sampling.end_ids is None else sampling.end_ids
        begun = set()
        for game in games:
            number = next(self._numbers)
            begun.add(number)
            asked = _Asked(game, self._prompts[game.seed], self._prompts.prompt(game.seed), ends)
            self._asked[number] = asked
            longest, seed = self._config.max_response_tokens, game.draws(sampling, 0)
            try:
                self._engine.submit(sampling.request(number, asked.prompt, longest, seed, self._ends))
            except ValueError:
                # longer than the engine can take: that costs its own game
                self._end(number, Outcome.CONTEXT)
        return begun

    def _advance(self) -> None:
        if self._engine.busy:
            started = time.perf_counter()
            generations = self._engine.step()
            self._engine_seconds += time.perf_counter() - started
            for generation in generations:
                self._wrote(generation)
            verdicts = self._judge.ready()
        else:
            verdicts = self._judge.drain()
            judged = {verdict.id for verdict in verdicts}
            for number in [number for number in self._asked if number not in judged]:
                self._end(number, Outcome.FAILED, LOST)
        for verdict in verdicts:
            if verdict.id in self._asked:
                self._judged(verdict)

    def _wrote(self, generation: Generation) -> None:
        """Have an answer judged, or end its game where there is none. One to a dropped question is passed over."""
        asked = self._asked.get(generation.id)
        if asked is None:
            return
        asked.generation = generation if generation.tokens else None
        asked.text = answered(self._tokenizer, generation.tokens, asked.ends)
        if generation.stop is StopReason.FAILED:
            self._end(generation.id, Outcome.FAILED, generation.failure or UNEXPLAINED)
        elif generation.stop is StopReason.ABORT:
            self._end(generation.id, Outcome.ABORTED)
        elif not generation.tokens:
            full = generation.stop is StopReason.CONTEXT
            self._end(generation.id, *((Outcome.CONTEXT, None) if full else (Outcome.FAILED, EMPTY)))
        else:
            self._judge.submit(Answer(generation.id, asked.question, asked.text, len(generation.tokens)))

    def _judged(self, verdict: Verdict) -> None:
        asked = self._asked.pop(verdict.id)
        self._toll.count(verdict.failure)
        generation = asked.generation
        ended = generation is not None and generation.stop is StopReason.STOP
        right = verdict.failure is None and verdict.parts.get("acc", verdict.score) >= 1.0
        outcome = Outcome.SUCCESS if right else Outcome.TERMINATED if ended else Outcome.TRUNCATED
        self._ended.append((verdict.id, _trajectory(asked, outcome, verdict)))

    def _end(self, number: int, outcome: Outcome, failure: Failure | None = None) -> None:
        """End a game without a verdict; what was written of it stays."""
        asked = self._asked.pop(number)
        self._toll.count(failure)
        self._ended.append((number, _trajectory(asked, outcome, Verdict(number, 0.0, failure=failure))))

    def _abort(self, numbers: set[int]) -> list[Trajectory]:
        """End games in the middle."""
        writing = [number for number in numbers if number in self._asked and not self._asked[number].generation]
        for generation in self._engine.abort(writing) if writing else ():
            self._wrote(generation)
        for number in numbers & set(self._asked):
            self._end(number, Outcome.ABORTED)
        aborted = [trajectory for number, trajectory in self._ended if number in numbers]
        self._ended = [one for one in self._ended if one[0] not in numbers]
        return aborted


class _Toll:
    """How many of the games since the last rest came to nothing."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._games = 0
        self._failures: list[Failure] = []

    def restart(self) -> None:
        self._games, self._failures = 0, []

    def expect(self, games: int) -> None:
        """So many more are played."""
        self._games += games

    def count(self, failure: Failure | None) -> None:
        """A game has ended."""
        if failure is not None:
            self._failures.append(failure)

    def check(self) -> None:
        """
        Raises:
            MachineError: too many have failed, however the rest ends.
        """
        if len(self._failures) > self._limit * self._games:
            raise _too_many(self._failures, self._games, self._limit)


def answered(tokenizer: Any, tokens: Sequence[int], ends: Sequence[int]) -> str:
    """The words of an answer, its end token left out."""
    own = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    return str(tokenizer.decode(list(own), skip_special_tokens=False))


def _trajectory(asked: _Asked, outcome: Outcome, verdict: Verdict) -> Trajectory:
    """A game that ended; without an answer it has no turn."""
    return Trajectory(
        world=asked.question.source or "prompts",
        seed=asked.game.seed,
        group=asked.game.group,
        sample=asked.game.sample,
        turns=() if asked.generation is None else (_turn(asked, asked.generation, verdict),),
        outcome=outcome,
        failure=verdict.failure,
        parts=verdict.parts,
        predicted=verdict.predicted,
    )


def _turn(asked: _Asked, generation: Generation, verdict: Verdict) -> Turn:
    ended = generation.stop is StopReason.STOP
    return Turn(
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
        switches=generation.switches,
    )


def shown(messages: Iterable[Any]) -> str:
    """A conversation as text, for people."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _too_many(failures: Sequence[Failure], answers: int, limit: float) -> MachineError:
    first = failures[0]
    told = f"(first: {first.kind}: {first.message})"
    if first.where == "engine":
        return MachineError(
            f"{len(failures)} of {answers} answers couldn't be written {told}",
            f"see what the engine lacks, or raise reward.max_failed_share (now {limit:g})",
        )
    return MachineError(
        f"{len(failures)} of {answers} answers couldn't be judged {told}",
        f"mend the reward function, or raise reward.max_failed_share (now {limit:g})",
    )
