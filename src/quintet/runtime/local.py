"""All components in this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.algorithms.kl import KlControl
from quintet.config.native import Experiment, OptimizerConfig, RewardConfig
from quintet.data.book import PromptBook
from quintet.envs.mixture import open_starts
from quintet.envs.seeds import Starts
from quintet.errors import ConfigError
from quintet.policies.causal_lm import load_model, load_tokenizer
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.dialogue import ChatFormat
from quintet.rollout.draws import check_tokens, engine_context, requests_side_by_side
from quintet.rollout.engine import ENGINES, Engine
from quintet.rollout.prompts import PromptLoop
from quintet.rollout.streaming import GameStream
from quintet.rollout.supervision import Supervised
from quintet.runtime.conducting import ConductedLearners, Conductor
from quintet.runtime.device import beside_engine
from quintet.runtime.engines import engine_setup
from quintet.runtime.judging import open_judge
from quintet.runtime.learners import Learners
from quintet.runtime.storing import HF, contents_to_load
from quintet.training.checkpoint import Checkpoint
from quintet.training.handles import Actor, Critic, Judge
from quintet.training.hf_directory import files_of, put_files
from quintet.training.optimizer import fixed
from quintet.training.saving import Write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Components", "build", "end_tokens"]


@dataclass(slots=True)
class Components:
    """What a step needs. The loop that uses them doesn't know where they run."""

    experiment: Experiment
    tokenizer: Any
    learners: Learners | ConductedLearners
    engine: Supervised
    games: AgentLoop | PromptLoop
    starts: Starts
    book: PromptBook | None = None
    """Questions, where such are answered."""
    stream: GameStream | None = None
    """Games that outlast their step, where such are wanted."""
    resting: bool = False
    """The engine has given its cache back."""
    kl: KlControl | None = None
    schedule_from: int = 0
    """The step at which learning rates begin their schedules."""
    schedule: OptimizerConfig | None = None
    """That of the policy, where it is a checkpoint's rather than the configuration's."""
    _words: dict[str, bytes] = field(default_factory=dict)
    """The tokenizer's files."""

    @property
    def actor(self) -> Actor:
        """What trains the policy."""
        return self.learners.actor

    @property
    def critic(self) -> Critic | None:
        """What trains the critic, where there is one."""
        return self.learners.critic

    @property
    def reference(self) -> Judge | None:
        """The policy from which divergence is measured, where there is one."""
        return self.learners.reference

    @property
    def chat(self) -> ChatFormat:
        """The policy's chat template, taken apart.

        Raises:
            ConfigError: it can't carry a dialogue.
        """
        if isinstance(self.games, AgentLoop):
            return self.games.chat
        return _chat(self.experiment, self.tokenizer, self.actor.model)

    def close(self) -> None:
        """Let go of processes."""
        self.games.close()
        self.engine.close()

    def rest(self) -> None:
        """The engine gives its cache, and its own weights, back until new ones come, where that is wanted."""
        options = self.experiment.rollout.engine_options
        if options.sleep_between_steps or options.offload:
            self.engine.sleep()
            self.resting = True

    def sync_weights(self, version: int) -> None:
        """Give the learner's weights to the engine."""
        if self.resting:
            self.engine.wake()
            self.resting = False
        self.engine.load_weights(version, self.actor.weights())

    def progress(self) -> dict[str, Any]:
        """How far start states were drawn, for a checkpoint. Games in flight are given up: they are begun anew."""
        return self.starts.state() | (self.stream.suspend() if self.stream else {})

    def actor_with(self, optimizer: OptimizerConfig) -> Actor:
        """The same policy under a fresh optimizer, scored as it is, whatever temperature play has."""
        return self.learners.actor_with(optimizer)

    def grow_critic(self) -> None:
        """A critic from the policy as it is now."""
        self.learners.grow_critic()

    def keep_reference(self) -> None:
        """The policy as it is now becomes the reference, or the model that the configuration names does."""
        self.learners.keep_reference()
        self._steer()

    def _steer(self) -> None:
        if self.kl is None and self.experiment.algorithm.kl is not None:
            self.kl = KlControl.of(self.experiment.algorithm.kl)

    def save(self, directory: Path) -> Write:
        """Take copies of everything that a later run goes on from; gives what writes them into a checkpoint, which is
        made in that directory."""
        write = self.learners.save(directory)
        self._words = self._words or files_of(self.tokenizer.save_pretrained)
        words = self._words

        def write_all(place: Path) -> None:
            write(place)
            put_files(place / HF, words)

        return write_all

    def extra(self) -> dict[str, Any]:
        """What besides tensors a later run goes on by, for JSON."""
        if "extra" not in self.experiment.checkpoint.contents:
            return {}
        steered = {} if self.kl is None else {"kl_coefficient": self.kl.coefficient}
        own = self.schedule or fixed(self.experiment.actor.optimizer, self.experiment.training.steps)
        schedule = own.model_dump(mode="json")
        return {"starts": self.progress(), "actor_schedule": schedule, **steered, **self.learners.extra()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up what a checkpoint holds, as far as `checkpoint.load_contents` asks for it.

        Raises:
            ConfigError: it doesn't hold that.
            MachineError: it is that of another model.
        """
        contents = contents_to_load(checkpoint, self.experiment.checkpoint.load_contents)
        extra = checkpoint.state if "extra" in contents else {}
        scales = {name: value for name, value in extra.items() if name.endswith("_scale")}
        self.learners.load(checkpoint.directory, contents, scales)
        if self.experiment.needs_reference:
            self._steer()
        if self.kl is not None and "kl_coefficient" in extra:
            self.kl.coefficient = float(extra["kl_coefficient"])
        megatron = self.experiment.actor.megatron
        if megatron is not None and megatron.use_checkpoint_opt_param_scheduler and "actor_schedule" in extra:
            self.schedule = OptimizerConfig.model_validate(extra["actor_schedule"], strict=False)
        if "starts" in extra:
            self.starts.load(extra["starts"])
        else:
            self.schedule_from = checkpoint.step
        if self.stream is not None and "starts" in extra:
            self.stream.load(extra["starts"])
        self.sync_weights(checkpoint.step)


def _tokenizer(config: Experiment, policy: Path, vocabulary: int) -> Any:
    """The model's own, or another whose every token it knows."""
    trusted = config.policy.trust_remote_code or config.policy.trust_tokenizer_code
    tokenizer = load_tokenizer(
        config.policy.tokenizer or policy, trust_remote_code=trusted, fast=config.policy.fast_tokenizer
    )
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"policy.tokenizer = {config.policy.tokenizer!r} has {len(tokenizer)} tokens, the model knows {vocabulary}",
            key="policy.tokenizer",
            value=config.policy.tokenizer,
            hint="take the model's own tokenizer: policy.tokenizer=null",
        )
    return tokenizer


