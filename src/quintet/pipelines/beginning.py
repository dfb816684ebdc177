"""What comes before the first step: data, policy, components, warm start."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from quintet.config.native import Experiment, WarmStartConfig
from quintet.config.plan import steps_of
from quintet.data.book import PromptBook, texts_of
from quintet.envs.catalogue import make_world
from quintet.envs.seeds import seed_of, world_of
from quintet.errors import ConfigError, InterruptedRun
from quintet.pipelines.playing import validate
from quintet.pipelines.run import Run
from quintet.pipelines.warm_start import (
    Lesson,
    answer_batch,
    corpus,
    demonstration_batch,
    learn_demonstrations,
    lessons,
)
from quintet.policies.causal_lm import load_tokenizer
from quintet.policies.tiny import make_policy
from quintet.records import Batch
from quintet.rollout.agent_loop import Game, derive_seed
from quintet.rollout.draws import greedy_sampling
from quintet.rollout.weights_check import WeightsCheck, check_weights
from quintet.runtime.local import Components, build
from quintet.runtime.stop import StopRequest
from quintet.runtime.storing import contents_to_load
from quintet.tracking.loggers import JsonlLogger, LoggerContext
from quintet.tracking.run_directory import machine_errors
from quintet.training.checkpoint import Checkpoint

__all__ = ["begin", "interrupted", "open_prompts"]

TRIALS = 256
TRIAL_ACCURACY = 0.88
"""Token accuracy below which a trial of the warm start isn't worth its time: nothing is won yet."""
VOCABULARY_TEXTS = 4000
"""Texts of the data from which a made policy learns its vocabulary."""


def open_prompts(run: Run, opened: ExitStack) -> PromptBook | None:
    """The questions of a run that answers some; where passes over them say how many steps it has, it now knows.

    Raises:
        ConfigError: the files are missing or unreadable, or give no step.
    """
    config = run.config
    if config.data is None or config.world.name != "prompts":
        return None
    if run.checkpoint:
        policy = run.checkpoint.directory / "hf"
    elif config.policy.path is not None:
        policy = Path(config.policy.path)
    else:
        policy = _made_policy(run, islice(texts_of(config.data), VOCABULARY_TEXTS))
    trusted = config.policy.trust_remote_code or config.policy.trust_tokenizer_code
    book = PromptBook.of(config, load_tokenizer(config.policy.tokenizer or policy, trust_remote_code=trusted))
    opened.callback(book.close)
    if book.train.left_out:
        run.progress.note(f"{book.train.left_out:,} questions are too long and left out")
    run.settle(steps_of(config, len(book.train)))
    return book


def begin(run: Run, book: PromptBook | None, stop: StopRequest, opened: ExitStack) -> Components:
    """Components at the checkpoint, or at the end of the warm start, which is checkpoint 0; `opened` closes them."""
    config = run.config
    if run.checkpoint:
        components = _built(run, _policy_to_go_on_with(run.config, run.checkpoint), book)
        opened.callback(components.close)
        components.load(run.checkpoint)
        run.progress.note(f"going on from {run.checkpoint.directory}")
        if config.validation.only:
            run.log(run.checkpoint.step, validate(run, components, run.checkpoint.step))
        return components
    demonstrations = [] if book else _demonstrations(run)
    components = _built(run, _policy(run, demonstrations), book)
    opened.callback(components.close)
    if config.warm_start:
        _warm_start(run, components, config.warm_start, demonstrations, stop)
    if config.needs_critic:
        components.grow_critic()
    if config.needs_reference:
        components.keep_reference()
    components.sync_weights(0)
    if config.rollout.engine_options.validate_weights:
        run.progress.note(str(_checked(components)))
    if config.validation.before_training or config.validation.only:
        run.log(0, validate(run, components, 0))
    run.save(0, components)
    return components


def _policy_to_go_on_with(config: Experiment, checkpoint: Checkpoint) -> Path:
    """The checkpoint's, or where its weights aren't wanted the one that the run began with.

    Raises:
        ConfigError: that one isn't kept.
    """
    contents = contents_to_load(checkpoint, config.checkpoint.load_contents)
    if {"model", "hf_model"} & set(contents):
        return checkpoint.directory / "hf"
    if config.policy.path is None:
        told = "checkpoint.load_contents names no weights, and policy.path, from which they would come, is null"
        raise ConfigError(told, key="checkpoint.load_contents", value=list(contents), hint="add model")
    return Path(config.policy.path)


