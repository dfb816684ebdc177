"""Results of the tools that responses call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quintet.config.native.tool_calls import ToolCallsConfig
from quintet.rollout.chat.chat_format import without_surrogates
from quintet.rollout.chat.reply_messages import ReplyMessages
from quintet.rollout.chat.tool_calls import split_tool_calls
from quintet.rollout.replies import Reply
from quintet.rollout.single_turn_loop import RunningPrompt
from quintet.tools.executor import ToolExecutor
from quintet.tools.tool import ToolEpisode, ToolResult
from quintet.tools.tool_env import call_message


class ToolReplies:
    """See `ReplySource`: replies to a response that calls tools with the results of its calls, one message each."""

    reward_key = "tool_rewards"

    def __init__(self, config: ToolCallsConfig, messages: ReplyMessages) -> None:
        self.messages = messages
        self.reward_weight = config.reward_weight
        self._config = config
        self._tools = ToolExecutor(config)
        self._reported_calls = (0, 0)
        self._num_malformed = 0

    @property
    def pending(self) -> bool:
        return self._tools.pending

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

    def poll(self, *, wait: bool, seconds: float | None) -> list[tuple[int, Reply]]:
        return [(number, self._reply(results)) for number, results in self._tools.poll(wait=wait, seconds=seconds)]

    def drop(self, number: int) -> None:
        self._tools.drop(number)

    def pop_metrics(self) -> dict[str, float]:
        calls = (self._tools.num_calls, self._tools.num_failed)
        (total, failed) = calls
        (old_total, old_failed) = self._reported_calls
        self._reported_calls = calls
        malformed, self._num_malformed = self._num_malformed, 0
        counts = {"calls": total - old_total, "failed_calls": failed - old_failed, "malformed_calls": malformed}
        return {f"tool/{name}": float(count) for name, count in counts.items()}

    def close(self) -> None:
        self._tools.close()

    def _reply(self, results: Sequence[ToolResult]) -> Reply:
        rewards = tuple(result.reward for result in results if result.reward is not None)
        texts = (truncate_result(without_surrogates(result.text), self._config) for result in results)
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
