"""The drift check: run a few episodes, and compare the engine's log-probs of their tokens with the learner's.

The comparison is made with the initial weights, and again after the learner's weights were changed and synced, since
errors in the weight sync go unnoticed otherwise. The report also has the tokens that would change if an episode's text
were decoded and encoded again, and the places where episodes differ from the chat template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from quintet.config.native.rollout import RolloutConfig
from quintet.data.prompt_dataset import PromptDataset, iter_training_texts
from quintet.envs.factory import build_env
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.model_lookup import find_configured_model
from quintet.pipelines.warm_start import iter_demonstration_texts, solve_episodes
from quintet.policies.model_loading import load_tokenizer
from quintet.policies.tiny_models import create_preset_policy
from quintet.records import INCOMPLETE_OUTCOMES, Batch, Trajectory
from quintet.rollout.chat.chat_format import REPLACEMENT_CHARACTER, ChatFormat, Dialogue
from quintet.rollout.chat.parity import RetokenizedSpan, TemplateDeviation, find_retokenized_spans
from quintet.rollout.chat.template import TemplateReport
from quintet.rollout.collate import collate
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.runtime.components import Components, build_components
from quintet.runtime.engines import engine_dtype
from quintet.seeds import derive_seed
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

    token: int
    text: str
    episode: int
    turn: int
    learner: float
    """Nats."""
    engine: float

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
    worst: WorstToken


@dataclass(frozen=True, slots=True)
class RetokenizationReport:
    """Tokens that would change if the episodes' text were decoded and encoded again."""

    turns: int
    """Turns in which response tokens would change."""
    of_turns: int
    own_tokens: int
    """Response tokens that would change."""
    context_tokens: int
    """Prompt tokens that would change."""
    example: RetokenizedSpan | None = None
    text: str = ""
    """Text of the example's tokens before and, in `again`, after."""
    again: str = ""


@dataclass(frozen=True, slots=True)
class TemplateComparison:
    """Differences between the episodes and the chat template."""

    report: TemplateReport
    departures: Mapping[str, int]
    """Number of places where an episode's text differs from the template, by rule."""
    examples: Mapping[str, TemplateDeviation]
    rebuilt: int
    """Turns whose prompt tokens are the same when rebuilt from the messages."""
    of_turns: int


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Result of the check."""

    policy: str
    engine: str
    engine_dtype: str
    learner_dtype: str
    episodes: int
    limit: float
    share: float
    rounds: tuple[Measurement, ...]
    respelled: RetokenizationReport
    templated: TemplateComparison | None = None
    """None if the environment is not multi-turn."""

    @property
    def passed(self) -> bool:
        """Whether few enough tokens are beyond the limit, and all prompts are the same when rebuilt."""
        prompts_match = self.templated is None or self.templated.rebuilt == self.templated.of_turns
        return prompts_match and all(one.drift.beyond <= self.share for one in self.rounds)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; null for numbers that are not finite."""
        rounds = [{"name": one.name, "drift": one.drift.as_json(), "worst": one.worst.as_json()} for one in self.rounds]
        return asdict(self) | {"rounds": rounds, "passed": self.passed}


