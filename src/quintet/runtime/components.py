"""Components of a run: the controller's handles on learners, engines and environments, and what connects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.algorithms.kl import KlControl
from quintet.config.native.data import RewardConfig
from quintet.config.native.experiment import Experiment
from quintet.config.plan.overlap import overlaps_training
from quintet.config.plan.process_layout import process_layout
from quintet.data.prompt_dataset import PromptDataset
from quintet.data.start_state_files import build_start_states
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.start_states import StartStates
from quintet.envs.vector_env import VectorEnv
from quintet.rewards.ground_truths import check_rows
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.async_rollout import AsyncRollout
from quintet.rollout.background_rollout import BackgroundRollout, PausingEnvs
from quintet.rollout.channel import ChannelCounter
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.episode_limits import build_episode_rules
from quintet.rollout.multi_turn_loop import build_prompt_loop
from quintet.rollout.sampling_params import check_tokens
from quintet.rollout.single_turn_loop import SingleTurnLoop
from quintet.rollout.turn_channels import with_turn_channels
from quintet.runtime.controller import Controller
from quintet.runtime.engines.engine_builders import engine_builder, load_checked_tokenizer
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.engines.free_running_engines import FreeRunningEngines
from quintet.runtime.engines.weight_sources import WeightSync
from quintet.runtime.groups import EnvGroup
from quintet.runtime.learners.optimizer_schedules import OptimizerSchedules
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.runtime.reward_scorer import build_reward_scorer
from quintet.runtime.run_checkpoint import RunCheckpoint, TokenizerFiles


@dataclass(frozen=True, slots=True)
class Components:
    """Everything that a training step uses; the handles do not show in which process a component runs."""

    config: Experiment
    tokenizer: Any
    learners: LearnerGroup
    engines: RoutedEngines
    envs: EnvGroup
    start_states: StartStates
    weight_sync: WeightSync
    schedules: OptimizerSchedules
    checkpoint: RunCheckpoint
    chat: ChatFormat | None = None
    """Chat format of multi-turn episodes; None if prompts are answered."""
    prompts: PromptDataset | None = None
    kl: KlControl | None = None
    """Coefficient of the KL divergence in the rewards, if there is one."""
    async_rollout: AsyncRollout | None = None
    """Collects episodes that may outlast their step; None if every step waits for its own."""
    group_channel: ChannelCounter | None = None
    """Channel for the complete groups of such a step, if it has a name or a size."""

    def close(self) -> None:
        """Stop the rollout and the processes of environments and engines."""
        if self.async_rollout is not None:
            self.async_rollout.close()
        self.envs.close()
        self.engines.close()


def build_components(
    config: Experiment, policy: Path, prompts: PromptDataset | None = None, controller: Controller | None = None
) -> Components:
    """Build the components around the policy at that directory, with learners on the workers of the controller or,
    without one, in this process.

    Raises:
        MachineError: the directory contains no model.
        ConfigError: the chat template does not support multi-turn episodes, the engine is unknown, or a verifier cannot
            compare with the ground truths of the prompts.
    """
    if prompts is not None:
        check_rows(prompts.first_rows(), config.reward or RewardConfig(function_arguments={}))
    controller = controller or Controller.in_process()
    learners = controller.build_learners(config, policy)
    model = learners.actor.model
    tokenizer = load_checked_tokenizer(config, policy, model.config.get_text_config().vocab_size)
    check_tokens(config, model.config.get_text_config().vocab_size)
    engines, weight_sync = build_engines(config, policy, tokenizer, learners, controller)
    chat = None
    if not prompts:
        images = ImagePrompts.from_model(model, config.policy.vision)
        chat = build_chat_format(config, tokenizer, stop_token_ids(tokenizer, model.generation_config), images)
    envs: AgentLoop | SingleTurnLoop
    if chat is not None:
        vector_env: VectorEnv = controller.build_env_hosts(config) or build_run_envs(config)
        engine, vector_env = with_turn_channels(config, engines, vector_env, len(engines.engines))
        envs = AgentLoop(engine, chat, vector_env, build_episode_rules(config))
    elif prompts is not None:
        envs = _single_turn_loop(config, engines, tokenizer, learners, prompts, policy, controller)
    start_states = prompts or build_start_states(config)
    schedules = OptimizerSchedules(config)
    penalty = config.algorithm.kl_in_reward
    kl = None if penalty is None else KlControl.from_config(penalty)
    async_rollout = _build_async_rollout(config, envs, start_states, engines)
    tokenizer_files, groups = TokenizerFiles(tokenizer), config.placement.rollout.channel
    return Components(
        config=config,
        tokenizer=tokenizer,
        learners=learners,
        engines=engines,
        envs=PausingEnvs(envs, async_rollout) if isinstance(async_rollout, BackgroundRollout) else envs,
        start_states=start_states,
        weight_sync=weight_sync,
        schedules=schedules,
        checkpoint=RunCheckpoint(config, learners, tokenizer_files, start_states, schedules, kl, async_rollout),
        chat=chat,
        prompts=prompts,
        kl=kl,
        async_rollout=async_rollout,
        group_channel=None if async_rollout is not None or groups.is_default else ChannelCounter(groups),
    )


def build_engines(
    config: Experiment, policy: Path, tokenizer: Any, learners: LearnerGroup, controller: Controller
) -> tuple[RoutedEngines, WeightSync]:
    """Build the engines of all ranks; return them, and how they get the actor's weights.

    Raises:
        ConfigError: the engine is unknown, or the KV cache of one request does not fit.
    """
    remote = controller.build_remote_engines(config, policy, learners)
    engines = remote.engines()
    if process_layout(config).has_engine(0) or not engines:
        builder = engine_builder(config, policy, learners, tokenizer)
        engines.insert(0, RestartingEngine(builder, remote.weights))
    group_class = FreeRunningEngines if overlaps_training(config) else RoutedEngines
    group = group_class(engines, config.placement.join_timeout_seconds)
    return group, WeightSync(remote.weights, group, config)


def _build_async_rollout(
    config: Experiment, envs: AgentLoop | SingleTurnLoop, start_states: StartStates, engines: RoutedEngines
) -> AsyncRollout | None:
    """Return what runs episodes across steps: in a thread if engines have devices of their own, between updates
    otherwise."""
    if isinstance(engines, FreeRunningEngines):
        return BackgroundRollout(envs, start_states, config, engines.load_missing_weights)
    return AsyncRollout(envs, start_states, config) if config.rollout.async_ratio else None


def _single_turn_loop(
    config: Experiment,
    engines: RoutedEngines,
    tokenizer: Any,
    learners: LearnerGroup,
    prompts: PromptDataset,
    policy: Path,
    controller: Controller,
) -> SingleTurnLoop:
    reward = config.reward or RewardConfig(function_arguments={})
    sources = {row.data_source for row in prompts.first_rows()}
    scorer = build_reward_scorer(config, policy, sources, learners.load_reward_model, controller.start_judge_servers)
    return build_prompt_loop(
        engines,
        tokenizer,
        prompts,
        scorer,
        config,
        stop_token_ids=stop_token_ids(tokenizer, learners.actor.model.generation_config),
        max_failed_share=reward.max_failed_share,
    )


def build_chat_format(
    config: Experiment, tokenizer: Any, stop_tokens: Sequence[int], images: ImagePrompts | None
) -> ChatFormat:
    """Build the chat format of a run; `stop_tokens` are those of the policy, see `stop_token_ids`.

    Raises:
        ConfigError: the chat template does not support multi-turn episodes.
    """
    end_token = config.rollout.end_token
    extra_ids = stop_tokens if end_token is None else (end_token,)
    return ChatFormat.from_config(config.rollout, tokenizer, extra_ids, images)


def stop_token_ids(tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's EOS token and those of the model's generation config."""
    named = getattr(generation_config, "eos_token_id", None)
    listed = [named] if isinstance(named, int) else list(named or ())
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *listed]))
