"""If these fail, games aren't played as configured, or what is trained on isn't what was played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quintet.config.native import RolloutConfig
from quintet.envs.world import World
from quintet.errors import ConfigError
from quintet.policies.causal_lm import load_tokenizer
from quintet.records import Generation, Observation, Outcome, Request, Step, StopReason, Trajectory
from quintet.rollout.agent_loop import AgentLoop, Game, Sampling, derive_seed
from quintet.rollout.assemble import assemble
from quintet.rollout.dialogue import ChatFormat, Dialogue

GREEDY = Sampling(0.0, 0, 1.0, 0)


class Corridor:
    """Three steps to the right win; `Down` raises."""

    actions = ("Left", "Down", "Right", "Up")

    def instruction(self) -> str:
        return "Walk right."

    def reset(self, seed: int) -> Observation:
        if seed == 13:
            raise OSError("no map")
        self.place = 0
        return Observation(" P _ _ G")

    def step(self, action: str) -> Step:
        if action == "Down":
            raise RuntimeError("the floor gave way")
        self.place += action == "Right"
        won = self.place == 3
        text = "".join(" P" if i == self.place else " _" for i in range(4))
        return Step(Observation(text), float(won), won, False, {"success": won})

    def render(self) -> np.ndarray:
        return np.zeros((1, 1, 3), np.uint8)

    def close(self) -> None:
        pass


class Script:
    """An engine that says what it is told, turn by turn; a game's seed picks the script."""

    weight_version = 3

    def __init__(self, chat: ChatFormat, words: list[str], stop: StopReason = StopReason.STOP) -> None:
        self.chat, self.words, self.stop = chat, words, stop
        self.waiting: list[Request] = []
        self.prompts: list[tuple[int, ...]] = []
        self.turns: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        self.prompts.append(request.prompt)

    def step(self) -> list[Generation]:
        request = self.waiting.pop()
        turn = self.turns.get(request.id, 0)
        self.turns[request.id] = turn + 1
        ending = (self.chat.end_id,) if self.stop is StopReason.STOP else ()
        tokens = (*self.chat.encode(self.words[turn % len(self.words)]), *ending)
        return [Generation(request.id, tokens, (-0.5,) * len(tokens), self.stop, 3)]

    def load_weights(self, version: int, weights: object) -> None: ...
    def forget(self) -> None: ...

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


@pytest.fixture
def chat(policy_directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(policy_directory))


