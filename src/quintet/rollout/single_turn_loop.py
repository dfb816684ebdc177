"""Single-turn loop: prompts with one response each, scored while other responses are still being generated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quintet import trace
from quintet.config.native.rollout import RolloutConfig
from quintet.errors import MachineError
from quintet.records import (
    PROMPTS,
    Failure,
    FinishReason,
    Generation,
    ImageInput,
    Outcome,
    PromptRow,
    Response,
    RewardResult,
    Trajectory,
    Turn,
)
from quintet.rewards.thoughts import opened_thought
from quintet.rollout.engines.engine import RequestEngine
from quintet.rollout.episode import LOST, Episode, unfinished_outcome
from quintet.rollout.episode_loop import EpisodeLoop
from quintet.rollout.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quintet.rewards.reward_managers import RewardScorer

MAX_PREFIX_TOKENS = 32
"""Tokens at the end of a prompt that may be the start of the response."""


class PromptSource(Protocol):
    """Rows by number, and their prompts as token ids."""

    def __getitem__(self, number: int) -> PromptRow: ...

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return the token ids of a prompt, truncated as configured."""

    def images(self, number: int) -> tuple[ImageInput, ...]:
        """Return the distinct images of a prompt."""


@dataclass(slots=True)
class RunningPrompt:
    """A prompt whose response is being generated or scored."""

    episode: Episode
    prompt_row: PromptRow
    prompt: tuple[int, ...]
    """See `Turn.prompt`."""
    stop_token_ids: tuple[int, ...]
    images: tuple[ImageInput, ...] = ()
    generation: Generation | None = None
    text: str = ""
    turns: tuple[Turn, ...] = ()
    """Earlier turns, whose responses had replies."""
    results: str = ""
    """The reply to the response before."""
    replies_exceed_limit: bool = False
    """See `Trajectory.replies_exceed_limit`."""

    def finish(self, outcome: Outcome, result: RewardResult) -> Trajectory:
        """The record of the episode; without a response it has no turn."""
        return Trajectory(
            env=self.prompt_row.data_source or PROMPTS,
            seed=self.episode.seed,
            group=self.episode.group,
            sample=self.episode.sample,
            turns=self.turns if self.generation is None else (*self.turns, self.turn(self.generation, result)),
            outcome=outcome,
            failure=result.failure,
            reward_components=result.reward_components,
            extracted_answer=result.extracted_answer,
            env_type=PROMPTS,
            measures_success=result.measures_success,
            ground_truth=self.prompt_row.ground_truth,
            replies_exceed_limit=self.replies_exceed_limit,
        )

    def turn(self, generation: Generation, result: RewardResult) -> Turn:
        """The record of the latest turn."""
        ended = generation.finish_reason is FinishReason.STOP
        return Turn(
            observation=self.results if self.turns else format_messages(self.prompt_row.messages),
            prompt=self.prompt,
            continues=bool(self.turns),
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            weight_version=generation.weight_version,
            text=self.text,
            actions=() if result.extracted_answer is None else (result.extracted_answer,),
            valid_format=ended and result.reward_components.get("format", 1.0) > 0,
            reward=result.score,
            finish_reason=generation.finish_reason,
            image_inputs=() if self.turns else self.images,
            version_changes=generation.version_changes,
        )


