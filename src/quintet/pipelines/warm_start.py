"""Supervised start: the policy learns the form of a reply and first moves from solved games."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quintet.algorithms.objective import Imitation
from quintet.config.native import Experiment, PlayedWorld, RolloutConfig, WarmStartConfig
from quintet.config.native.mixture import apportioned
from quintet.data.book import PromptBook
from quintet.data.demonstrations import Demonstration, demonstrate
from quintet.envs.catalogue import make_world, under_key
from quintet.envs.seeds import Split
from quintet.errors import ConfigError
from quintet.records import Batch, Outcome, Question, StopReason, Trajectory, Turn
from quintet.rollout.agent_loop import derive_seed
from quintet.rollout.assemble import assemble
from quintet.rollout.dialogue import ChatFormat, Dialogue
from quintet.rollout.replies import ReplyFormat
from quintet.training.handles import Actor
from quintet.training.optimizer import learning_rate, weight_decay
from quintet.training.packing import select_sequences

__all__ = ["Lesson", "answer_batch", "corpus", "demonstration_batch", "learn_demonstrations", "lessons"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """Solved games of one world, and how they are told."""

    games: Sequence[Demonstration]
    instruction: str
    replies: ReplyFormat
    rollout: RolloutConfig


def lessons(config: Experiment, games: int) -> list[Lesson]:
    """So many solved games of the run's world, or of each of its worlds by share, at least one of each.

    Raises:
        ConfigError: a world has no expert, or hardly a game can be won.
    """
    parts = apportioned(games, [one.share for one in config.played])
    return [_lesson(one, max(1, part), config) for one, part in zip(config.played, parts, strict=True)]


def _lesson(one: PlayedWorld, games: int, config: Experiment) -> Lesson:
    with under_key(one.key):
        world = make_world(one.config)
    try:
        won = demonstrate(
            lambda: make_world(one.config),
            games,
            split=Split.DEMONSTRATION,
            max_turns=one.rollout.max_turns,
            max_actions_per_turn=one.rollout.max_actions_per_turn,
        )
    except ConfigError as error:
        if not config.worlds:
            raise
        told = f"worlds.{one.name}: {error.message}"
        raise ConfigError(told, key=error.key, value=error.value, hint=error.hint) from error
    return Lesson(won, world.instruction(), ReplyFormat.under(one.rollout, world.actions), one.rollout)


def corpus(shown: Iterable[Lesson]) -> Iterator[str]:
    """What a made policy's tokenizer is trained on: every text of the demonstrations."""
    for lesson in shown:
        yield f"system\n{lesson.instruction}"
        for turn in (turn for game in lesson.games for turn in game.turns):
            yield f"user\n{turn.observation}\nassistant\n"
            yield lesson.replies.write(turn.thought, turn.actions)


def demonstration_batch(shown: Iterable[Lesson], chat: ChatFormat) -> Batch:
    """Demonstrations as the policy would have played them, the replies under the loss mask."""
    games = ((lesson, game) for lesson in shown for game in lesson.games)
    return assemble(_as_trajectory(game, number, chat, lesson) for number, (lesson, game) in enumerate(games))


def _as_trajectory(demonstration: Demonstration, number: int, chat: ChatFormat, lesson: Lesson) -> Trajectory:
    dialogue = Dialogue.under(lesson.rollout, chat, lesson.instruction)
    turns: list[Turn] = []
    for shown in demonstration.turns:
        _, new, continues = dialogue.observe(shown.observation)
        text = lesson.replies.write(shown.thought, shown.actions)
        tokens = chat.written(text)
        dialogue.reply(tokens)
        turns.append(
            Turn(
                observation=shown.observation,
                prompt=new,
                continues=continues,
                tokens=tokens,
                logprobs=(0.0,) * len(tokens),
                weight_version=0,
                text=text,
                actions=shown.actions,
                valid_format=True,
                reward=0.0,
                stop=StopReason.STOP,
            )
        )
    return Trajectory("demonstration", demonstration.seed, number, 0, tuple(turns), Outcome.SUCCESS)


def answer_batch(book: PromptBook, rows: int, tokenizer: Any, rollout: RolloutConfig) -> Batch:
    """Demonstrated answers of up to `rows` training questions as the policy would have given them, the answers
    under the loss mask.

    Raises:
        ConfigError: no row has one.
    """
    shown = [(number, book[number]) for number in book.shown(rows)]
    found = [_as_answer(book, number, question, tokenizer, rollout) for number, question in shown if question.response]
    if not found:
        raise ConfigError(
            "the data have no demonstrated answers to learn from",
            key="warm_start",
            hint="name their column, data.response_key, or set warm_start=null",
        )
    return assemble(found)


def _as_answer(book: PromptBook, number: int, question: Question, tokenizer: Any, rollout: RolloutConfig) -> Trajectory:
    words = tokenizer.encode(question.response, add_special_tokens=False)[: rollout.max_response_tokens - 1]
    tokens = (*words, tokenizer.eos_token_id)
    turn = Turn(
        observation="",
        prompt=book.prompt(number),
        continues=False,
        tokens=tokens,
        logprobs=(0.0,) * len(tokens),
        weight_version=0,
        text=str(question.response),
        actions=(),
        valid_format=True,
        reward=0.0,
        stop=StopReason.STOP,
    )
    return Trajectory("demonstration", number, number, 0, (turn,), Outcome.SUCCESS)


def learn_demonstrations(
    actor: Actor,
    batch: Batch,
    config: WarmStartConfig,
    seed: int,
    report: Callable[[int, dict[str, float]], bool],
) -> None:
    """Up to `config.updates` steps of cross-entropy on random sequences; ends where
    `report(update, metrics)`, called after each, says that it is enough."""
    order = torch.Generator().manual_seed(derive_seed(seed, "warm_start"))
    waiting = torch.empty(0, dtype=torch.long)
    for update in range(1, config.updates + 1):
        while len(waiting) < config.turns_per_update:
            waiting = torch.cat([waiting, torch.randperm(len(batch.lengths), generator=order)])
        chosen, waiting = waiting[: config.turns_per_update], waiting[config.turns_per_update :]
        rate = learning_rate(config.optimizer, update, config.updates)
        decay = weight_decay(config.optimizer, update, config.updates)
        metrics = actor.update(select_sequences(batch, chosen), Imitation(), "token-mean", rate, decay=decay)
        named = {name: metrics[name] for name in ("sft/loss", "sft/token_accuracy")}
        if report(update, {**named, "sft/lr": rate, "sft/grad_norm": metrics["grad_norm"]}):
            return
