"""Multi-turn loop: responses to prompts that are continued after replies, results of tools or of simulated users."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from quintet.config.interaction_files import run_users
from quintet.config.native.experiment import Experiment
from quintet.config.native.interactions import InteractionsConfig
from quintet.config.native.tool_calls import ToolCallsConfig
from quintet.records import Failure, FinishReason, Generation, Outcome, Response, RewardResult
from quintet.reward_sum import sum_rewards
from quintet.rollout.chat.chat_format import without_surrogates
from quintet.rollout.chat.reply_messages import ReplyMessages
from quintet.rollout.chat.tool_calls import split_tool_calls
from quintet.rollout.engines.engine import RequestEngine
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.rollout.single_turn_loop import PromptSource, RunningPrompt, SingleTurnLoop, response_prefix, response_text
from quintet.tools.executor import ToolExecutor
from quintet.tools.interaction import UserReply
from quintet.tools.registry import tool_schemas
from quintet.tools.tool import ToolEpisode, ToolResult
from quintet.tools.tool_env import call_message
from quintet.tools.user_executor import UserExecutor
from quintet.tools.users import load_user, user_name

if TYPE_CHECKING:
    from quintet.rewards.reward_managers import RewardScorer

POLL_SECONDS: Final = 0.05
"""Time to wait for a source of replies while another one has requests in progress, too."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a response."""

    texts: tuple[str, ...] = ()
    """One or several messages."""
    rewards: tuple[float, ...] = ()
    """Rewards of the response."""
    ended: bool = False
    """Whether the episode ends with it."""
    failure: Failure | None = None
    """Set in place of everything else: the episode has failed."""


