"""All components in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from quintet.algorithms.kl import KlControl
from quintet.config.native import Experiment, OptimizerConfig, RewardConfig
from quintet.data.book import PromptBook
from quintet.envs.mixture import open_starts
from quintet.envs.seeds import Starts
from quintet.errors import ConfigError
from quintet.policies.adapters import ADAPTER_DIRECTORY, add_lora, has_lora, read_adapters, save_adapters
from quintet.policies.causal_lm import load_model, load_tokenizer, recompute_activations
from quintet.rollout.agent_loop import AgentLoop, derive_seed
from quintet.rollout.dialogue import ChatFormat
from quintet.rollout.draws import check_tokens, engine_context, requests_side_by_side
from quintet.rollout.engine import ENGINES, Engine
from quintet.rollout.prompts import PromptLoop
from quintet.rollout.streaming import GameStream
from quintet.rollout.supervision import Supervised
from quintet.runtime.engines import engine_setup
from quintet.runtime.judging import open_judge
from quintet.runtime.learners import open_actor, open_critic, open_reference
from quintet.runtime.memory import keep_freed_memory
from quintet.training.checkpoint import Checkpoint
from quintet.training.lay import Whole
from quintet.training.learner import ActorLearner, CriticLearner, Scorer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Components", "build", "end_tokens"]


@dataclass(slots=True)
class Components:
    """What a step needs. The loop that uses them doesn't know where they run."""

    experiment: Experiment
    tokenizer: Any
    actor: ActorLearner
    engine: Supervised
    games: AgentLoop | PromptLoop
    starts: Starts
    policy: Path
    """The model that the policy began as."""
    book: PromptBook | None = None
    """Questions, where such are answered."""
    stream: GameStream | None = None
    """Games that outlast their step, where such are wanted."""
    resting: bool = False
    """The engine has given its cache back."""
    critic: CriticLearner | None = None
    reference: Scorer | None = None
    kl: KlControl | None = None

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
        """The engine gives its cache back until new weights come, where that is wanted."""
        if self.experiment.rollout.engine_options.sleep_between_steps:
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

    def actor_with(self, optimizer: OptimizerConfig) -> ActorLearner:
        """The same policy under a fresh optimizer, scored as it is, whatever temperature play has."""
        return self.actor.under(optimizer)

    def grow_critic(self) -> None:
        """A critic from the policy as it is now."""
        self.critic = open_critic(self.experiment, self.actor, self.policy)

    def keep_reference(self) -> None:
        """The policy as it is now becomes the reference, or the model that the configuration names does."""
        if self.experiment.reference.path is None or self.reference is None:
            self.reference = open_reference(self.experiment, self.actor, self.policy)
        if self.kl is None and self.experiment.algorithm.kl is not None:
            self.kl = KlControl.of(self.experiment.algorithm.kl)

    def save(self, directory: Path) -> None:
        """Write every tensor that a later run goes on from; the files a checkpoint is made of."""
        self.actor.model.save_pretrained(directory / "hf", state_dict=dict(self.actor.weights()))
        self.tokenizer.save_pretrained(directory / "hf")
        if has_lora(self.actor.model):
            save_adapters(self.actor.model, directory / ADAPTER_DIRECTORY, self.policy, self.actor.adapters())
        save_file(self.actor.state(), directory / "actor_optimizer.safetensors")
        if self.critic is not None:
            save_file(dict(self.critic.weights()), directory / "critic.safetensors")
            save_file(self.critic.state(), directory / "critic_optimizer.safetensors")
        if self.reference is not None and self.experiment.reference.path is None:
            save_file(self.reference.state(), directory / "reference.safetensors")
        if self.kl is not None:
            (directory / "kl.json").write_text(json.dumps({"coefficient": self.kl.coefficient}))

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up what `save` wrote."""
        self._load_policy(checkpoint.directory)
        self.actor.load_state(load_file(checkpoint.directory / "actor_optimizer.safetensors"))
        if self.experiment.needs_critic:
            self.grow_critic()
        if self.critic is not None and (checkpoint.directory / "critic.safetensors").exists():
            self.critic.model.load_state_dict(load_file(checkpoint.directory / "critic.safetensors"))
            self.critic.load_state(load_file(checkpoint.directory / "critic_optimizer.safetensors"))
        self._load_reference(checkpoint.directory)
        training = self.experiment.training
        drawn = checkpoint.state.get("starts", {"drawn": checkpoint.step * training.groups_per_step})
        self.starts.load(drawn)
        if self.stream is not None:
            self.stream.load(drawn)
        self.sync_weights(checkpoint.step)

    def _load_policy(self, directory: Path) -> None:
        """Where adapters alone are trained, they alone: merged weights are rounded."""
        if has_lora(self.actor.model):
            self.actor.lay.load(read_adapters(self.actor.adapters(), directory / ADAPTER_DIRECTORY))
            return
        saved = load_model(directory / "hf", trust_remote_code=self.experiment.policy.trust_remote_code)
        self.actor.model.load_state_dict(saved.state_dict())

    def _load_reference(self, directory: Path) -> None:
        if not self.experiment.needs_reference:
            return
        self.keep_reference()
        path = directory / "reference.safetensors"
        if self.reference is not None and path.exists():
            self.reference.load_state(load_file(path))
        if self.kl is not None and (directory / "kl.json").exists():
            self.kl.coefficient = float(json.loads((directory / "kl.json").read_text())["coefficient"])


def _tokenizer(config: Experiment, policy: Path, vocabulary: int) -> Any:
    """The model's own, or another whose every token it knows."""
    trusted = config.policy.trust_remote_code or config.policy.trust_tokenizer_code
    tokenizer = load_tokenizer(config.policy.tokenizer or policy, trust_remote_code=trusted)
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"policy.tokenizer = {config.policy.tokenizer!r} has {len(tokenizer)} tokens, the model knows {vocabulary}",
            key="policy.tokenizer",
            value=config.policy.tokenizer,
            hint="take the model's own tokenizer: policy.tokenizer=null",
        )
    return tokenizer


