"""Evaluation of stored responses, or of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.composed import ComposedConfig, errors_with_sources
from quintet.config.native.data import DataConfig, EvaluationConfig, RewardConfig
from quintet.config.native.experiment import Experiment
from quintet.data.prompt_source import open_rows
from quintet.data.row_reader import RowReader
from quintet.data.start_state_files import build_start_states
from quintet.envs.mixed_env import build_run_envs
from quintet.errors import ConfigError, did_you_mean
from quintet.pipelines.episode_log import prompt_decoder
from quintet.pipelines.evaluation_results import Evaluation, ResultWriter, Statistics, finish_results, open_results
from quintet.policies.model_loading import load_policy_tokenizer
from quintet.policies.reward_model import import_libraries
from quintet.records import Response, RewardResult, Trajectory
from quintet.rewards.ground_truths import check_rows, truth_errors_under_key
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.engines.engine import ENGINES, Engine
from quintet.rollout.engines.openai_endpoint import (
    UNLIMITED,
    EndpointEngine,
    EndpointImages,
    EndpointSettings,
    message_tokenizer,
    without_tokens,
)
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import ModuleWeights
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import build_episode_rules
from quintet.rollout.multi_turn_loop import build_prompt_loop
from quintet.rollout.sampling_params import SamplingParams, check_tokens, validation_prompts, validation_sampling
from quintet.rollout.single_turn_loop import SingleTurnLoop, format_messages
from quintet.runtime.components import stop_token_ids
from quintet.runtime.engines.engine_builders import engine_setup, load_merged_model
from quintet.runtime.process_settings import configure_process
from quintet.runtime.reward_scorer import build_reward_scorer
from quintet.seeds import derive_seed
from quintet.tools.registry import tool_schemas
from quintet.tools.users import user_names
from quintet.tracking.eval_statistics import Sample
from quintet.tracking.progress import build_progress
from quintet.tracking.trajectories import truth_text, write_trajectories

if TYPE_CHECKING:
    from rich.console import Console

EPISODES = "episodes.jsonl"
MAX_CONCURRENT = 4096
"""Maximum number of responses, or of episodes, in memory at a time."""


def evaluate_stored(composed: ComposedConfig, console: Console) -> Evaluation:
    """Score the responses in `evaluation.path` by `reward`, or by `evaluation.function`.

    Raises:
        ConfigError: `evaluation` is not configured, or the file does not have the columns.
        MachineError: a file cannot be read or written.
    """
    config = composed.experiment
    import_libraries(config.external_libs, "external_libs")
    stored = config.evaluation
    if stored is None:
        raise ConfigError(
            "no stored responses to evaluate",
            key="evaluation.path",
            hint="set evaluation.path to their file, or evaluate a model: quintet eval runs/NAME, quintet eval MODEL "
            "--data FILE, or a configuration with validation.only=true",
        )
    uses_model = config.reward is not None and (config.reward.model is not None or bool(config.reward.judges))
    rows = StoredResponses(stored, needs_prompts=uses_model)
    with open_results(composed, console) as (directory, writer):
        scoring = config.model_copy(update={"reward": _reward(config)})
        scorer = build_reward_scorer(scoring, Path(config.policy.path or "policy"))
        progress = build_progress(console)
        with (
            closing(scorer),
            errors_with_sources(composed),
            truth_errors_under_key("evaluation.truth_key"),
            progress.phase("scoring", len(rows), unit="prompt") as phase,
        ):
            pending: dict[int, Response] = {}

            def add(verdicts: Iterable[RewardResult]) -> None:
                for verdict in verdicts:
                    _add_stored(writer, pending.pop(verdict.id), verdict)

            for row in range(len(rows)):
                for answer in rows.read(row):
                    pending[answer.id] = answer
                    scorer.submit(answer)
                add(scorer.ready() if len(pending) < MAX_CONCURRENT else scorer.drain())
                phase.advance()
            add(scorer.drain())
        return finish_results(directory, writer, Statistics(stored.samples, stored.pass_threshold, stored.confidence))


def _add_stored(writer: ResultWriter, answer: Response, verdict: RewardResult) -> None:
    prompt_row = answer.prompt_row
    sample = Sample(
        prompt_row.data_source or "prompts",
        str(prompt_row.id),
        verdict.score,
        dict(verdict.reward_components),
        verdict.extracted_answer,
    )
    question = format_messages(prompt_row.messages)
    shown = {"question": question, "response": answer.text, **_truth(prompt_row.ground_truth)}
    writer.add(answer.id, sample, verdict.failure, shown)


def _truth(truth: Any) -> dict[str, str]:
    return {} if truth is None else {"ground_truth": truth_text(truth)}


def _reward(config: Experiment) -> RewardConfig:
    """Return the section `reward`, with `evaluation.function` if it is set."""
    reward = config.reward or RewardConfig(function_arguments={})
    function = config.evaluation.function if config.evaluation else None
    return reward if function is None else reward.model_copy(update={"function": function})


def evaluate_model(
    composed: ComposedConfig, statistics: Statistics, console: Console, endpoint: EndpointSettings | None = None
) -> Evaluation:
    """Run `policy.path`, or the model behind an endpoint, on the held-out prompts of `data`, or on the held-out
    episodes of its environments: `validation.sampling.samples` times each, sampled as `validation.sampling` says.

    Raises:
        ConfigError: files, environment or reward function do not fit the configuration or the endpoint.
        MachineError: the model cannot be read, or a file cannot be written.
    """
    config = composed.experiment
    import_libraries(config.external_libs, "external_libs")
    if endpoint is not None:
        check_for_endpoint(config)
    if config.env.is_simulator:
        return _evaluate_robots(composed, statistics, console)
    with open_results(composed, console) as (directory, writer):
        evaluator = _Evaluator.of(config, endpoint)
        samples = config.validation.sampling.samples
        progress = build_progress(console)
        stored: list[Trajectory] = []
        with closing(evaluator), progress.phase("episodes", len(evaluator.starts) * samples, unit="episode") as phase:
            for trajectory in evaluator.play(samples):
                shown_trajectory = trajectory if endpoint is None else without_tokens(trajectory)
                _add_played(writer, shown_trajectory, trajectory.group * samples + trajectory.sample, endpoint=endpoint)
                if not config.env.reads_prompts:
                    stored.append(shown_trajectory)
                phase.advance()
        if stored:
            stored.sort(key=lambda t: (t.group, t.sample))
            decode, images = prompt_decoder(evaluator.tokenizer), config.tracking.image_episodes
            path = directory.path / EPISODES
            write_trajectories(path, 0, "validation", stored, image_episodes=images, decode=decode)
        return finish_results(directory, writer, statistics, evaluator.endpoint_counts(endpoint))


def _evaluate_robots(composed: ComposedConfig, statistics: Statistics, console: Console) -> Evaluation:
    """Run the action policy at `policy.path` on the held-out episodes of its simulator."""
    from quintet.pipelines.embodied.components import RobotComponents
    from quintet.pipelines.embodied.rollout import held_out_episodes, num_held_out
    from quintet.runtime.controller import Controller

    config = composed.experiment
    with open_results(composed, console) as (directory, writer):
        components = RobotComponents.build(config, Path(str(config.policy.path)), Controller.in_process())
        progress = build_progress(console)
        with closing(components), progress.phase("episodes", num_held_out(config), unit="episode") as phase:
            for part in held_out_episodes(components, 0):
                for episode in part:
                    sample = Sample(
                        episode.task, str(episode.start_state), episode.episode_return, {"acc": episode.success_once}
                    )
                    shown = {"outcome": episode.outcome.value, "actions": episode.num_actions}
                    writer.add(len(writer.samples), sample, episode.failure, shown)
                phase.advance(count=len(part))
            trajectories = components.workers.records.take_trajectories()
        write_trajectories(
            directory.path / EPISODES, 0, "validation", trajectories, image_episodes=config.tracking.image_episodes
        )
        return finish_results(directory, writer, statistics)


def check_for_endpoint(config: Experiment) -> None:
    """Reject settings that an endpoint does not support.

    Raises:
        ConfigError: a setting needs the policy's tokens, which an endpoint does not return.
    """
    rollout, data, reward = config.rollout, config.data, config.reward
    if config.env.is_simulator:
        message = "env.name = simulator needs a policy that outputs actions, which an endpoint does not"
        raise ConfigError(message, key="env.name", value="simulator", hint="leave out --endpoint")
    is_set = {
        "rollout.max_prompt_tokens": rollout.max_prompt_tokens != UNLIMITED,
        "rollout.max_start_tokens": rollout.max_start_tokens is not None,
        "rollout.max_observation_tokens": rollout.max_observation_tokens is not None,
        "rollout.end_token": rollout.end_token is not None,
        "rollout.engine": rollout.engine != "hf",
        **{f"{env.key}.max_tokens": getattr(env.config, "max_tokens", None) is not None for env in config.run_envs},
        "rollout.tool_calls": rollout.tool_calls is not None,
        "rollout.interactions": rollout.interactions is not None,
        "data.filter_long_prompts": data is not None and data.filter_long_prompts,
        "data.template": data is not None and data.template is not None,
        "reward.overlong": reward is not None and reward.overlong is not None,
    }
    for key in (key for key, value in is_set.items() if value):
        raise ConfigError(
            f"{key} needs the policy's tokens, which an endpoint does not return", key=key, hint=f"remove {key}"
        )
    if reward is not None and reward.model is not None and reward.model.path is None:
        message = "reward.model.path = null is the policy's model, which an endpoint does not return"
        raise ConfigError(message, key="reward.model.path", hint="reward.model.path=DIRECTORY")


def _add_played(
    writer: ResultWriter, trajectory: Trajectory, number: int, *, endpoint: EndpointSettings | None = None
) -> None:
    parts = dict(trajectory.reward_components) or {"acc": float(trajectory.success)}
    sample = Sample(trajectory.env, str(trajectory.seed), trajectory.reward, parts, trajectory.extracted_answer)
    shown = {
        "question": trajectory.turns[0].observation if trajectory.turns else "",
        "response": trajectory.turns[-1].text if trajectory.turns else "",
        **_truth(trajectory.ground_truth),
        "sample": trajectory.sample,
        "outcome": trajectory.outcome.value,
        "turns": len(trajectory.turns),
        "tokens": trajectory.response_tokens if endpoint is None else None,
    }
    writer.add(number, sample, trajectory.failure, shown)


@dataclass(frozen=True, slots=True)
class _Evaluator:
    """A policy, the environments that it is evaluated in, and their start states."""

    episodes: AgentLoop | SingleTurnLoop
    starts: Sequence[int]
    sampling: SamplingParams
    engine: Engine
    starts_per_round: int
    """Maximum number of start states that are run concurrently."""
    tokenizer: Any = None
    """Tokenizer of the policy; None behind an endpoint, which returns no tokens."""

    @classmethod
    def of(cls, config: Experiment, endpoint: EndpointSettings | None = None) -> _Evaluator:
        policy = _load_policy(config) if endpoint is None else _endpoint_policy(endpoint)
        sampling = validation_sampling(config, derive_seed(config.seed, "evaluation"))
        if config.env.reads_prompts:
            return _prompt_evaluator(config, policy, sampling)
        engine = policy.open(config.rollout.max_prompt_tokens)
        starts = build_start_states(config).held_out()
        # failures are part of the results and do not end an evaluation
        rules = [rules.tolerating_failures() for rules in build_episode_rules(config)]
        chat = ChatFormat.from_config(config.rollout, policy.tokenizer, policy.stop_token_ids, policy.images)
        episodes = AgentLoop(engine, chat, build_run_envs(config), rules)
        tokenizer = policy.tokenizer if endpoint is None else None
        return cls(episodes, starts, sampling, engine, validation_prompts(config, len(starts)), tokenizer)

    def play(self, samples: int) -> Iterator[Trajectory]:
        """Run `samples` episodes from each start state, at most `MAX_CONCURRENT` at a time."""
        episodes = [
            Episode(start, group, sample) for group, start in enumerate(self.starts) for sample in range(samples)
        ]
        size = min(MAX_CONCURRENT, self.starts_per_round * samples)
        for first in range(0, len(episodes), size):
            yield from self.episodes.collect_rollouts(episodes[first : first + size], self.sampling)

    def endpoint_counts(self, endpoint: EndpointSettings | None) -> dict[str, Any] | None:
        """Return the token counts of an endpoint; None for a model on disk."""
        if endpoint is None or not isinstance(self.engine, EndpointEngine):
            return None
        return {"url": endpoint.url, "model": endpoint.model, **self.engine.counts}

    def close(self) -> None:
        """Close environments, reward scorer and engine."""
        self.episodes.close()
        self.engine.close()


@dataclass(frozen=True, slots=True)
class _Policy:
    """Engine factory and tokenizer of the policy that is evaluated."""

    directory: Path
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    open: Callable[[int], Engine]
    """Builds the engine for prompts of up to this number of tokens."""
    images: ImagePrompts | None = None
    """Converts images of observations and prompts."""


def _load_policy(config: Experiment) -> _Policy:
    """Load the model at `policy.path`."""
    configure_process(config)
    directory = Path(str(config.policy.path))
    model = load_merged_model(config, directory)
    adapters = config.policy.lora and config.policy.lora.path
    tokenizer = load_policy_tokenizer(config.policy, directory)

    check_tokens(config, model.config.get_text_config().vocab_size)

    weights = ModuleWeights(model)

    def build_engine(prompt_tokens: int) -> Engine:
        needed = prompt_tokens + config.rollout.max_response_tokens
        context = min(needed, config.rollout.engine_options.max_model_tokens or needed)
        setup = engine_setup(config, directory, model, tokenizer, context)
        create = ENGINES.get(config.rollout.engine).load()
        engine = RestartingEngine(lambda: create(setup), weights)
        if adapters:  # an engine may have read the model's own files
            engine.load_weights(0, weights)
        return engine

    images = ImagePrompts.from_model(model, config.policy.vision)
    return _Policy(directory, tokenizer, stop_token_ids(tokenizer, model.generation_config), build_engine, images)


def _endpoint_policy(endpoint: EndpointSettings) -> _Policy:
    """Return the model behind an endpoint."""
    tokenizer = message_tokenizer()
    stop_tokens = (int(tokenizer.eos_token_id),)
    images = EndpointImages.build()
    return _Policy(Path("policy"), tokenizer, stop_tokens, lambda _: EndpointEngine(endpoint, tokenizer), images)


def _prompt_evaluator(config: Experiment, policy: _Policy, sampling: SamplingParams) -> _Evaluator:
    """Return the evaluator of held-out prompts, with an engine for the longest of them."""
    from quintet.data.prompt_dataset import MAX_CHECKED_ROWS
    from quintet.data.prompt_split import PromptSplit

    if config.data is None:
        raise ConfigError("no prompts to evaluate on", key="data", hint="data.validation_files=[FILE]")
    limit, tools = config.rollout.max_prompt_tokens, tool_schemas(config.rollout.tool_calls)
    users = user_names(config.rollout.interactions)
    prompts = PromptSplit.from_config(
        config.data, policy.tokenizer, limit, "validation", config.seed, policy.images, tools=tools, users=users
    )
    rows = range(len(prompts))
    check_rows((prompts[row] for row in rows[:MAX_CHECKED_ROWS]), config.reward or RewardConfig(function_arguments={}))
    engine = policy.open(max(len(prompts.prompt(row)) for row in rows))
    scorer = build_reward_scorer(config, policy.directory)
    # failures are part of the results and do not end an evaluation
    loop = build_prompt_loop(
        engine,
        policy.tokenizer,
        prompts,
        scorer,
        config,
        stop_token_ids=policy.stop_token_ids,
        max_failed_share=1.0,
    )
    return _Evaluator(loop, rows, sampling, engine, validation_prompts(config, len(rows)))


class StoredResponses:
    """Rows with their responses, which are numbered across rows."""

    def __init__(self, config: EvaluationConfig, *, needs_prompts: bool) -> None:
        """`needs_prompts` rejects rows without a prompt; reward functions do not need them."""
        self._column = config.response_key
        self._prompt = None if needs_prompts else config.prompt_key
        self._rows, _ = open_rows([config.path], "evaluation.path")
        self._reader = RowReader(
            DataConfig(prompt_key=config.prompt_key, source_key=config.source_key, truth_key=config.truth_key)
        )
        self._num_responses = 0

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Iterator[Response]:
        """Yield the responses of a row; rows have to be read in their order.

        Raises:
            ConfigError: a column is missing or has another type.
        """
        row, location = copy(self._rows[index]), self._rows.describe_row(index)
        texts = self._texts(row.pop(self._column, None), row, location)
        if self._prompt is not None and row.get(self._prompt) is None:
            row[self._prompt] = ""
        prompt_row = self._reader.read(row, index, location)
        for text in texts:
            yield Response(self._num_responses, prompt_row, text, tokens=0)
            self._num_responses += 1

    def _texts(self, value: object, row: Mapping[str, Any], location: str) -> Sequence[str]:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            return texts
        if value is None:
            problem = f"{location} has no such column"
            hint = f"{did_you_mean(self._column, row, '{}')} its columns are {', '.join(row)}".lstrip()
        else:
            problem, hint = f"{location} has {value!r:.60}", "use a list of texts, or a text"
        key = "evaluation.response_key"
        raise ConfigError(f"{key} = {self._column}: {problem}", key=key, value=self._column, source=location, hint=hint)
