"""Set up a run before its first step: data, policy, components, warm start."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.config.native.training import WarmStartConfig
from quintet.config.plan.row_counts import num_steps
from quintet.data.prompt_dataset import PromptDataset, iter_training_texts
from quintet.envs.factory import build_env
from quintet.envs.start_states import env_index, env_seed
from quintet.errors import ConfigError
from quintet.pipelines.rollout_step import validate
from quintet.pipelines.run import Run
from quintet.pipelines.warm_start import (
    DemonstrationUpdates,
    EnvDemonstrations,
    demonstration_batch,
    dump_episodes,
    iter_demonstration_texts,
    load_episodes,
    response_batch,
    solve_episodes,
)
from quintet.pipelines.warm_start_updates import restored_updates, run_updates
from quintet.policies.model_loading import load_policy_tokenizer
from quintet.policies.tiny_models import create_preset_policy
from quintet.records import Batch
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.engines.weight_verification import WeightsCheck, check_weights
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import greedy_sampling
from quintet.runtime.components import Components, build_components
from quintet.runtime.learners.learner_checkpoint import contents_to_load
from quintet.runtime.signals import StopRequest
from quintet.seeds import derive_seed
from quintet.tools.registry import tool_schemas
from quintet.tracking.atomic_files import translate_os_errors
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.checkpoint.checkpoint import Checkpoint

NUM_TRIALS = 256
MIN_LIKELY_TOKENS = 0.88
"""Share of likely tokens of the warm start below which the policy is not tried out: it does not win an episode yet."""
EPISODES_FILE = "expert_episodes.json"
"""File with the expert's episodes in a checkpoint of the warm start."""
VOCABULARY_TEXTS = 4000
"""Texts of the data from which the tokenizer of a preset is trained."""


def build_prompts(run: Run, resources: ExitStack) -> PromptDataset | None:
    """Build the prompt dataset of a run that answers prompts, and set the number of steps if it follows from the data.

    Raises:
        ConfigError: the files are missing or unreadable, or too small for one step.
    """
    config = run.config
    if config.data is None or config.env.name != "prompts":
        return None
    if run.checkpoint:
        policy_dir = run.checkpoint.directory / "hf"
    elif config.policy.path is not None:
        policy_dir = Path(config.policy.path)
    else:
        policy_dir = _create_preset(
            run, islice(iter_training_texts(config.data, tool_schemas(config.rollout.tool_calls)), VOCABULARY_TEXTS)
        )
    policy = config.policy
    tokenizer = load_policy_tokenizer(policy, policy_dir)
    images = ImagePrompts.from_directory(policy_dir, policy.vision, trust_remote_code=policy.runs_tokenizer_code)
    prompts = PromptDataset.from_config(config, tokenizer, images)
    resources.callback(prompts.close)
    if prompts.train.num_filtered:
        run.progress.note(f"left out {prompts.train.num_filtered:,} prompts that are too long")
    if not config.data.validation_files and config.validation.every_steps >= 0:
        count = prompts.num_held_out
        run.progress.note(f"no data.validation_files: validation asks {count:,} of the training prompts")
    run.set_steps(num_steps(config, len(prompts.train)))
    return prompts


def set_up(run: Run, prompts: PromptDataset | None, stop: StopRequest, resources: ExitStack) -> Components:
    """Build the components and restore the run's checkpoint, or run the warm start and save it as checkpoint 0."""
    if run.checkpoint:
        return _restore(run, run.checkpoint, prompts, resources)
    config = run.config
    demonstrations = [] if prompts else _solve_episodes(run)
    components = _build(run, _initial_policy(run, demonstrations), prompts, resources)
    if config.warm_start:
        _warm_start(run, components, config.warm_start, demonstrations, stop)
    if config.needs_critic:
        components.learners.create_critic()
    if config.needs_reference:
        components.learners.snapshot_reference()
    components.weight_sync.sync(0)
    if config.rollout.engine_options.validate_weights:
        run.progress.note(str(_verify_engine_weights(components)))
    if config.validation.before_training or config.validation.only:
        run.log(0, validate(run, components, 0))
    run.save(0, components.checkpoint.save, **components.checkpoint.extra_state())
    return components


def _restore(run: Run, checkpoint: Checkpoint, prompts: PromptDataset | None, resources: ExitStack) -> Components:
    components = _build(run, _policy_to_resume(run.config, checkpoint), prompts, resources)
    components.checkpoint.load(checkpoint)
    components.weight_sync.sync(checkpoint.step)
    run.progress.note(f"resuming from {checkpoint.directory}")
    if run.config.validation.only:
        run.log(checkpoint.step, validate(run, components, checkpoint.step))
    return components


def _policy_to_resume(config: Experiment, checkpoint: Checkpoint) -> Path:
    """Return the checkpoint's model, or the initial one if no weights are loaded from the checkpoint.

    Raises:
        ConfigError: there is no initial model.
    """
    contents = contents_to_load(checkpoint, config.checkpoint.load_contents)
    if {"model", "hf_model"} & set(contents):
        return checkpoint.directory / "hf"
    if config.policy.path is None:
        message = "checkpoint.load_contents names no weights, and policy.path, which they would come from, is null"
        hint = "add model or hf_model to it"
        raise ConfigError(message, key="checkpoint.load_contents", value=list(contents), hint=hint)
    return Path(config.policy.path)


def _build(run: Run, policy_dir: Path, prompts: PromptDataset | None, resources: ExitStack) -> Components:
    """Build the components, and note how the chat template differs from plain multi-turn chats."""
    components = build_components(run.config, policy_dir, prompts, run.controller)
    resources.callback(components.close)
    for line in components.chat.report.lines() if components.chat else ():
        run.progress.note(f"chat template: {line}")
    return components


