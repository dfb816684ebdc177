"""Tool loop: responses to prompts that call tools, continued after the results of their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from quintet.config.native.experiment import Experiment
from quintet.config.native.rollout import RolloutConfig
from quintet.config.native.tool_calls import ToolCallsConfig
from quintet.records import Failure, FinishReason, Generation, Outcome, Response, RewardResult
from quintet.rollout.chat.tool_calls import ToolCall, ToolCallParser
from quintet.rollout.chat.tool_messages import ToolMessages, truncate_result
from quintet.rollout.engines.engine import RequestEngine
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.rollout.single_turn_loop import PromptSource, RunningPrompt, SingleTurnLoop, response_text
from quintet.tools.executor import ToolExecutor
from quintet.tools.registry import tool_schemas
from quintet.tools.tool import ToolEpisode, ToolResult
from quintet.tools.tool_env import call_message

if TYPE_CHECKING:
    from quintet.rewards.reward_managers import RewardScorer


@dataclass(frozen=True, slots=True)
class _Continuation:
    """What an episode needs besides its `RunningPrompt`."""

    sampling: SamplingParams
    prompt: tuple[int, ...]
    """Prompt of the latest response: the first prompt, responses and results so far."""
    rewards: tuple[float, ...] = ()
    """Rewards of tools."""
    last_reward: float = 0.0
    """Reward of the calls of the last response, if no other one follows them."""


class ToolLoop(SingleTurnLoop):
    """A `SingleTurnLoop` in which responses may call tools.

    The calls of a response that ends with an end token are executed, and their results follow it as messages of tools;
    then the policy continues. Sampled tokens stay as they are, and results are not trained on. An episode ends with a
    response without a call, after `rollout.max_turns` turns, or where `rollout.max_response_tokens`, which counts
    results, leaves no room. The reward function gets everything behind the prompt as one text.
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
        tool_calls: ToolCallsConfig,
        messages: ToolMessages,
    ) -> None:
        """`tool_calls` is `rollout.tool_calls`, `messages` encodes the results; see `SingleTurnLoop` for the rest."""
        super().__init__(
            engine,
            tokenizer,
            prompts,
            scorer,
            config,
            stop_token_ids=stop_token_ids,
            max_failed_share=max_failed_share,
        )
        self._max_turns = config.max_turns
        self._tool_calls = tool_calls
        self._messages = messages
        self._tools = ToolExecutor(tool_calls)
        self._continuations: dict[int, _Continuation] = {}
        self._reported_calls = (0, 0)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: those of `SingleTurnLoop`, and counts of calls."""
        calls = (self._tools.num_calls, self._tools.num_failed)
        (total, failed), (old_total, old_failed), self._reported_calls = calls, self._reported_calls, calls
        return super().pop_metrics() | {"tool/calls": total - old_total, "tool/failed_calls": failed - old_failed}

    def close(self) -> None:
        super().close()
        self._tools.close()

    def _step(self) -> None:
        idle = not self._engine.busy
        for number, results in self._tools.poll(wait=idle and self._tools.pending):
            self._continue(number, results)
        if self._engine.busy or not self._tools.pending:
            super()._step()

    def _start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> set[int]:
        started = super()._start(episodes, sampling)
        for number in started & self._running.keys():
            self._continuations[number] = _Continuation(sampling, self._running[number].prompt)
        return started

    def _handle_response(self, number: int, running: RunningPrompt, generation: Generation) -> None:
        """Execute the calls of a response, or submit the episode for scoring."""
        calls = self._calls(running, generation)
        if not calls:
            self._score(number, running, generation)
            return
        messages = [call_message(call.name, call.arguments, _tool_episode(running, call.name)) for call in calls]
        self._tools.submit(number, messages, running.episode.seed)

    def _calls(self, running: RunningPrompt, generation: Generation) -> list[ToolCall]:
        """Return the calls of a response that are executed."""
        if not running.prompt_row.may_call_tools or len(running.turns) + 1 >= self._max_turns:
            return []
        if generation.finish_reason is not FinishReason.STOP:
            return []
        parser = ToolCallParser()
        calls = [*parser.update(running.text)[1], *parser.finish()[1]]
        return list(islice(calls, self._tool_calls.max_parallel_calls))

    def _continue(self, number: int, results: Sequence[ToolResult]) -> None:
        """Append the results of a response's calls and request the next response, or end the episode if they leave no
        room for one."""
        running, continuation = self._running[number], self._continuations[number]
        generation = running.generation
        if generation is None:
            raise AssertionError("results of tools before a response")
        rewards = tuple(result.reward for result in results if result.reward is not None)
        turn_reward = self._tool_calls.reward_weight * sum(rewards)
        continuation = replace(continuation, rewards=continuation.rewards + rewards)
        texts = [truncate_result(result.text, self._tool_calls) for result in results]
        new_tokens = self._messages.encode(generation.tokens, texts)
        prompt = continuation.prompt + generation.tokens + new_tokens
        left = self._config.max_response_tokens - self._num_tokens(running, prompt)
        if left < 1:
            self._continuations[number] = replace(continuation, last_reward=turn_reward)
            self._score(number, running, generation)
            return
        running.turns += (running.turn(generation, RewardResult(number, turn_reward)),)
        running.prompt, running.generation, running.text, running.results = new_tokens, None, "", "\n".join(texts)
        self._continuations[number] = replace(continuation, prompt=prompt)
        self._request(number, prompt, left, continuation.sampling)

    def _score(self, number: int, running: RunningPrompt, generation: Generation) -> None:
        """Submit the whole continuation of the prompt for scoring."""
        continuation = self._continuations[number]
        sequence = continuation.prompt + generation.tokens
        tokens = sequence[len(sequence) - self._num_tokens(running, sequence) :]
        text = response_text(self._tokenizer, tokens, running.stop_token_ids)
        extra = {"tool_rewards": list(continuation.rewards), "num_turns": 2 * len(running.turns) + 2}
        row = replace(running.prompt_row, extra={**running.prompt_row.extra, **extra})
        self._tools.drop(number)
        self._scorer.submit(Response(number, row, text, len(tokens)))

    def _num_tokens(self, running: RunningPrompt, sequence: Sequence[int]) -> int:
        """Return the number of tokens of a sequence behind the first prompt."""
        return len(sequence) - len(running.turns[0].prompt if running.turns else running.prompt)

    def _handle_reward(self, result: RewardResult) -> None:
        last_reward = self._continuations.pop(result.id).last_reward
        super()._handle_reward(replace(result, score=result.score + last_reward))

    def _end(self, number: int, outcome: Outcome, failure: Failure | None = None) -> None:
        self._tools.drop(number)
        self._continuations.pop(number, None)
        super()._end(number, outcome, failure)


def _tool_episode(running: RunningPrompt, name: str) -> ToolEpisode:
    """Return what a tool knows of the episode."""
    by_tool = running.prompt_row.extra.get("tools_kwargs")
    arguments = by_tool.get(name) if isinstance(by_tool, Mapping) else None
    created = arguments.get("create_kwargs") if isinstance(arguments, Mapping) else None
    # in Parquet, the arguments of all rows are the same fields, null where they are missing
    arguments = {key: value for key, value in (created or {}).items() if value is not None}
    return ToolEpisode(running.prompt_row.ground_truth, arguments)


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
    """Return the loop of a run on prompts: with `rollout.tool_calls`, responses may call tools.

    Raises:
        ConfigError: there is no such tool, or the chat template has no tool calls.
    """
    tool_calls = config.rollout.tool_calls
    if tool_calls is None:
        return SingleTurnLoop(
            engine,
            tokenizer,
            prompts,
            scorer,
            config.rollout,
            stop_token_ids=stop_token_ids,
            max_failed_share=max_failed_share,
        )
    template = None if config.data is None else config.data.template
    return ToolLoop(
        engine,
        tokenizer,
        prompts,
        scorer,
        config.rollout,
        stop_token_ids=stop_token_ids,
        max_failed_share=max_failed_share,
        tool_calls=tool_calls,
        messages=ToolMessages(tokenizer, template, tool_schemas(tool_calls)),
    )