class SingleTurnLoop(EpisodeLoop[RunningPrompt]):
    """Generates responses with one engine and scores them. `Episode.seed` is the number of a prompt.

    A response whose scoring fails counts as wrong and keeps the cause; more than `max_failed_share` failures end the
    run. Aborted episodes have no reward.
    """

    def __init__(
        self,
        engine: RequestEngine,
        tokenizer: Any,
        prompts: PromptSource,
        scorer: RewardScorer,
        config: RolloutConfig,
        *,
        stop_token_ids: tuple[int, ...],
        max_failed_share: float,
    ) -> None:
        """`stop_token_ids` are the tokens that end a response, unless the sampling parameters have others."""
        super().__init__(engine)
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._scorer = scorer
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._failures = _FailureLimit(max_failed_share)
        self._engine_seconds = 0.0
        self._max_turns = 1

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: seconds in the engine."""
        elapsed, self._engine_seconds = self._engine_seconds, 0.0
        return {"timing_s/engine": elapsed}

    def close(self) -> None:
        """Abort running episodes and stop the processes of the reward scorer."""
        self._abort(set(self._running))
        self._scorer.close()

    def _start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> set[int]:
        """Queue the prompts and return their request ids."""
        if not self._running:
            self._engine.reset_prefix_cache()
            self._failures.reset()
        self._failures.add_episodes(len(episodes))
        stop_token_ids = self._stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
        started = set()
        for episode in episodes:
            number = next(self._ids)
            started.add(number)
            prompt, images = self._prompts.prompt(episode.seed), self._prompts.images(episode.seed)
            self._running[number] = RunningPrompt(episode, self._prompts[episode.seed], prompt, stop_token_ids, images)
            self._request(number, prompt, self._config.max_response_tokens, sampling)
        return started

    def _request(self, number: int, prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams) -> None:
        """Request the next response to `prompt`."""
        running = self._running[number]
        seed, ends = running.episode.sampling_seed(sampling, len(running.turns)), self._stop_token_ids
        continues = len(running.turns) + 1 < self._max_turns
        request = sampling.request(
            number, prompt, max_tokens, seed, ends, keep_kv_cache=continues, images=running.images
        )
        try:
            self._engine.add_request(request)
        except ValueError:
            # the prompt is longer than the engine's context: only its own episode ends
            self._end(number, Outcome.CONTEXT)

    def _step(self) -> None:
        if self._engine.busy:
            started = time.perf_counter()
            generations = self._engine.step()
            self._engine_seconds += time.perf_counter() - started
            for generation in generations:
                self._handle_generation(generation)
            results = self._scorer.ready()
        else:
            with trace.span("drain_scorer"):
                results = self._scorer.drain()
            scored = {result.id for result in results}
            for number in [number for number in self._running if number not in scored]:
                self._end(number, Outcome.FAILED, LOST)
        for result in results:
            if result.id in self._running:
                self._handle_reward(result)

    def _handle_generation(self, generation: Generation) -> None:
        """Submit a response for scoring, or end its episode. Responses to aborted prompts are ignored."""
        running = self._running.get(generation.id)
        if running is None:
            return
        running.generation = generation if generation.tokens else None
        running.text = response_text(self._tokenizer, generation.tokens, running.stop_token_ids)
        ended = unfinished_outcome(generation)
        if ended is None:
            self._handle_response(generation.id, running, generation)
        else:
            self._end(generation.id, *ended)

    def _handle_response(self, number: int, running: RunningPrompt, generation: Generation) -> None:
        """Submit a complete response for scoring."""
        prefix = response_prefix(self._tokenizer, running.prompt)
        self._scorer.submit(Response(number, running.prompt_row, running.text, len(generation.tokens), prefix))

    def _handle_reward(self, result: RewardResult) -> None:
        running = self._running.pop(result.id)
        self._failures.record(result.failure)
        generation = running.generation
        ended = generation is not None and generation.finish_reason is FinishReason.STOP
        ended = ended and not running.replies_exceed_limit
        correct = result.failure is None and result.reward_components.get("acc", result.score) >= 1.0
        outcome = Outcome.SUCCESS if correct else Outcome.TERMINATED if ended else Outcome.TRUNCATED
        self._finished.append((result.id, running.finish(outcome, result)))

    def _end(self, number: int, outcome: Outcome, failure: Failure | None = None) -> None:
        """End an episode without a reward; its partial response is kept."""
        running = self._running.pop(number)
        self._failures.record(failure)
        self._finished.append((number, running.finish(outcome, RewardResult(number, 0.0, failure=failure))))

    def _abort(self, numbers: set[int]) -> list[Trajectory]:
        generating = [number for number in numbers if number in self._running and not self._running[number].generation]
        for generation in self._engine.abort(generating) if generating else ():
            self._handle_generation(generation)
        for number in numbers & set(self._running):
            self._end(number, Outcome.ABORTED)
        return self._take_finished(lambda number, _: number in numbers)

    def _check_failures(self) -> None:
        self._failures.check()


class _FailureLimit:
    """Limits the share of failed episodes among those started since the loop was last idle."""

    def __init__(self, max_failed_share: float) -> None:
        self._max_failed_share = max_failed_share
        self._num_episodes = 0
        self._failures: list[Failure] = []

    def reset(self) -> None:
        self._num_episodes, self._failures = 0, []

    def add_episodes(self, count: int) -> None:
        self._num_episodes += count

    def record(self, failure: Failure | None) -> None:
        """Count an episode that ended."""
        if failure is not None:
            self._failures.append(failure)

    def check(self) -> None:
        """
        Raises:
            MachineError: too many episodes have failed, regardless of those still running.
        """
        if len(self._failures) > self._max_failed_share * self._num_episodes:
            raise _too_many_failures(self._failures, self._num_episodes, self._max_failed_share)


def response_text(tokenizer: Any, tokens: Sequence[int], stop_token_ids: Sequence[int]) -> str:
    """Decode a response without its end token."""
    without_end = tokens[:-1] if tokens and tokens[-1] in stop_token_ids else tokens
    return str(tokenizer.decode(list(without_end), skip_special_tokens=False))


def format_messages(messages: Iterable[Any]) -> str:
    """Format a conversation as readable text."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _too_many_failures(failures: Sequence[Failure], num_episodes: int, limit: float) -> MachineError:
    first, share = failures[0], f"{len(failures)} of {num_episodes}"
    problem, cause = {
        "engine": (f"{share} responses could not be generated", "engine"),
        "interaction": (f"simulated users could not reply in {share} episodes", "user"),
    }.get(first.where, (f"{share} responses could not be scored", "reward function"))
    return MachineError(
        f"{problem} (first: {first.error_type}: {first.message})",
        f"fix the {cause}, or raise reward.max_failed_share (now {limit:g})",
    )


def response_prefix(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the start of a response that its prompt ends with: the tag of a thought, or nothing."""
    # images are negative
    end = [token for token in prompt[-MAX_PREFIX_TOKENS:] if token >= 0]
    return opened_thought(str(tokenizer.decode(end, skip_special_tokens=False)))
