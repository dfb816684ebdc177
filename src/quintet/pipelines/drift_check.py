"""The drift check: run a few episodes, and compare the engine's log-probs of their tokens with the learner's.

The comparison is made with the initial weights, and again after the learner's weights were changed and synced, since
errors in the weight sync go unnoticed otherwise. The report also has the tokens that would change if an episode's text
were decoded and encoded again, and the places where episodes differ from the chat template.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from quintet.algorithms.drift import MAX_GAP, Drift, measure_drift
from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.data.prompt_dataset import PromptDataset, iter_training_texts
from quintet.envs.factory import build_env
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.model_lookup import find_configured_model
from quintet.pipelines.warm_start import iter_demonstration_texts, solve_episodes
from quintet.policies.model_loading import load_policy_tokenizer
from quintet.policies.tiny_models import create_preset_policy
from quintet.records import INCOMPLETE_OUTCOMES, Batch, Trajectory
from quintet.rollout.chat.chat_format import REPLACEMENT_CHARACTER, ChatFormat, Dialogue
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.chat.template_analysis import TemplateReport
from quintet.rollout.chat.template_comparison import RetokenizedSpan, TemplateDeviation, find_retokenized_spans
from quintet.rollout.collate import collate
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.runtime.components import Components, build_components
from quintet.runtime.engines.engine_builders import engine_dtype
from quintet.seeds import derive_seed
from quintet.tools.registry import tool_schemas
from quintet.tracking.run_directory import RunDirectory

VOCABULARY_TEXTS, VOCABULARY_EPISODES = 4000, 100
"""Texts and episodes from which the tokenizer of a preset is trained."""
MAX_WEIGHT_CHANGE: Final = 0.1
"""Maximum relative change of each weight tensor before it is synced."""


@dataclass(frozen=True, slots=True)
class DriftCheckOptions:
    """Options of the check."""

    episodes: int = 16
    """Number of episodes to run, or of prompts to answer."""
    updates: int = 1
    """Number of weight syncs before the second comparison; 0 makes only the first one."""
    limit: float | None = None
    """Tolerated log-prob difference in nats (default: depends on the dtypes)."""
    share: float | None = None
    """Tolerated share of tokens beyond the limit (default: depends on the dtypes)."""


@dataclass(frozen=True, slots=True)
class WorstToken:
    """Token with the largest difference of log-probs."""

    token_id: int
    text: str
    episode: int
    turn: int
    learner_logprob: float
    """Nats."""
    engine_logprob: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; null for numbers that are not finite."""
        return {
            name: value if isinstance(value, str) or isfinite(value) else None for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Measurement:
    """Comparison of engine and learner under one version of the weights."""

    name: str
    drift: Drift
    worst_token: WorstToken


@dataclass(frozen=True, slots=True)
class RetokenizationReport:
    """Tokens that would change if the episodes' text were decoded and encoded again."""

    num_turns: int
    changed_turns: int
    """Turns in which response tokens would change."""
    changed_response_tokens: int
    changed_prompt_tokens: int
    example: RetokenizedSpan | None = None
    example_text: str = ""
    """Text of the example's tokens as sampled."""
    retokenized_text: str = ""
    """Text of the example's tokens after decoding and encoding."""


@dataclass(frozen=True, slots=True)
class TemplateComparison:
    """Differences between the episodes and the chat template."""

    report: TemplateReport
    deviations: Mapping[str, int]
    """Number of places where an episode's text differs from the template, by rule."""
    examples: Mapping[str, TemplateDeviation]
    num_turns: int
    reproduced_prompts: int
    """Turns whose prompt tokens are the same when rebuilt from the messages."""


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Result of the check."""

    policy: str
    engine: str
    engine_dtype: str
    learner_dtype: str
    episodes: int
    limit: float
    tolerated_share: float
    """Tolerated share of tokens above the limit."""
    measurements: tuple[Measurement, ...]
    retokenization: RetokenizationReport
    template_comparison: TemplateComparison | None = None
    """None if the environment is not multi-turn."""

    @property
    def passed(self) -> bool:
        """Whether few enough tokens are beyond the limit, and all prompts are the same when rebuilt."""
        comparison = self.template_comparison
        prompts_match = comparison is None or comparison.reproduced_prompts == comparison.num_turns
        return prompts_match and all(
            measurement.drift.share_above_limit <= self.tolerated_share for measurement in self.measurements
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; null for numbers that are not finite."""
        measurements = [
            {"name": each.name, "drift": each.drift.as_json(), "worst_token": each.worst_token.as_json()}
            for each in self.measurements
        ]
        return asdict(self) | {"measurements": measurements, "passed": self.passed}


def check_drift(
    composed: ComposedConfig, options: DriftCheckOptions, warn: Callable[[str], None] = warnings.warn
) -> DriftReport:
    """Run some episodes of the configuration, and compare engine and learner; writes nothing into the run directory.

    `warn` gets a message for each damaged checkpoint that is skipped.

    Raises:
        ConfigError: the model, environment, data or engine does not fit the configuration.
        MachineError: a model cannot be read, or no episode could be run.
    """
    config = composed.experiment
    with _components(config, warn) as (components, policy_dir, description):
        dtype = str(engine_dtype(config, policy_dir)).removeprefix("torch.")
        limit, share = _tolerance(config, dtype, options)
        comparisons = [_compare(components, "as loaded", options.episodes, limit)]
        if options.updates:
            _perturb_and_sync(components, options.updates)
            name = f"after {options.updates} update{'s' * (options.updates > 1)}"
            comparisons.append(_compare(components, name, options.episodes, limit))
        episodes = [episode for comparison in comparisons for episode in comparison.episodes]
        return DriftReport(
            policy=description,
            engine=config.rollout.engine,
            engine_dtype=dtype,
            learner_dtype=config.policy.dtype,
            episodes=len(episodes),
            limit=limit,
            tolerated_share=share,
            measurements=tuple(comparison.result for comparison in comparisons),
            retokenization=_retokenization(components.tokenizer, episodes),
            template_comparison=_template_comparison(components, episodes),
        )


def _tolerance(config: Experiment, engine: str, options: DriftCheckOptions) -> tuple[float, float]:
    """Return the tolerated difference and share; by default those of the less precise dtype."""
    types = (engine, config.policy.dtype)
    limit, share = max(MAX_GAP.get(name, MAX_GAP["bfloat16"]) for name in types)
    return (
        limit if options.limit is None else options.limit,
        share if options.share is None else options.share,
    )


@contextmanager
def _components(config: Experiment, warn: Callable[[str], None]) -> Iterator[tuple[Components, Path, str]]:
    """Yield the components of the configuration's policy, its directory and its description."""
    with TemporaryDirectory(prefix="quintet-drift-") as directory:
        policy_dir, description = _policy(config, Path(directory) / "policy", warn)
        prompts = _prompts(config, policy_dir)
        try:
            components = build_components(config, policy_dir, prompts)
            try:
                components.weight_sync.sync(0)
                yield components, policy_dir, description
            finally:
                components.close()
        finally:
            if prompts is not None:
                prompts.close()


def _policy(config: Experiment, directory: Path, warn: Callable[[str], None]) -> tuple[Path, str]:
    """Return the model to check and its description: the run's last checkpoint, `policy.path`, or a preset that is
    created in `directory`."""
    has_checkpoints = config.resume != "never" and RunDirectory.from_config(config).checkpoints.is_dir()
    if config.policy.path is not None or has_checkpoints or config.resume not in ("auto", "never"):
        model = find_configured_model(config, warn)
        return model, str(model)
    seed = derive_seed(config.seed, "policy")
    create_preset_policy(str(config.policy.preset), directory, _texts(config), seed)
    return directory, f"a new {config.policy.preset}"


def _texts(config: Experiment) -> Iterator[str]:
    if config.env.reads_prompts:
        if config.data is None:
            raise ConfigError("no data to take prompts from", key="data", hint="data.train_files=[FILE]")
        return islice(iter_training_texts(config.data, tool_schemas(config.rollout.tool_calls)), VOCABULARY_TEXTS)
    return iter_demonstration_texts(solve_episodes(config, VOCABULARY_EPISODES))


def _prompts(config: Experiment, policy_dir: Path) -> PromptDataset | None:
    if not config.env.reads_prompts:
        return None
    policy = config.policy
    tokenizer = load_policy_tokenizer(policy, policy_dir)
    images = ImagePrompts.from_directory(policy_dir, policy.vision, trust_remote_code=policy.runs_tokenizer_code)
    return PromptDataset.from_config(config, tokenizer, images)


def _perturb_and_sync(components: Components, updates: int) -> None:
    """Change the learner's weights a little and sync them, `updates` times."""
    for version in range(1, updates + 1):
        seed = derive_seed(components.config.seed, "drift", *(() if version == 1 else (version,)))
        components.learners.perturb_actor(MAX_WEIGHT_CHANGE, seed)
        components.weight_sync.sync(version)


@dataclass(frozen=True, slots=True)
class _Comparison:
    result: Measurement
    episodes: list[Trajectory]


def _compare(components: Components, name: str, episodes: int, limit: float) -> _Comparison:
    """Run episodes, and compare the log-probs of their response tokens."""
    trajectories = _run_episodes(components, episodes)
    batch = collate(trajectories)
    mask = batch.loss_mask
    learner, engine = components.learners.actor.scorer.compute_log_probs(batch)[mask], batch.logprobs[mask]
    worst = _worst(components.tokenizer, batch, learner, engine)
    return _Comparison(Measurement(name, measure_drift(learner, engine, limit), worst), trajectories)


def _run_episodes(components: Components, count: int) -> list[Trajectory]:
    """Run episodes from start states that are neither trained on nor held out, sampled as in training."""
    config = components.config
    rollout = config.rollout
    seed = derive_seed(config.seed, "drift")
    sampling = SamplingParams(rollout.temperature, rollout.top_k, rollout.top_p, seed)
    episodes = [
        Episode(start, number, 0) for number, start in enumerate(components.start_states.warm_start_check_starts(count))
    ]
    trajectories = sorted(components.envs.collect_rollouts(episodes, sampling), key=lambda episode: episode.group)
    completed = [
        episode
        for episode in trajectories
        if episode.outcome not in INCOMPLETE_OUTCOMES and any(t.tokens for t in episode.turns)
    ]
    if not completed:
        failure = next((episode.failure for episode in trajectories if episode.failure is not None), None)
        cause = f"{failure.where}: {failure.error_type}: {failure.message}" if failure else "no prompt fits"
        limit = f"raise rollout.max_prompt_tokens above {rollout.max_prompt_tokens}"
        raise MachineError(f"no episode could be run ({cause})", "fix the environment" if failure else limit)
    return completed


def _worst(tokenizer: Any, batch: Batch, learner: Tensor, engine: Tensor) -> WorstToken:
    difference = (learner - engine).abs()
    index = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
    position = int(batch.loss_mask.nonzero().squeeze(-1)[index])
    token = int(batch.tokens[position])
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    episode, turn = int(batch.token_trajectory[position]), int(batch.turn[position])
    return WorstToken(token, text, episode, turn, float(learner[index]), float(engine[index]))


def _retokenization(tokenizer: Any, episodes: Sequence[Trajectory]) -> RetokenizationReport:
    """Decode every sequence of every episode, without the tokens of images, and encode it again."""
    batch = collate(episodes)
    spans: list[tuple[int, RetokenizedSpan]] = []
    columns = [column.tolist() for column in (batch.tokens, batch.turn, batch.loss_mask)]
    start = 0
    for length, episode in zip(batch.lengths.tolist(), batch.trajectory.tolist(), strict=True):
        tokens, turns, loss_mask = (
            [
                value
                for value, token in zip(column[start : start + length], columns[0][start:], strict=False)
                if token >= 0
            ]
            for column in columns
        )
        spans += [(episode, span) for span in find_retokenized_spans(tokenizer, tokens, turns, loss_mask)]
        start += length
    response_spans = [span for _, span in spans if span.has_response_tokens]

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    def readability(span: RetokenizedSpan) -> tuple[bool, int]:
        """Prefer examples of complete characters and few tokens."""
        return REPLACEMENT_CHARACTER in text(span.tokens), len(span.tokens)

    example = min(response_spans or [span for _, span in spans], key=readability, default=None)
    return RetokenizationReport(
        num_turns=sum(len(episode.turns) for episode in episodes),
        changed_turns=len({(episode, span.turn) for episode, span in spans if span.has_response_tokens}),
        changed_response_tokens=sum(len(span.tokens) for span in response_spans),
        changed_prompt_tokens=sum(len(span.tokens) for _, span in spans if not span.has_response_tokens),
        example=example,
        example_text="" if example is None else text(example.tokens),
        retokenized_text="" if example is None else text(example.retokenized),
    )


def _template_comparison(components: Components, episodes: Sequence[Trajectory]) -> TemplateComparison | None:
    """Rebuild every episode from its messages, and compare it with the chat template."""
    if components.chat is None:
        return None
    config, chat = components.config, components.chat
    played = {env.name: env for env in config.run_envs}
    counts: Counter[str] = Counter()
    examples: dict[str, TemplateDeviation] = {}
    reproduced = 0
    for episode in episodes:
        dialogue, reproduced_in_episode = _rebuilt(played[episode.env], chat, episode)
        reproduced += reproduced_in_episode
        for deviation in dialogue.compare().deviations:
            counts[str(deviation.kind)] += 1
            examples.setdefault(str(deviation.kind), deviation)
    return TemplateComparison(
        chat.report, dict(counts), examples, sum(len(episode.turns) for episode in episodes), reproduced
    )


def _rebuilt(played: RunEnv, chat: ChatFormat, episode: Trajectory) -> tuple[Dialogue, int]:
    """Return the episode rebuilt from its messages, and the number of its prompts that are the same."""
    env, reproduced = build_env(played.config), 0
    start = env.reset(episode.seed)
    dialogue = Dialogue.from_config(played.rollout, chat, env.instruction(), env.actions, start.text)
    for turn in episode.turns:
        _, new, continues = dialogue.observe(turn.observation, turn.images)
        reproduced += (new, continues) == (turn.prompt, turn.continues)
        dialogue.add_response(turn.tokens)
    return dialogue, reproduced
