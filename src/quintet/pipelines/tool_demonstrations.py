"""Demonstrations with tool calls: demonstrated responses, continued after the results of the calls in them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import Any

from quintet.config.composed import with_value
from quintet.config.native.experiment import Experiment
from quintet.data.prompt_dataset import PromptDataset
from quintet.records import FinishReason, Generation, Request, Response, RewardResult, Trajectory
from quintet.rewards.thoughts import continue_thought
from quintet.rollout.chat.tool_calls import split_after_calls
from quintet.rollout.episode import Episode
from quintet.rollout.multi_turn_loop import build_prompt_loop
from quintet.rollout.sampling_params import greedy_sampling
from quintet.rollout.single_turn_loop import response_prefix


def demonstrate_tool_calls(
    config: Experiment, prompts: PromptDataset, num_rows: int, tokenizer: Any
) -> list[Trajectory]:
    """Return the demonstrated responses of up to `num_rows` training rows as episodes, with the results of their calls
    as in rollouts: one turn per call, and the last one behind them. Simulated users do not reply to them."""
    rows = [index for index in prompts.warm_start_rows(num_rows) if prompts[index].response]
    parts = [split_after_calls(str(prompts[index].response)) for index in rows]
    loop = build_prompt_loop(
        _DemonstratedResponses(tokenizer, parts),
        tokenizer,
        prompts,
        _NoScorer(),
        with_value(config, "rollout.interactions", None),
        stop_token_ids=(tokenizer.eos_token_id,),
        max_failed_share=1.0,
    )
    episodes = [Episode(index, group, 0) for group, index in enumerate(rows)]
    with closing(loop):
        return sorted(loop.collect_rollouts(episodes, greedy_sampling(config)), key=lambda episode: episode.group)


class _DemonstratedResponses:
    """A `RequestEngine` that responds to the n-th prompt with the parts of the n-th response, in their order."""

    def __init__(self, tokenizer: Any, responses: list[list[str]]) -> None:
        self._tokenizer = tokenizer
        self._responses = responses
        self._requests: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        self._requests.append(request)

    def step(self) -> list[Generation]:
        requests, self._requests = self._requests, []
        return list(map(self._respond, requests))

    def abort(self, ids: Collection[int]) -> list[Generation]:
        self._requests = [request for request in self._requests if request.id not in ids]
        return []

    def reset_prefix_cache(self) -> None:
        """See `RequestEngine.reset_prefix_cache`; nothing is cached."""

    def _respond(self, request: Request) -> Generation:
        parts = self._responses[request.id]
        prefix = response_prefix(self._tokenizer, request.prompt)
        text = continue_thought(parts.pop(0), prefix) if parts else ""
        whole = (*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id)
        tokens = whole[: request.max_tokens]
        reason = FinishReason.STOP if tokens == whole else FinishReason.LENGTH
        return Generation(request.id, tokens, (0.0,) * len(tokens), reason, 0)


class _NoScorer:
    """A `RewardScorer` without rewards."""

    def __init__(self) -> None:
        self._responses: list[Response] = []

    def submit(self, response: Response) -> None:
        self._responses.append(response)

    def ready(self) -> list[RewardResult]:
        responses, self._responses = self._responses, []
        return [RewardResult(response.id, 0.0) for response in responses]

    def drain(self) -> list[RewardResult]:
        return self.ready()

    def close(self) -> None:
        """See `RewardScorer.close`."""