class ReplySource(ABC):
    """Replies to the responses of many episodes at a time, computed in worker processes."""

    reward_key: ClassVar[str]
    """Name of the rewards in the `extra_info` of the reward function."""

    def __init__(self, executor: ToolExecutor | UserExecutor, messages: ReplyMessages, reward_weight: float) -> None:
        """`messages` encodes the replies; `reward_weight` is a factor on the rewards."""
        self._executor, self.messages, self.reward_weight = executor, messages, reward_weight

    @property
    def pending(self) -> bool:
        """Whether replies are awaited."""
        return self._executor.pending

    @abstractmethod
    def submit(self, number: int, running: RunningPrompt, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Start a reply to the response of an episode, which is the last message; return False if there is no reply."""

    def poll(self, *, wait: bool, seconds: float | None) -> list[tuple[int, Reply]]:
        """Return the replies that have arrived, by episode; `wait` waits for an event, up to `seconds` if given."""
        results = self._executor.poll(wait=wait, seconds=seconds)
        return [(number, self._reply(result)) for number, result in results]

    def drop(self, number: int) -> None:
        """End an episode; an awaited reply does not arrive."""
        self._executor.drop(number)

    @abstractmethod
    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""

    def close(self) -> None:
        """End all processes."""
        self._executor.close()

    @abstractmethod
    def _reply(self, result: Any) -> Reply:
        """Return the reply for a result of the executor."""


@dataclass(frozen=True, slots=True)
class _Continuation:
    """State of an episode besides its `RunningPrompt`."""

    sampling: SamplingParams
    prompt: tuple[int, ...]
    """Prompt of the latest response: the first prompt, responses and replies so far."""
    messages: tuple[Mapping[str, Any], ...]
    """The same as messages."""
    rewards: Mapping[str, list[float]]
    """Rewards by the source of the replies."""
    num_replies: int = 0
    last_reward: float = 0.0
    """Reward of the last response from its reply, if no other response follows it."""


class MultiTurnLoop(SingleTurnLoop):
    """A `SingleTurnLoop` in which tools and simulated users reply to responses.

    A response that ends with an end token goes to the first source that replies to it, and the policy continues after
    the reply. Sampled tokens stay as they are, and replies are not trained on. An episode ends with a response without
    a reply, or with a reply that ends it, after `rollout.max_turns` turns, or where `rollout.max_response_tokens`,
    which counts replies, leaves no room. The reward function gets everything behind the prompt as one text.
    """

    def __init__(self, *arguments: Any, sources: Sequence[ReplySource], **options: Any) -> None:
        """`sources` reply to responses: the first source with a reply is used. See `SingleTurnLoop` for the other
        arguments."""
        super().__init__(*arguments, **options)
        self._max_turns = self._config.max_turns
        self._sources = sources
        self._continuations: dict[int, _Continuation] = {}

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: those of `SingleTurnLoop`, and those of the sources of replies."""
        metrics = super().pop_metrics()
        for source in self._sources:
            metrics |= source.pop_metrics()
        return metrics

    def close(self) -> None:
        super().close()
        for source in self._sources:
            source.close()

    def _step(self) -> None:
        pending = [source for source in self._sources if source.pending]
        wait, seconds = not self._engine.busy, POLL_SECONDS if len(pending) > 1 else None
        for source in pending:
            for number, reply in source.poll(wait=wait, seconds=seconds):
                self._continue(number, source, reply)
        if self._engine.busy or not any(source.pending for source in self._sources):
            super()._step()

    def _start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> set[int]:
        started = super()._start(episodes, sampling)
        for number in started & self._running.keys():
            running = self._running[number]
            rewards: dict[str, list[float]] = {source.reward_key: [] for source in self._sources}
            messages = running.prompt_row.messages
            self._continuations[number] = _Continuation(sampling, running.prompt, messages, rewards)
        return started

    def _handle_response(self, number: int, running: RunningPrompt, generation: Generation) -> None:
        """Give a response to the first source that replies to it, or submit the episode for scoring."""
        is_continued = running.prompt_row.has_replies and len(running.turns) + 1 < self._max_turns
        if is_continued and generation.finish_reason is FinishReason.STOP:
            messages = (*self._continuations[number].messages, {"role": "assistant", "content": running.text})
            if any(source.submit(number, running, messages) for source in self._sources):
                return
        self._score(number, running, generation)

    def _continue(self, number: int, source: ReplySource, reply: Reply) -> None:
        """Append a reply and request the next response, or end the episode if the reply ends it or leaves no room for
        one."""
        running, continuation = self._running[number], self._continuations[number]
        generation = running.generation
        if generation is None:
            raise AssertionError("a reply before a response")
        if reply.failure is not None:
            self._end(number, Outcome.FAILED, reply.failure)
            return
        reward = source.reward_weight * sum_rewards(reply.rewards)
        continuation.rewards[source.reward_key].extend(reply.rewards)
        continuation = replace(continuation, num_replies=continuation.num_replies + 1)
        new_tokens = source.messages.encode(generation.tokens, reply.texts)
        prompt = continuation.prompt + generation.tokens + new_tokens
        left = self._config.max_response_tokens - self._num_tokens(running, prompt)
        running.replies_exceed_limit = left < 1 and not reply.ended
        if reply.ended or left < 1:
            num_replies = continuation.num_replies - (not reply.ended)
            self._continuations[number] = replace(continuation, last_reward=reward, num_replies=num_replies)
            self._score(number, running, generation, new_tokens if reply.ended else ())
            return
        messages = [{"role": "assistant", "content": running.text}]
        messages += [{"role": source.messages.role, "content": text} for text in reply.texts]
        running.turns += (running.turn(generation, RewardResult(number, reward)),)
        running.prompt, running.generation, running.text, running.results = new_tokens, None, "", "\n".join(reply.texts)
        self._continuations[number] = replace(continuation, prompt=prompt, messages=(*continuation.messages, *messages))
        self._request(number, prompt, left, continuation.sampling)

    def _score(self, number: int, running: RunningPrompt, generation: Generation, ending: tuple[int, ...] = ()) -> None:
        """Submit the whole continuation of the prompt for scoring, with the tokens of a reply that ended it."""
        continuation = self._continuations[number]
        sequence = continuation.prompt + generation.tokens + ending
        tokens = sequence[len(sequence) - self._num_tokens(running, sequence) :]
        text = response_text(self._tokenizer, tokens, running.stop_token_ids)
        num_turns = len(running.turns) + 1 + continuation.num_replies + 1
        extra = {**running.prompt_row.extra, **continuation.rewards, "num_turns": num_turns}
        self._drop(number)
        sampled = sum(len(turn.tokens) for turn in running.turns) + len(generation.tokens)
        prefix = response_prefix(self._tokenizer, running.turns[0].prompt if running.turns else running.prompt)
        prompt_row = replace(running.prompt_row, extra=extra)
        self._scorer.submit(Response(number, prompt_row, text, sampled, prefix))

    def _num_tokens(self, running: RunningPrompt, sequence: Sequence[int]) -> int:
        """Return the number of tokens of a sequence behind the first prompt."""
        return len(sequence) - len(running.turns[0].prompt if running.turns else running.prompt)

    def _handle_reward(self, result: RewardResult) -> None:
        last_reward = self._continuations.pop(result.id).last_reward
        super()._handle_reward(replace(result, score=sum_rewards((result.score, last_reward))))

    def _end(self, number: int, outcome: Outcome, failure: Failure | None = None) -> None:
        self._drop(number)
        self._continuations.pop(number, None)
        super()._end(number, outcome, failure)

    def _drop(self, number: int) -> None:
        for source in self._sources:
            source.drop(number)


def build_prompt_loop(
    engine: RequestEngine,
    tokenizer: Any,
    prompts: PromptSource,
    scorer: RewardScorer,
    config: Experiment,
    *,
    stop_token_ids: tuple[int, ...],
    max_failed_share: float,
) -> SingleTurnLoop:
    """Return the loop of a run on prompts: with `rollout.tool_calls` or `rollout.interactions`, it has several turns.

    Raises:
        ConfigError: there is no such tool or user, or the chat template has no tool calls.
    """
    sources: list[ReplySource] = []
    tool_calls, interactions = config.rollout.tool_calls, config.rollout.interactions
    template = None if config.data is None else config.data.template
    if tool_calls is not None:
        sources.append(ToolReplies(tool_calls, ReplyMessages(tokenizer, template, tool_schemas(tool_calls))))
    if interactions is not None:
        sources.append(UserReplies(interactions, ReplyMessages(tokenizer, template, role="user")))
    loop = partial(MultiTurnLoop, sources=sources) if sources else SingleTurnLoop
    return loop(
        engine,
        tokenizer,
        prompts,
        scorer,
        config.rollout,
        stop_token_ids=stop_token_ids,
        max_failed_share=max_failed_share,
    )


class ToolReplies(ReplySource):
    """See `ReplySource`: replies to a response that calls tools with the results of its calls, one message each."""

    reward_key = "tool_rewards"

    def __init__(self, config: ToolCallsConfig, messages: ReplyMessages) -> None:
        self._config, self._tools = config, ToolExecutor(config)
        super().__init__(self._tools, messages, config.reward_weight)
        self._reported_calls = (0, 0)
        self._num_malformed = 0

    def submit(self, number: int, running: RunningPrompt, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Begin the calls of a response, if it has some."""
        response = split_tool_calls(running.text, in_thought=self.messages.opens_thought(running.prompt))
        self._num_malformed += response.num_malformed
        calls = response.calls[: self._config.max_parallel_calls]
        selection = running.prompt_row.tool_selection
        requests = [
            call_message(call.name, call.arguments, _tool_episode(running, call.name), selection) for call in calls
        ]
        if requests:
            self._tools.submit(number, requests, running.episode.seed)
        return bool(requests)

    def pop_metrics(self) -> dict[str, float]:
        calls = (self._tools.num_calls, self._tools.num_failed)
        (total, failed) = calls
        (old_total, old_failed) = self._reported_calls
        self._reported_calls = calls
        malformed, self._num_malformed = self._num_malformed, 0
        counts = {"calls": total - old_total, "failed_calls": failed - old_failed, "malformed_calls": malformed}
        return {f"tool/{name}": float(count) for name, count in counts.items()}

    def _reply(self, result: Sequence[ToolResult]) -> Reply:
        rewards = tuple(call.reward for call in result if call.reward is not None)
        texts = (truncate_result(without_surrogates(call.text), self._config) for call in result)
        return Reply(tuple(texts), rewards)


def truncate_result(text: str, config: ToolCallsConfig) -> str:
    """Return a result of at most `max_result_chars` characters and a mark where it was truncated, as verl writes it."""
    limit = config.max_result_chars
    if len(text) <= limit:
        return text
    if config.kept_part == "start":
        return f"{text[:limit]}...(truncated)"
    if config.kept_part == "end":
        return f"(truncated)...{text[-limit:]}"
    half = limit // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


def _tool_episode(running: RunningPrompt, name: str) -> ToolEpisode:
    """Return the episode's data for its tools."""
    by_tool = running.prompt_row.extra.get("tools_kwargs")
    arguments = by_tool.get(name) if isinstance(by_tool, Mapping) else None
    created = arguments.get("create_kwargs") if isinstance(arguments, Mapping) else None
    # in Parquet, the arguments of all rows are the same fields, null where they are missing
    arguments = {key: value for key, value in (created or {}).items() if value is not None}
    return ToolEpisode(running.prompt_row.ground_truth, arguments)


class UserReplies(ReplySource):
    """See `ReplySource`: replies to every response."""

    reward_key = "turn_scores"

    def __init__(self, config: InteractionsConfig, messages: ReplyMessages) -> None:
        """
        Raises:
            ConfigError: see `load_user`.
        """
        users = run_users(config)
        for name, user in users.items():
            load_user(name, user)
        self._names = tuple(users)
        self._users = UserExecutor(config)
        super().__init__(self._users, messages, config.reward_weight)
        self._num_replies = self._num_ended = 0

    def submit(self, number: int, running: RunningPrompt, messages: Sequence[Mapping[str, Any]]) -> bool:
        row = running.prompt_row
        arguments = row.extra.get("interaction_kwargs") or {}
        # in Parquet, the arguments of all rows are the same fields, null where they are missing
        episode = ToolEpisode(row.ground_truth, {key: value for key, value in arguments.items() if value is not None})
        self._users.submit(number, user_name(row.extra, self._names), messages, episode, running.episode.seed)
        return True

    def pop_metrics(self) -> dict[str, float]:
        metrics = {"interaction/replies": float(self._num_replies), "interaction/ended": float(self._num_ended)}
        self._num_replies = self._num_ended = 0
        return metrics

    def _reply(self, result: UserReply | Failure) -> Reply:
        if isinstance(result, Failure):
            return Reply(failure=result)
        self._num_replies += 1
        self._num_ended += result.ended
        rewards = () if result.reward is None else (result.reward,)
        return Reply((without_surrogates(result.text),), rewards, result.ended)