def _verify_engine_weights(components: Components) -> WeightsCheck:
    """Compare each engine with the learner on a few prompts that no step uses."""
    config = components.config
    starts = components.start_states.warm_start_check_starts(4)
    if components.chat is None or components.prompts is not None:
        rows = map(components.prompts.prompt, starts) if components.prompts else ()
        prompts = [tuple(token for token in row if token >= 0) for row in rows]  # images have negative tokens
    else:
        envs = [build_env(env.config) for env in config.run_envs]
        seeded = [(envs[env_index(start)], env_seed(start)) for start in starts]
        prompts = [components.chat.initial_prompt(env.instruction(), env.reset(seed).text) for env, seed in seeded]
    exact = config.rollout.engine_options.dtype in (None, "float32") and config.policy.dtype == "float32"
    path = config.rollout.engine_options.validate_weights_dir
    model, directory = components.learners.actor.model, Path(path) if path else None
    engines = components.engines.engines
    checks = [check_weights(engine, model, prompts, same_dtype=exact, directory=directory) for engine in engines]
    return checks[0]


def _solve_episodes(run: Run) -> list[EnvDemonstrations]:
    """Return the expert's episodes that the warm start or the tokenizer of a preset is trained on; on resume those of
    the checkpoint."""
    config = run.config
    if run.warm_start_checkpoint:
        return load_episodes(config, (run.warm_start_checkpoint.directory / EPISODES_FILE).read_bytes())
    if config.warm_start is None and config.policy.path is not None:
        return []
    episodes = config.warm_start.episodes if config.warm_start else 100
    run.progress.note(f"solving {episodes} {' and '.join(env.name for env in config.run_envs)} episodes")
    return solve_episodes(config, episodes)


def _initial_policy(run: Run, demonstrations: list[EnvDemonstrations]) -> Path:
    """Return the directory of the initial policy; create a preset there, unless `build_prompts` already has."""
    config = run.config
    if config.policy.path is not None:
        return Path(config.policy.path)
    if config.data is not None:
        return run.directory.policy
    return _create_preset(run, iter_demonstration_texts(demonstrations))


def _create_preset(run: Run, texts: Iterable[str]) -> Path:
    """Create the preset in the run's directory, with a tokenizer trained on the texts; on resume it is there."""
    config = run.config
    if run.directory.policy.is_dir():
        return run.directory.policy
    with translate_os_errors(run.directory.policy):
        create_preset_policy(str(config.policy.preset), run.directory.policy, texts, derive_seed(config.seed, "policy"))
    return run.directory.policy


def _warm_start(
    run: Run,
    components: Components,
    warm_start: WarmStartConfig,
    demonstrations: list[EnvDemonstrations],
    stop: StopRequest,
) -> None:
    """Train the policy on demonstrations until it wins often enough.

    Raises:
        InterruptedRun: a stop was requested; the checkpoint has been written.
    """
    batch = _demonstration_batch(components, warm_start, demonstrations)
    actor = components.learners.actor_with_optimizer(warm_start.optimizer)
    done = restored_updates(run, components.learners, warm_start)
    update = DemonstrationUpdates(actor, batch, warm_start, run.config.seed)

    def save(number: int, completed: bool) -> None:
        _save_warm_start(run, components, number, demonstrations, completed=completed)

    def wins_enough(number: int, metrics: dict[str, float]) -> bool:
        is_likely = metrics["sft/likely_tokens"] > MIN_LIKELY_TOKENS
        return is_likely and _wins_enough(components, warm_start, number)

    run_updates(run, warm_start, stop, update, save, wins_enough, done=done)
    components.learners.release_warm_start_actor()


def _save_warm_start(
    run: Run, components: Components, update: int, demonstrations: list[EnvDemonstrations], *, completed: bool
) -> None:
    """Save weights, optimizer and expert episodes; the order of the episodes follows from the seed."""

    def copy(directory: Path) -> WriteFiles:
        write = components.checkpoint.save(directory)

        def write_all(checkpoint: Path) -> None:
            write(checkpoint)
            (checkpoint / EPISODES_FILE).write_bytes(dump_episodes(demonstrations))

        return write_all

    extra = components.learners.extra_state() if "extra" in run.config.checkpoint.contents else {}
    run.save(update, copy, in_warm_start=True, completed=completed, **extra)


def _demonstration_batch(
    components: Components, warm_start: WarmStartConfig, demonstrations: list[EnvDemonstrations]
) -> Batch:
    """Return the expert's episodes, or the demonstrated responses of the data."""
    if components.chat is not None:
        return demonstration_batch(demonstrations, components.chat)
    if components.prompts is None:
        raise ValueError("a run has either a chat format or prompts")
    return response_batch(components.prompts, warm_start.episodes, components.tokenizer, components.config)


def _wins_enough(components: Components, config: WarmStartConfig, update: int) -> bool:
    """Return whether the policy wins `until_success` of some training episodes that no step uses."""
    if config.until_success is None or update % config.check_every_updates:
        return False
    components.weight_sync.sync(0)
    episodes = [
        Episode(start, index, 0)
        for index, start in enumerate(components.start_states.warm_start_check_starts(NUM_TRIALS))
    ]
    trajectories = components.envs.collect_rollouts(episodes, greedy_sampling(components.config))
    return sum(trajectory.success for trajectory in trajectories) >= config.until_success * len(episodes)