def _built(run: Run, policy: Path, book: PromptBook | None) -> Components:
    """Components around that policy; what its chat template does otherwise than plain dialogues is told."""
    components = build(run.config, policy, book, run.conductor)
    for line in () if book else components.chat.report.lines():
        run.progress.note(f"chat template: {line}")
    return components


def _checked(components: Components) -> WeightsCheck:
    """Engine against learner, on a few prompts that the steps don't use."""
    config = components.experiment
    starts = components.starts.trials(4)
    if components.book is not None:
        prompts = [components.book.prompt(start) for start in starts]
    else:
        worlds = [make_world(one.config) for one in config.played]
        at = [(worlds[world_of(start)], seed_of(start)) for start in starts]
        prompts = [components.chat.first(world.instruction(), world.reset(seed).text) for world, seed in at]
    exact = config.rollout.engine_options.dtype in (None, "float32") and config.policy.dtype == "float32"
    directory = config.rollout.engine_options.validate_weights_dir
    where = Path(directory) if directory else None
    return check_weights(components.engine.present, components.actor.model, prompts, exact=exact, directory=where)


def _demonstrations(run: Run) -> list[Lesson]:
    config = run.config
    if config.warm_start is None and config.policy.path is not None:
        return []
    games = config.warm_start.games if config.warm_start else 100
    run.progress.note(f"solving {games} {' and '.join(one.name for one in config.played)} games")
    return lessons(config, games)


def _policy(run: Run, demonstrations: list[Lesson]) -> Path:
    """The directory of the policy to start from; a preset is made there first, unless the questions did already."""
    config = run.config
    if config.policy.path is not None:
        return Path(config.policy.path)
    if config.data is not None:
        return run.directory.policy
    return _made_policy(run, corpus(demonstrations))


def _made_policy(run: Run, texts: Iterable[str]) -> Path:
    config = run.config
    with machine_errors(run.directory.policy):
        make_policy(str(config.policy.preset), run.directory.policy, texts, derive_seed(config.seed, "policy"))
    return run.directory.policy


def _warm_start(
    run: Run,
    components: Components,
    warm_start: WarmStartConfig,
    demonstrations: list[Lesson],
    stop: StopRequest,
) -> None:
    config = run.config
    batch = _shown(config, components, warm_start, demonstrations)
    log = JsonlLogger(LoggerContext(run.directory.path, filename=run.directory.warm_start.name))
    with run.progress.phase("warm start", warm_start.updates, unit="update") as progress:

        def report(update: int, metrics: dict[str, float]) -> bool:
            if stop:
                raise interrupted(run, stop, 0)
            enough = metrics["sft/token_accuracy"] > TRIAL_ACCURACY and _wins_enough(components, warm_start, update)
            log.log(update, run.seconds, metrics)
            progress.advance(metrics)
            return enough

        try:
            learn_demonstrations(components.actor_with(warm_start.optimizer), batch, warm_start, config.seed, report)
        finally:
            log.close()


def _shown(
    config: Experiment, components: Components, warm_start: WarmStartConfig, demonstrations: list[Lesson]
) -> Batch:
    """What the warm start learns: solved games, or demonstrated answers."""
    book = components.book
    if book is not None:
        return answer_batch(book, warm_start.games, components.tokenizer, config.rollout)
    return demonstration_batch(demonstrations, components.chat)


def _wins_enough(components: Components, config: WarmStartConfig, update: int) -> bool:
    """Whether the policy wins `until_success` of some training games that the steps don't use."""
    if config.until_success is None or update % config.check_every_updates:
        return False
    components.sync_weights(0)
    games = [Game(start, index, 0) for index, start in enumerate(components.starts.trials(TRIALS))]
    won = sum(trajectory.success for trajectory in components.games.play(games, greedy_sampling(components.experiment)))
    return won >= config.until_success * len(games)


def interrupted(run: Run, stop: StopRequest, step: int) -> InterruptedRun:
    """How a run that was asked to stop ends."""
    if step == 0:
        return InterruptedRun(f"stopped by {stop.signal} in the warm start", "the same command begins it again")
    return InterruptedRun(
        f"stopped by {stop.signal} after step {step}; {run.directory.path} is ready to go on",
        "the same command goes on from its last checkpoint",
    )
