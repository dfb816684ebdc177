"""Agent loop: many envs and one engine. A finished response is executed by its env at once and the next turn is queued,
so that no episode waits for another one and the engine keeps running while envs work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from quintet import trace
from quintet.config.native.rollout import RolloutConfig
from quintet.envs.start_states import env_index
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeStarted, VectorEnv
from quintet.records import (
    Failure,
    FinishReason,
    Generation,
    ImageInput,
    Observation,
    Outcome,
    Step,
    Trajectory,
)
from quintet.reward_sum import sum_rewards
from quintet.rewards.state_reward import StateRewards
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue, PromptChange
from quintet.rollout.chat.response_parser import ParsedResponse, ResponseFormat
from quintet.rollout.engines.engine import RequestEngine
from quintet.rollout.episode import LOST, NO_RELATIONS, Episode, PolicyResponse, RunningEpisode, unfinished_outcome
from quintet.rollout.episode_limits import EpisodeRules, FailureMonitor
from quintet.rollout.episode_loop import EpisodeLoop
from quintet.rollout.sampling_params import SamplingParams

MAX_CACHED_RESPONSES = 4096


class AgentLoop(EpisodeLoop[RunningEpisode]):
    """Runs episodes with one engine.

    A failing env or request costs only its own episode, which ends as `Outcome.FAILED` with its `Failure`. More than
    `max_failed_share` failures among the concurrent episodes end the run.
    """

    def __init__(self, engine: RequestEngine, chat: ChatFormat, envs: VectorEnv, rules: Sequence[EpisodeRules]) -> None:
        """`rules` has one entry per env."""
        super().__init__(engine)
        self.chat = chat
        self._envs, self._rules = envs, tuple(rules)
        self._failures = {r.name: FailureMonitor(r.limits.max_failed_share, r.key) for r in self._rules}
        self._responses = _ResponseCache(chat)
        state_reward = self._rules[0].config.state_reward
        self._state_rewards = None if state_reward is None else StateRewards(state_reward)
        self._prompt_changes: Counter[PromptChange] = Counter()
        self.engine_seconds = 0.0
        """Time spent in the engine, over all episodes."""
        self.loop_seconds = 0.0
        """Time spent in neither the engine nor envs."""
        self._reported_seconds = {"engine": 0.0, "env": 0.0, "loop": 0.0}

    @property
    def env_seconds(self) -> float:
        """Time spent in envs, or waiting for them while the engine was idle, over all episodes."""
        return self._envs.seconds

    @property
    def busy(self) -> bool:
        """Whether episodes are running or scored, or have ended without having been returned."""
        return super().busy or (self._state_rewards is not None and self._state_rewards.pending)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: timings, counts of changed observations, and metrics of the envs."""
        seconds = {"engine": self.engine_seconds, "env": self.env_seconds, "loop": self.loop_seconds}
        elapsed = {f"timing_s/{name}": value - self._reported_seconds[name] for name, value in seconds.items()}
        changes, self._prompt_changes = self._prompt_changes, Counter()
        self._reported_seconds = seconds
        prompts = {f"prompt/{change}": changes[change] for change in PromptChange}
        return elapsed | prompts | dict(self._envs.pop_metrics())

    def close(self) -> None:
        """Abort running episodes and stop the processes of the envs."""
        self._abort(set(self._running))
        self._envs.close()
        if self._state_rewards is not None:
            self._state_rewards.close()

    def _start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> set[int]:
        """Start episodes and return their ids."""
        if not self._running:
            self._engine.reset_prefix_cache()
            for monitor in self._failures.values():
                monitor.reset()
        started: set[int] = set()
        for episode in episodes:
            running = RunningEpisode(next(self._ids), episode, sampling, self._rules[env_index(episode.seed)])
            self._running[running.id] = running
            self._envs.start(running.id, episode.seed)
            started.add(running.id)
        for name, num_running in Counter(running.rules.name for running in self._running.values()).items():
            self._failures[name].widen(num_running)
        return started

    def _step(self) -> None:
        with trace.span("agent_loop", running=len(self._running)):
            self._advance()

    def _advance(self) -> None:
        started, before = time.perf_counter(), self.engine_seconds + self._envs.seconds
        if self._engine.busy:
            for generation in self._step_engine():
                self._handle_generation(generation)
        idle = not self._engine.busy and not self._finished
        with trace.span("poll_envs"):
            events = self._envs.poll(wait=idle and bool(self._running))
        for event in events:
            self._handle_env_event(event)
        if self._state_rewards is not None:
            self._finished += self._state_rewards.ready(wait=not self._running and not self._finished)
        if self._running and not (self._engine.busy or self._envs.pending or self._finished):
            # neither the engine nor an env is working on them
            for running in list(self._running.values()):
                self._end(running, Outcome.FAILED, LOST)
        engine_and_env_seconds = self.engine_seconds + self._envs.seconds - before
        self.loop_seconds += time.perf_counter() - started - engine_and_env_seconds

    def _step_engine(self) -> list[Generation]:
        started = time.perf_counter()
        generations = self._engine.step()
        self.engine_seconds += time.perf_counter() - started
        return generations

    def _handle_generation(self, generation: Generation) -> None:
        """Execute the actions of a response, or end its episode."""
        running = self._running.get(generation.id)
        if running is None or not running.is_generating:
            return
        running.is_generating = False
        running.num_tokens += len(generation.tokens)
        ended = unfinished_outcome(generation)
        if ended is None:
            self._execute_response(running, generation)
            return
        if generation.finish_reason in (FinishReason.FAILED, FinishReason.ABORT):
            # the partial response is recorded, not executed
            running.add_turn(PolicyResponse(generation, self.chat.decode(generation.tokens)))
        self._end(running, *ended)

    def _execute_response(self, running: RunningEpisode, generation: Generation) -> None:
        dialogue, response_format = running.dialogue, running.format
        if dialogue is None or response_format is None:
            raise AssertionError("a response before its episode started")
        dialogue.add_response(generation.tokens)
        text, parsed = self._responses.parse(generation.tokens, response_format)
        max_actions = running.rules.limits.max_actions
        if max_actions is not None:
            parsed = replace(parsed, actions=parsed.actions[: max_actions - running.num_actions])
        running.response = PolicyResponse(generation, text, parsed)
        if parsed.actions:
            self._envs.step(running.id, parsed.actions)
        else:
            self._finish_turn(running, ())

    def _handle_env_event(self, event: EnvEvent) -> None:
        """Continue or end the episode of an env that has finished starting or executing."""
        running = self._running.get(event.episode)
        if running is None:
            return
        if isinstance(event, EpisodeStarted):
            running.dialogue = Dialogue.from_config(
                running.rules.config, self.chat, event.instruction, event.actions, event.observation.text
            )
            running.format = self._responses.format(running.rules, event.actions)
            if running.rules.config.state_reward is not None and event.observation.relations is None:
                self._end(running, Outcome.FAILED, NO_RELATIONS)
            else:
                self._request_turn(running, event.observation)
        elif isinstance(event, ActionsExecuted):
            self._finish_turn(running, event.steps)
        else:
            self._end(running, Outcome.FAILED, event.failure)

    def _request_turn(self, running: RunningEpisode, observation: Observation, problem: str = "") -> None:
        """Queue the next turn, or end the episode if there is no room for it. `problem` is that of the response
        before, which the observation states."""
        dialogue = running.dialogue
        config = running.rules.config
        limit = running.rules.limits.max_tokens
        if dialogue is None:
            raise AssertionError("a turn before its episode started")
        running.env_observation = observation
        observation = dialogue.with_problem(observation, problem)
        try:
            prompt, running.new_prompt, running.continues = dialogue.observe(observation.text, observation.images)
        except ValueError as error:
            self._end(running, Outcome.FAILED, Failure("observation", "UnreadableImage", str(error)))
            return
        running.observation, running.image_inputs = observation, dialogue.new_images
        running.num_tokens += len(running.new_prompt)
        if dialogue.changes:
            self._prompt_changes.update(dialogue.changes)
        max_tokens = config.max_response_tokens
        if limit is not None:
            max_tokens = min(max_tokens, limit - running.num_tokens)
        if len(prompt) > config.max_prompt_tokens:
            self._end(running, Outcome.CONTEXT)
        elif max_tokens < 1:
            self._end(running, Outcome.MAX_TOKENS)
        else:
            self._add_request(running, prompt, dialogue.images, max_tokens)

    def _add_request(
        self, running: RunningEpisode, prompt: tuple[int, ...], images: tuple[ImageInput, ...], max_tokens: int
    ) -> None:
        request = running.request(prompt, images, max_tokens, self.chat.stop_token_ids)
        started = time.perf_counter()
        try:
            self._engine.add_request(request)
            running.is_generating = True
        except ValueError:
            # the prompt is longer than the engine's context
            self._end(running, Outcome.CONTEXT)
        finally:
            self.engine_seconds += time.perf_counter() - started

    def _finish_turn(self, running: RunningEpisode, steps: Sequence[Step]) -> None:
        """Record a turn and its reward, and request the next one or end the episode."""
        if running.response is None:
            raise AssertionError("an env step before a response")
        problem = "" if running.response.valid else self._problem(running)
        if any(step.info.get("valid_format") is False for step in steps):
            running.response = replace(running.response, parsed=replace(running.response.parsed, valid=False))
            problem = problem or "the environment does not accept its action"
        reward, outcome = _turn_result(running.rules.config, steps, valid=running.response.valid)
        running.describe_states(steps[-1].observation if steps else running.observation)
        running.add_turn(running.response, reward, steps)
        running.num_actions += len(steps)
        running.response = None
        outcome = outcome or running.reached_limit
        if outcome is not None:
            self._end(running, outcome)
        else:
            self._request_turn(running, steps[-1].observation if steps else running.env_observation, problem)

    def _problem(self, running: RunningEpisode) -> str:
        """Return what is wrong with an invalid response; empty if the policy is not told."""
        response, dialogue = running.response, running.dialogue
        if response is None or running.format is None or dialogue is None or not dialogue.response_form:
            return ""
        if response.generation.finish_reason.truncated:
            return f"it was cut off after {len(response.generation.tokens)} tokens"
        return running.format.problem(self.chat.response_prefix + response.text)

    def _abort(self, numbers: set[int]) -> list[Trajectory]:
        aborted = {number: running for number, running in self._running.items() if number in numbers}
        generating = [number for number, running in aborted.items() if running.is_generating]
        for generation in self._engine.abort(generating) if generating else ():
            if generation.tokens:
                aborted[generation.id].add_turn(PolicyResponse(generation, self.chat.decode(generation.tokens)))
        for running in aborted.values():
            self._end(running, Outcome.ABORTED)
        return self._take_finished(lambda number, _: number in aborted)

    def _withdraw(self, *, numbers: Collection[int] = (), groups: Collection[int] = ()) -> list[Trajectory]:
        return [] if self._state_rewards is None else self._state_rewards.withdraw(numbers, groups=groups)

    def _end(self, running: RunningEpisode, outcome: Outcome, failure: Failure | None = None) -> None:
        self._envs.drop(running.id)
        del self._running[running.id]
        trajectory = running.finish(outcome, failure)
        if self._state_rewards is None or outcome is Outcome.ABORTED:
            self._finished.append((running.id, trajectory))
        else:
            self._state_rewards.submit(running.id, trajectory, running.descriptions)
        if outcome is not Outcome.ABORTED:
            self._failures[running.rules.name].record(failure)