def play(chat: ChatFormat, words: list[str], games: int = 1, **options: object) -> tuple[list[Trajectory], Script]:
    config = RolloutConfig.model_validate({"max_turns": 5, "window_size": None, "max_prompt_tokens": 900, **options})
    engine = Script(chat, words)
    loop = AgentLoop(engine, chat, lambda: make_corridor(), config, "corridor")
    return list(loop.play([Game(10 + i, i // 2, i % 2) for i in range(games)], GREEDY)), engine


def make_corridor() -> World:
    return Corridor()


RIGHT = "<think> go </think><answer> Right </answer>"


def test_a_game_is_won_turn_by_turn(chat: ChatFormat) -> None:
    (game,), _ = play(chat, [RIGHT])
    assert game.outcome is Outcome.SUCCESS
    assert [turn.actions for turn in game.turns] == [("Right",)] * 3
    assert [turn.reward for turn in game.turns] == [0.0, 0.0, 1.0]
    assert game.turns[1].observation == " _ P _ _"
    assert game.turns[2].frames == (" _ _ _ P",)


def test_several_actions_in_one_turn_stop_at_the_end_of_the_game(chat: ChatFormat) -> None:
    words = ["<think> go </think><answer> Right || Right || Right || Right </answer>"]
    (game,), _ = play(chat, words, max_actions_per_turn=4)
    assert game.turns[0].actions == ("Right",) * 3
    assert game.turns[0].reward == 1.0


def test_unparsable_words_cost_the_penalty_and_move_nothing(chat: ChatFormat) -> None:
    (game,), _ = play(chat, ["hm", RIGHT])
    assert [turn.valid_format for turn in game.turns] == [False, True, False, True, False]
    assert game.outcome is Outcome.MAX_TURNS
    assert game.turns[0].reward == -0.1
    assert game.turns[1].observation == game.turns[0].observation


def test_a_reply_that_was_cut_off_is_not_valid(chat: ChatFormat) -> None:
    config = RolloutConfig(max_turns=1)
    loop = AgentLoop(Script(chat, [RIGHT], StopReason.LENGTH), chat, make_corridor, config, "corridor")
    (game,) = loop.play([Game(1, 0, 0)], GREEDY)
    assert not game.turns[0].valid_format


def test_a_world_that_raises_costs_its_own_game_alone(chat: ChatFormat) -> None:
    games, _ = play(chat, [RIGHT], games=6)  # the fourth has seed 13
    failed = [game for game in games if game.outcome is Outcome.FAILED]
    assert [game.seed for game in failed] == [13]
    assert failed[0].failure is not None
    assert (failed[0].failure.where, failed[0].failure.kind) == ("reset", "OSError")
    assert sum(game.success for game in games) == 5
    (fallen,), _ = play(chat, [RIGHT, RIGHT.replace("Right", "Down")])
    assert fallen.failure is not None
    assert "gave way" in fallen.failure.message
    assert len(fallen.turns) == 1


def test_a_context_that_grows_too_long_ends_the_game(chat: ChatFormat) -> None:
    (game,), engine = play(chat, ["hm"], max_prompt_tokens=60)
    assert game.outcome is Outcome.CONTEXT
    assert max(map(len, engine.prompts)) <= 60


@pytest.mark.parametrize("window", [None, 1, 2, 3])
def test_what_is_trained_on_is_what_was_seen(chat: ChatFormat, window: int | None) -> None:
    """The packed sequences, put together again, are the engine's prompts and replies, token by token."""
    (game,), engine = play(chat, ["hm", RIGHT, "mm"], window_size=window)
    batch = assemble([game])
    parts = batch.tokens.split(batch.lengths.tolist())
    masks = batch.loss_mask.split(batch.lengths.tolist())
    seen = [(part[: i + 1]).tolist() for part, mask in zip(parts, masks, strict=True) for i in _ends(mask)]
    assert seen == [[*prompt, *turn.tokens] for prompt, turn in zip(engine.prompts, game.turns, strict=True)]
    assert int(batch.loss_mask.sum()) == game.response_tokens
    assert float(batch.rewards.sum()) == pytest.approx(game.reward)
    assert int(batch.turn_end.sum()) == len(game.turns)
    assert bool(batch.loss_mask[batch.turn_end].all())


def _ends(mask: torch.Tensor) -> Iterator[int]:
    for i in range(len(mask)):
        if mask[i] and (i + 1 == len(mask) or not mask[i + 1]):
            yield i


@pytest.mark.parametrize("window", [None, 1, 2, 3])
def test_the_dialogue_is_the_templates_own(policy_directory: Path, chat: ChatFormat, window: int | None) -> None:
    """Built turn by turn, it is what the chat template makes of the whole dialogue."""
    tokenizer = load_tokenizer(policy_directory)
    dialogue = Dialogue(chat, "Walk.", window)
    history: list[dict[str, str]] = []
    for number in range(5):
        prompt, _, _ = dialogue.observe(f" P _ {number}")
        history.append({"role": "user", "content": f" P _ {number}"})
        kept = history if window is None else history[-(2 * window - 1) :]
        messages = [{"role": "system", "content": "Walk."}, *kept]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt == tuple(tokenizer.encode(text, add_special_tokens=False))
        dialogue.reply((*chat.encode(RIGHT), chat.end_id))
        history.append({"role": "assistant", "content": RIGHT})


def test_a_template_that_drops_messages_is_refused(policy_directory: Path) -> None:
    tokenizer = load_tokenizer(policy_directory)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match="drops a message"):
        ChatFormat(tokenizer)


def test_derived_seeds_differ_and_stay() -> None:
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2)
    assert len({derive_seed(i, j) for i in range(50) for j in range(50)}) == 2500
    assert all(0 <= derive_seed(i) < 2**63 for i in range(100))


class Toll(Corridor):
    """Each step costs one, winning brings ten."""

    def step(self, action: str) -> Step:
        done = super().step(action)
        return Step(done.observation, 10.0 * done.reward - 1.0, done.terminated, done.truncated, done.info)


@pytest.mark.parametrize(("binary", "rewards"), [(False, [-0.1, -1.0, -1.0, 9.0]), (True, [0.0, 0.0, 0.0, 1.0])])
def test_a_binary_reward_knows_neither_the_worlds_nor_penalties(
    chat: ChatFormat, binary: bool, rewards: list[float]
) -> None:
    config = RolloutConfig(max_turns=5, window_size=None, max_prompt_tokens=900, binary_reward=binary)
    loop = AgentLoop(Script(chat, ["nonsense", RIGHT, RIGHT, RIGHT]), chat, Toll, config, "corridor")
    (game,) = loop.play([Game(10, 0, 0)], GREEDY)
    assert [turn.reward for turn in game.turns] == rewards


def test_long_observations_lose_their_end_and_a_long_start_its_beginning(chat: ChatFormat) -> None:
    whole, _, _ = Dialogue(chat, "Walk.", None).observe(" P _ _ G")
    cut, _, _ = Dialogue(chat, "Walk.", None, max_observation=2).observe(" P _ _ G")
    assert chat.decode(cut).count(" _") == chat.decode(whole).count(" _") - 1
    short, new, _ = Dialogue(chat, "Walk.", None, max_start=5).observe(" P _ _ G")
    assert short == new == whole[-5:]