def build(config: Experiment, policy: Path, book: PromptBook | None = None) -> Components:
    """Components around the policy at that directory; with a `book`, its questions are asked.

    Raises:
        MachineError: the directory isn't a model.
        ConfigError: its chat template can't carry a dialogue, or the engine is unknown.
    """
    keep_freed_memory()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    torch.manual_seed(derive_seed(config.seed, "torch"))
    trusted = config.policy.trust_remote_code
    model = load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides)
    tokenizer = _tokenizer(config, policy, model.config.vocab_size)
    check_tokens(config, model.config.vocab_size)
    if config.policy.lora is not None:
        add_lora(model, config.policy.lora, seed=derive_seed(config.seed, "adapters"))
    if config.actor.gradient_checkpointing:
        recompute_activations(model)
    actor = open_actor(config, model, config.actor.optimizer, config.rollout.temperature)
    whole = isinstance(actor.lay, Whole)
    played = model if whole else load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides)
    engine = _engine(config, policy, played, tokenizer, actor.weights, learner_owns=whole)
    games = _games(config, engine, tokenizer, model, book, policy)
    starts = book or open_starts(config)
    stream = GameStream(games, starts, config) if config.rollout.async_ratio else None
    return Components(config, tokenizer, actor, engine, games, starts, policy, book, stream)


def _engine(
    config: Experiment,
    policy: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    *,
    learner_owns: bool,
) -> Supervised:
    """What generates, on the learner's own weights where it can; one that dies is opened anew and gets `weights`."""
    setup = engine_setup(
        config,
        policy,
        model,
        tokenizer,
        engine_context(config),
        side_by_side=requests_side_by_side(config),
        learner_owns=learner_owns,
    )
    open_engine = ENGINES.get(config.rollout.engine).load()
    return Supervised(lambda: open_engine(setup), weights)


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
