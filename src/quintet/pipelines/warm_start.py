"""Warm start: supervised training on demonstrations, from which the policy learns response format and first moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter

from quintet.algorithms.objective import CrossEntropyObjective
from quintet.config.composed import with_value
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv, apportion
from quintet.config.native.rollout import RolloutConfig
from quintet.config.native.training import WarmStartConfig
from quintet.data.demonstrations import DemonstratedTurn, Demonstration, collect_demonstrations, with_images
from quintet.data.prompt_dataset import PromptDataset
from quintet.envs.env import Env
from quintet.envs.factory import build_env, env_errors_under_key, env_factory
from quintet.envs.start_states import Split
from quintet.errors import ConfigError
from quintet.records import (
    Batch,
    FinishReason,
    Generation,
    Outcome,
    PromptRow,
    Request,
    Response,
    RewardResult,
    Trajectory,
    Turn,
)
from quintet.rewards.thoughts import continue_thought
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue
from quintet.rollout.chat.response_parser import ResponseFormat
from quintet.rollout.chat.tool_calls import split_after_calls
from quintet.rollout.collate import collate
from quintet.rollout.episode import Episode
from quintet.rollout.multi_turn_loop import build_prompt_loop
from quintet.rollout.sampling_params import greedy_sampling
from quintet.rollout.single_turn_loop import response_prefix
from quintet.seeds import derive_seed
from quintet.training.packing import select_sequences
from quintet.training.protocols import Actor

_EPISODES = TypeAdapter(list[Sequence[Demonstration]])
"""Episodes of each environment."""


@dataclass(frozen=True, slots=True)
class EnvDemonstrations:
    """Episodes of one environment that its expert has solved, and the rules for showing them to the policy."""

    episodes: Sequence[Demonstration]
    instruction: str
    response_format: ResponseFormat
    rollout: RolloutConfig

    def response(self, turn: DemonstratedTurn) -> str:
        """Return the demonstrated response."""
        texts = {"observation": turn.observation, "prediction": turn.next_observation}
        return self.response_format.format(turn.thought, turn.actions, **texts)


def solve_episodes(config: Experiment, episodes: int) -> list[EnvDemonstrations]:
    """Have the experts of the run's environments solve episodes, divided by share and at least one of each.

    Raises:
        ConfigError: an environment has no expert, or almost no episode can be won.
    """
    counts = apportion(episodes, [env.share for env in config.run_envs])
    return [_solve(env, max(1, count), config) for env, count in zip(config.run_envs, counts, strict=True)]


def dump_episodes(demonstrations: Iterable[EnvDemonstrations]) -> bytes:
    """Return the episodes as JSON, without images, which `load_episodes` shows again."""
    images = {"turns": {"__all__": {"images"}}}
    return _EPISODES.dump_json([env.episodes for env in demonstrations], exclude={"__all__": {"__all__": images}})


def load_episodes(config: Experiment, data: bytes) -> list[EnvDemonstrations]:
    """Return the demonstrations with the episodes that `dump_episodes` returned."""
    built = [(env, _build(env)) for env in config.run_envs]
    return [
        _with_rules(run_env, env, with_images(env, episodes))
        for (run_env, env), episodes in zip(built, _EPISODES.validate_json(data), strict=True)
    ]


def _build(run_env: RunEnv) -> Env:
    with env_errors_under_key(run_env.key):
        return env_factory(run_env.config)()


def _with_rules(run_env: RunEnv, env: Env, episodes: Sequence[Demonstration]) -> EnvDemonstrations:
    response_format = ResponseFormat.from_config(run_env.rollout, env.actions)
    return EnvDemonstrations(episodes, env.instruction(), response_format, run_env.rollout)


def _solve(run_env: RunEnv, episodes: int, config: Experiment) -> EnvDemonstrations:
    env = _build(run_env)
    try:
        solved = collect_demonstrations(
            lambda: build_env(run_env.config),
            episodes,
            split=Split.DEMONSTRATION,
            max_turns=run_env.rollout.max_turns,
            max_actions_per_turn=run_env.rollout.max_actions_per_turn,
            epsilon=config.warm_start.epsilon if config.warm_start else 0.0,
        )
    except ConfigError as error:
        if not config.envs:
            raise
        message = f"envs.{run_env.name}: {error.message}"
        raise ConfigError(message, key=error.key, value=error.value, hint=error.hint) from error
    return _with_rules(run_env, env, solved)


def iter_demonstration_texts(demonstrations: Iterable[EnvDemonstrations]) -> Iterator[str]:
    """Yield all texts of the demonstrations, to train the tokenizer of a preset on."""
    for env in demonstrations:
        yield f"system\n{env.instruction}"
        for turn in (turn for episode in env.episodes for turn in episode.turns):
            yield f"user\n{turn.observation}\nassistant\n"
            yield env.response(turn)


def demonstration_batch(demonstrations: Iterable[EnvDemonstrations], chat: ChatFormat) -> Batch:
    """Return the demonstrations as episodes of the policy, with the responses under the loss mask."""
    episodes = ((env, episode) for env in demonstrations for episode in env.episodes)
    return collate(_as_trajectory(episode, index, chat, env) for index, (env, episode) in enumerate(episodes))


def _as_trajectory(demonstration: Demonstration, index: int, chat: ChatFormat, env: EnvDemonstrations) -> Trajectory:
    start = demonstration.turns[0].observation
    dialogue = Dialogue.from_config(env.rollout, chat, env.instruction, demonstration.actions, start)
    turns: list[Turn] = []
    for step in demonstration.turns:
        _, prompt, continues = dialogue.observe(step.observation, step.images)
        text = env.response(step)
        tokens = chat.encode_response(text)
        dialogue.add_response(tokens)
        turn = _expert_turn(prompt, tokens, text, step.observation, step.actions, continues=continues)
        turns.append(replace(turn, image_inputs=dialogue.new_images))
    return Trajectory("demonstration", demonstration.seed, index, 0, tuple(turns), Outcome.SUCCESS)


def _expert_turn(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    text: str,
    observation: str = "",
    actions: tuple[str, ...] = (),
    *,
    continues: bool = False,
) -> Turn:
    return Turn(
        observation=observation,
        prompt=prompt,
        continues=continues,
        tokens=tokens,
        logprobs=(0.0,) * len(tokens),
        weight_version=0,
        text=text,
        actions=actions,
        valid_format=True,
        reward=0.0,
        finish_reason=FinishReason.STOP,
    )


def response_batch(prompts: PromptDataset, num_rows: int, tokenizer: Any, config: Experiment) -> Batch:
    """Return the demonstrated responses of up to `num_rows` training rows as responses, under the loss mask.

    Raises:
        ConfigError: no row has a demonstrated response.
    """
    rows = [(index, prompts[index]) for index in prompts.warm_start_rows(num_rows)]
    if config.rollout.tool_calls is not None:
        responses = demonstrate_tool_calls(config, prompts, num_rows, tokenizer)
    else:
        rollout = config.rollout
        responses = [_as_response(prompts, index, row, tokenizer, rollout) for index, row in rows if row.response]
    if not responses:
        raise ConfigError(
            "the data has no demonstrated responses for the warm start",
            key="warm_start",
            hint="set data.response_key to the column with responses, or warm_start=null",
        )
    return collate(responses)


def _as_response(
    prompts: PromptDataset, index: int, row: PromptRow, tokenizer: Any, rollout: RolloutConfig
) -> Trajectory:
    prompt = prompts.prompt(index)
    text = continue_thought(str(row.response), response_prefix(tokenizer, prompt))
    whole = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    tokens = whole[: rollout.max_response_tokens]
    reason = FinishReason.STOP if tokens == whole else FinishReason.LENGTH
    turn = _expert_turn(prompt, tokens, text)
    turn = replace(turn, image_inputs=prompts.images(index), finish_reason=reason)
    return Trajectory("demonstration", index, index, 0, (turn,), Outcome.SUCCESS)


class DemonstrationUpdates:
    """Updates of a warm start: steps of cross-entropy on random sequences of the demonstrations."""

    def __init__(self, actor: Actor, batch: Batch, config: WarmStartConfig, seed: int) -> None:
        """`seed` is the seed of the run."""
        self._actor = actor
        self._batch = batch
        self._size = config.turns_per_update
        self._shuffle = torch.Generator().manual_seed(derive_seed(seed, "warm_start"))
        self._queue = torch.empty(0, dtype=torch.long)
        self._drawn = 0

    def __call__(self, update: int, rate: float, weight_decay: float) -> dict[str, float]:
        """Make an update, counted from 1; return its metrics."""
        part = select_sequences(self._batch, self._sequences(update))
        return self._actor.update(part, CrossEntropyObjective(), "token-mean", rate, weight_decay=weight_decay)

    def _sequences(self, update: int) -> torch.Tensor:
        """Return the sequences of an update; draw the ones of earlier updates, which a resumed run skips, before."""
        while self._drawn < update:
            while len(self._queue) < self._size:
                order = torch.randperm(len(self._batch.lengths), generator=self._shuffle)
                self._queue = torch.cat([self._queue, order])
            sequences, self._queue = self._queue[: self._size], self._queue[self._size :]
            self._drawn += 1
        return sequences


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