class _ResponseCache:
    """Response formats of the envs, and parsed responses: trained policies repeat theirs."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._formats: dict[tuple[str, tuple[str, ...]], ResponseFormat] = {}
        self.parse = lru_cache(maxsize=MAX_CACHED_RESPONSES)(self._parse)

    def format(self, rules: EpisodeRules, actions: tuple[str, ...]) -> ResponseFormat:
        """Return the response format of an env with these actions."""
        if (rules.name, actions) not in self._formats:
            special = sorted(self._chat.template_parts.control)
            self._formats[rules.name, actions] = ResponseFormat.from_config(rules.config, actions, special)
        return self._formats[rules.name, actions]

    def _parse(self, tokens: tuple[int, ...], response_format: ResponseFormat) -> tuple[str, ParsedResponse]:
        text = self._chat.decode(tokens)
        return text, response_format.parse(self._chat.response_prefix + text)


def _turn_result(config: RolloutConfig, steps: Sequence[Step], *, valid: bool) -> tuple[float, Outcome | None]:
    """Return the reward of a turn, and the outcome of its episode if the env has ended it."""
    binary = config.binary_reward
    is_rewarded = bool(steps) if config.format_reward_for == "executed" else valid
    format_reward = config.format_reward if is_rewarded else config.format_penalty
    rewards, outcome = [0.0 if binary else format_reward], None
    for step in steps:
        success = bool(step.info.get("success"))
        ended = step.terminated or step.truncated
        rewards.append(float(success and ended) if binary else step.reward)
        if ended:
            outcome = _outcome(success, terminated=step.terminated)
    return sum_rewards(rewards), outcome


def _outcome(success: bool, *, terminated: bool) -> Outcome:
    if success:
        return Outcome.SUCCESS
    return Outcome.TERMINATED if terminated else Outcome.TRUNCATED