def check_drift(composed: ComposedConfig, options: DriftCheckOptions) -> DriftReport:
    """Run some episodes of the configuration, and compare engine and learner; writes nothing into the run directory.

    Raises:
        ConfigError: the model, environment, data or engine does not fit the configuration.
        MachineError: a model cannot be read, or no episode could be run.
    """
    config = composed.experiment
    with _components(config) as (components, policy, description):
        dtype = str(engine_dtype(config, policy)).removeprefix("torch.")
        limit, share = _tolerance(config, dtype, options)
        rounds = [_compare(components, "as loaded", options.episodes, limit)]
        if options.updates:
            _perturb_and_sync(components, options.updates)
            name = f"after {options.updates} update{'s' * (options.updates > 1)}"
            rounds.append(_compare(components, name, options.episodes, limit))
        episodes = [episode for comparison in rounds for episode in comparison.episodes]
        return DriftReport(
            policy=description,
            engine=config.rollout.engine,
            engine_dtype=dtype,
            learner_dtype=config.policy.dtype,
            episodes=len(episodes),
            limit=limit,
            share=share,
            rounds=tuple(comparison.result for comparison in rounds),
            respelled=_retokenization(components.tokenizer, episodes),
            templated=_template_comparison(components, episodes),
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
def _components(config: Experiment) -> Iterator[tuple[Components, Path, str]]:
    """Yield the components of the configuration's policy, its directory and its description."""
    with TemporaryDirectory(prefix="quintet-drift-") as directory:
        policy, description = _policy(config, Path(directory) / "policy")
        prompts = _prompts(config, policy)
        try:
            components = build_components(config, policy, prompts)
            try:
                components.weight_sync.sync(0)
                yield components, policy, description
            finally:
                components.close()
        finally:
            if prompts is not None:
                prompts.close()


def _policy(config: Experiment, directory: Path) -> tuple[Path, str]:
    """Return the model to check and its description: the run's last checkpoint, `policy.path`, or a preset that is
    created in `directory`."""
    has_checkpoints = config.resume != "never" and RunDirectory.from_config(config).checkpoints.is_dir()
    if config.policy.path is not None or has_checkpoints or config.resume not in ("auto", "never"):
        model = find_configured_model(config)
        return model, str(model)
    seed = derive_seed(config.seed, "policy")
    create_preset_policy(str(config.policy.preset), directory, _texts(config), seed)
    return directory, f"a new {config.policy.preset}"


def _texts(config: Experiment) -> Iterator[str]:
    if config.env.reads_prompts:
        if config.data is None:
            raise ConfigError("no data to take prompts from", key="data", hint="name files: data.train_files")
        return islice(iter_training_texts(config.data), VOCABULARY_TEXTS)
    return iter_demonstration_texts(solve_episodes(config, VOCABULARY_EPISODES))


def _prompts(config: Experiment, policy: Path) -> PromptDataset | None:
    if not config.env.reads_prompts:
        return None
    trusted = config.policy.trust_remote_code or config.policy.trust_tokenizer_code
    return PromptDataset.from_config(
        config, load_tokenizer(config.policy.tokenizer or policy, trust_remote_code=trusted)
    )


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
        raise MachineError(f"no episode could be run ({cause})", "fix that, then check again")
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
    """Decode every sequence of every episode and encode it again."""
    batch = collate(episodes)
    found: list[tuple[int, RetokenizedSpan]] = []
    columns = [column.tolist() for column in (batch.tokens, batch.turn, batch.loss_mask)]
    at = 0
    for length, episode in zip(batch.lengths.tolist(), batch.trajectory.tolist(), strict=True):
        tokens, turns, own = (column[at : at + length] for column in columns)
        found += [(episode, span) for span in find_retokenized_spans(tokenizer, tokens, turns, own)]
        at += length
    mine = [span for _, span in found if span.has_response_tokens]

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    def telling(span: RetokenizedSpan) -> tuple[bool, int]:
        """Prefer examples of complete characters and few tokens."""
        return REPLACEMENT_CHARACTER in text(span.tokens), len(span.tokens)

    example = min(mine or [span for _, span in found], key=telling, default=None)
    return RetokenizationReport(
        turns=len({(episode, span.turn) for episode, span in found if span.has_response_tokens}),
        of_turns=sum(len(episode.turns) for episode in episodes),
        own_tokens=sum(len(span.tokens) for span in mine),
        context_tokens=sum(len(span.tokens) for _, span in found if not span.has_response_tokens),
        example=example,
        text="" if example is None else text(example.tokens),
        again="" if example is None else text(example.retokenized),
    )


def _template_comparison(components: Components, episodes: Sequence[Trajectory]) -> TemplateComparison | None:
    """Rebuild every episode from its messages, and compare it with the chat template."""
    if components.chat is None:
        return None
    config, chat = components.config, components.chat
    played = {one.name: (one.rollout, build_env(one.config).instruction()) for one in config.played}
    counts: Counter[str] = Counter()
    examples: dict[str, TemplateDeviation] = {}
    rebuilt = 0
    for episode in episodes:
        dialogue, right = _rebuilt(*played[episode.env], chat, episode)
        rebuilt += right
        for departure in dialogue.compare().deviations:
            counts[str(departure.kind)] += 1
            examples.setdefault(str(departure.kind), departure)
    return TemplateComparison(
        chat.report, dict(counts), examples, rebuilt, sum(len(episode.turns) for episode in episodes)
    )


def _rebuilt(rollout: RolloutConfig, system: str, chat: ChatFormat, episode: Trajectory) -> tuple[Dialogue, int]:
    """Return the episode rebuilt from its messages, and the number of its prompts that are the same."""
    dialogue, right = Dialogue.from_config(rollout, chat, system), 0
    for turn in episode.turns:
        _, new, continues = dialogue.observe(turn.observation)
        right += (new, continues) == (turn.prompt, turn.continues)
        dialogue.add_response(turn.tokens)
    return dialogue, right