def build(
    config: Experiment, policy: Path, book: PromptBook | None = None, conductor: Conductor | None = None
) -> Components:
    """Components around the policy at that directory; with a `book`, its questions are asked. A `conductor` has the
    learners on all its ranks.

    Raises:
        MachineError: the directory isn't a model.
        ConfigError: its chat template can't carry a dialogue, or the engine is unknown.
    """
    learners = conductor.open(policy) if conductor else Learners.open(config, policy)
    model = learners.actor.model
    tokenizer = _tokenizer(config, policy, model.config.vocab_size)
    check_tokens(config, model.config.vocab_size)
    engine = _engine(config, policy, _played(config, policy, learners), tokenizer, learners)
    games = _games(config, engine, tokenizer, model, book, policy)
    starts = book or open_starts(config)
    stream = GameStream(games, starts, config) if config.rollout.async_ratio else None
    return Components(config, tokenizer, learners, engine, games, starts, book, stream)


def _played(config: Experiment, policy: Path, learners: Learners | ConductedLearners) -> PreTrainedModel:
    """What an engine in this process generates with: the learner's own model, or where its weights are cut up another
    that gets them."""
    if learners.whole:
        return learners.actor.model
    trusted, overrides = config.policy.trust_remote_code, config.policy.overrides
    return beside_engine(load_model(policy, trust_remote_code=trusted, overrides=overrides), config)


def _engine(
    config: Experiment,
    policy: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    learners: Learners | ConductedLearners,
) -> Supervised:
    """What generates, on the learner's own weights where it can; one that dies is opened anew and gets its weights."""
    setup = engine_setup(
        config,
        policy,
        model,
        tokenizer,
        engine_context(config),
        side_by_side=requests_side_by_side(config),
        learner_owns=learners.whole,
    )
    open_engine = ENGINES.get(config.rollout.engine).load()
    return Supervised(lambda: open_engine(setup), learners.actor.weights)


def _games(
    config: Experiment, engine: Engine, tokenizer: Any, model: PreTrainedModel, book: PromptBook | None, policy: Path
) -> AgentLoop | PromptLoop:
    """What plays: worlds turn by turn, or questions with one answer each."""
    if book is None:
        return AgentLoop.of(engine, _chat(config, tokenizer, model), config)
    judge, ends = open_judge(config, policy, book.sources()), end_tokens(tokenizer, model)
    limit = config.reward.max_failed_share if config.reward else RewardConfig(function_arguments={}).max_failed_share
    return PromptLoop(engine, tokenizer, book, judge, config.rollout, ends=ends, max_failed_share=limit)


def _chat(config: Experiment, tokenizer: Any, model: PreTrainedModel) -> ChatFormat:
    own = config.rollout.end_token
    return ChatFormat.under(config.rollout, tokenizer, end_tokens(tokenizer, model) if own is None else (own,))


def end_tokens(tokenizer: Any, model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, and those that the model's generation settings name."""
    named = getattr(model.generation_config, "eos_token_id", None)
    listed = [named] if isinstance(named, int) else list(named or ())
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *listed]))
