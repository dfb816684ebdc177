"""If these fail, one game's fault costs other games, goes uncounted, or a round waits for its slowest world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet.config.native import FrozenLakeConfig, RolloutConfig
from quintet.config.native.worlds import CustomWorldConfig, WorldProcessesConfig
from quintet.envs.catalogue import open_worlds
from quintet.errors import MachineError
from quintet.policies.causal_lm import load_model, load_tokenizer
from quintet.records import Failure, Generation, Observation, Outcome, Request, Step, StopReason, Trajectory
from quintet.rollout.agent_loop import AgentLoop, Game, GameLimits, Sampling, derive_seed
from quintet.rollout.dialogue import ChatFormat
from quintet.tracking.metrics import describe
from quintet.tracking.summaries import summarize_games, summarize_validation

GREEDY = Sampling(0.0, 0, 1.0, 0)
SAMPLED = Sampling(1.0, 0, 1.0, 5)
CAUSE = Failure("engine", "OutOfMemoryError", "no room")

Reply = Callable[[Request, int], Generation]
"""What an engine answers to a request in its n-th step."""


class Walk:
    """Three steps win; each shows how often it was stepped."""

    actions = ("Go", "Stay", "Raise")

    def instruction(self) -> str:
        return "Walk."

    def reset(self, seed: int) -> Observation:
        if seed == 13:
            raise OSError("no map")
        self.seed, self.place = seed, 0
        return Observation(f" at 0 of {seed}")

    def step(self, action: str) -> Step:
        if action == "Raise":
            raise RuntimeError("the floor gave way")
        self.place += action == "Go"
        won = self.place == 3
        return Step(Observation(f" at {self.place} of {self.seed}"), float(won), won, False, {"success": won})

    def render(self) -> np.ndarray:
        return np.zeros((1, 1, 3), np.uint8)

    def close(self) -> None: ...


class Desk:
    """An engine that answers each request as it is told, all of them at each step."""

    weight_version, context = 3, 900

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.waiting: list[Request] = []
        self.seen: list[Request] = []
        self.aborted: list[int] = []
        self.steps = self.forgotten = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> None:
        if len(request.prompt) >= self.context:
            raise ValueError("the prompt leaves no room")
        self.waiting.append(request)
        self.seen.append(request)

    def step(self) -> list[Generation]:
        self.steps += 1
        requests, self.waiting = self.waiting, []
        return [self.reply(request, self.steps) for request in requests]

    def abort(self, ids: Sequence[int]) -> list[Generation]:
        self.aborted += ids
        gone = [request for request in self.waiting if request.id in ids]
        self.waiting = [request for request in self.waiting if request.id not in ids]
        return [Generation(request.id, (5, 6), (-1.0, -1.0), StopReason.ABORT, 3) for request in gone]

    def load_weights(self, version: int, weights: object) -> None: ...
    def forget(self) -> None:
        self.forgotten += 1

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(scope="module")
def chat(policy_directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(policy_directory))


def saying(chat: ChatFormat, *words: str) -> Reply:
    """Always the same word; the request's seed picks it where there are several."""
    replies = [(*chat.encode(f"<think> go </think><answer> {word} </answer>"), chat.end_id) for word in words]

    def reply(request: Request, _: int) -> Generation:
        tokens = replies[request.seed % len(replies)]
        return Generation(request.id, tokens, (-0.5,) * len(tokens), StopReason.STOP, 3)

    return reply


def looped(chat: ChatFormat, reply: Reply, limits: GameLimits | None = None, **options: Any) -> tuple[AgentLoop, Desk]:
    config = RolloutConfig.model_validate({"max_turns": 5, "window_size": None, "max_prompt_tokens": 900, **options})
    engine = Desk(reply)
    return AgentLoop(engine, chat, Walk, config, "walk", limits), engine


def games(count: int, first: int = 100) -> list[Game]:
    return [Game(first + i // 2, i // 2, i % 2) for i in range(count)]


def by_place(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.group, t.sample))


def test_an_engine_s_fault_costs_its_own_game_and_is_counted(chat: ChatFormat) -> None:
    good = saying(chat, "Go")

    def reply(request: Request, step: int) -> Generation:
        if request.id == 1 and step == 2:
            return Generation(1, (7,), (-0.1,), StopReason.FAILED, 3, failure=CAUSE)
        if request.id == 2:
            return Generation(2, (), (), StopReason.FAILED, 3)
        return good(request, step)

    loop, _ = looped(chat, reply)
    played = by_place(list(loop.play(games(4), GREEDY)))
    assert [game.outcome for game in played] == [Outcome.SUCCESS, Outcome.FAILED, Outcome.FAILED, Outcome.SUCCESS]
    assert played[1].failure == CAUSE
    assert [turn.stop for turn in played[1].turns] == [StopReason.STOP, StopReason.FAILED]
    assert played[2].failure is not None
    assert played[2].failure.kind == "Unexplained"
    metrics = summarize_games(played)
    assert metrics["trajectory/failures/engine/OutOfMemoryError"] == 1
    assert metrics["trajectory/failures/engine/Unexplained"] == 1
    assert metrics["trajectory/failed"] == 2
    assert metrics["response/stop_reason/failed"] == pytest.approx(2 / 9)
    assert summarize_validation("walk", played)["val/walk/failed"] == 2
    for name in metrics:
        describe(name)


def test_whatever_a_world_calls_its_fault_the_metric_has_a_name(chat: ChatFormat) -> None:
    loop, _ = looped(chat, saying(chat, "Go"))
    (game,) = loop.play([Game(13, 0, 0)], GREEDY)
    odd = replace(game, failure=Failure("step", "a/b c", "?"))
    metrics = summarize_games([game, odd])
    assert {name for name in metrics if "failures" in name} == {
        "trajectory/failures/reset/OSError",
        "trajectory/failures/step/a_b_c",
    }
    assert all(describe(name) for name in metrics)


def test_an_empty_response_is_a_fault_and_an_empty_word_is_none(chat: ChatFormat) -> None:
    def reply(request: Request, _: int) -> Generation:
        tokens = () if request.id == 0 else (chat.end_id,)
        return Generation(request.id, tokens, (-0.5,) * len(tokens), StopReason.STOP, 3)

    loop, _ = looped(chat, reply, max_turns=2)
    nothing, word = by_place(list(loop.play(games(2), GREEDY)))
    assert nothing.failure is not None
    assert nothing.failure.kind == "EmptyResponse"
    assert (word.outcome, [turn.reward for turn in word.turns]) == (Outcome.MAX_TURNS, [-0.1, -0.1])
    assert summarize_games([word])["response/empty"] == 1.0


def test_a_prompt_that_is_too_long_for_the_engine_ends_its_game(chat: ChatFormat) -> None:
    loop, engine = looped(chat, saying(chat, "Stay"))
    engine.context = 70
    (game,) = loop.play([Game(100, 0, 0)], GREEDY)
    assert game.outcome is Outcome.CONTEXT
    assert game.turns
    assert max(len(request.prompt) for request in engine.seen) < 70

    def full(request: Request, _: int) -> Generation:
        return Generation(request.id, (), (), StopReason.CONTEXT, 3)

    loop, _ = looped(chat, full)
    (game,) = loop.play([Game(100, 0, 0)], GREEDY)
    assert (game.outcome, game.failure, game.turns) == (Outcome.CONTEXT, None, ())


def test_requests_that_an_engine_forgets_fail(chat: ChatFormat) -> None:
    loop, engine = looped(chat, saying(chat, "Go"))
    answer = engine.step
    engine.step = lambda: [one for one in answer() if one.id != 1]  # type: ignore[method-assign]
    played = by_place(list(loop.play(games(2), GREEDY)))
    assert [game.success for game in played] == [True, False]
    assert played[1].failure is not None
    assert played[1].failure.kind == "Lost"


def test_a_reply_that_a_text_ended_is_read_and_closed(chat: ChatFormat) -> None:
    words = "<think> go </think><answer> Go </answer>"

    def reply(request: Request, _: int) -> Generation:
        tokens = chat.encode(words)
        return Generation(request.id, tokens, (-0.5,) * len(tokens), StopReason.STOP, 3)

    loop, engine = looped(chat, reply)
    (game,) = loop.play([Game(100, 0, 0)], replace(GREEDY, stop_texts=("</answer>",)))
    assert game.success
    assert all(turn.valid_format for turn in game.turns)
    assert engine.seen[0].stop_texts == ("</answer>",)
    seen = engine.seen[1].prompt
    before = (*engine.seen[0].prompt, *chat.encode(words))
    assert seen[: len(before)] == before
    assert seen[len(before)] == chat.end_id
    assert loop.measures()["prompt/reply_closed"] == 2


def test_tokens_of_several_versions_keep_their_versions(chat: ChatFormat) -> None:
    good = saying(chat, "Go")
    loop, _ = looped(chat, lambda request, step: replace(good(request, step), switches=((2, 4),)))
    (game,) = loop.play([Game(100, 0, 0)], GREEDY)
    assert {turn.switches for turn in game.turns} == {((2, 4),)}


@pytest.mark.parametrize(
    ("window", "kept"), [(None, [True] * 4 + [False]), (1, [False] * 5), (3, [True, True, False, False, False])]
)
def test_an_engine_is_told_which_dialogues_go_on(chat: ChatFormat, window: int | None, kept: list[bool]) -> None:
    loop, engine = looped(chat, saying(chat, "Stay"), window_size=window)
    list(loop.play([Game(100, 0, 0)], GREEDY))
    assert [request.keep for request in engine.seen] == kept


def test_a_game_ends_with_its_actions(chat: ChatFormat) -> None:
    words = "Stay || Go || Stay"
    loop, _ = looped(chat, saying(chat, words), GameLimits(actions=4), max_actions_per_turn=3)
    (game,) = loop.play([Game(100, 0, 0)], GREEDY)
    assert [turn.actions for turn in game.turns] == [("Stay", "Go", "Stay"), ("Stay",)]
    assert (game.outcome, game.turns[1].valid_format) == (Outcome.MAX_ACTIONS, True)


def test_a_game_ends_with_its_tokens(chat: ChatFormat) -> None:
    """The last reply is asked to keep within what is left."""
    loop, engine = looped(chat, saying(chat, "Stay"))
    (whole,) = loop.play([Game(100, 0, 0)], GREEDY)
    sizes = [len(turn.prompt) + len(turn.tokens) for turn in whole.turns]
    limit = sum(sizes[:3]) + len(whole.turns[3].prompt) + 4
    loop, engine = looped(chat, saying(chat, "Stay"), GameLimits(tokens=limit))
    (game,) = loop.play([Game(100, 0, 0)], GREEDY)
    assert [request.max_tokens for request in engine.seen] == [24, 24, 24, 4]
    assert game.outcome is Outcome.MAX_TOKENS
    loop, _ = looped(chat, saying(chat, "Stay"), GameLimits(tokens=len(whole.turns[0].prompt)))
    (game,) = loop.play([Game(100, 0, 0)], GREEDY)
    assert (game.outcome, game.turns) == (Outcome.MAX_TOKENS, ())


def test_too_many_failures_end_the_run_and_name_the_first(chat: ChatFormat) -> None:
    loop, engine = looped(chat, saying(chat, "Go"), GameLimits(failed_share=0.25))
    unlucky = [Game(13 if i in (2, 5) else 100, i, 0) for i in range(8)]
    assert sum(game.failure is not None for game in loop.play(unlucky, GREEDY)) == 2
    with pytest.raises(MachineError, match=r"3 of 8 games failed \(first, in reset: OSError: no map"):
        list(loop.play([*unlucky[:7], Game(13, 9, 0)], GREEDY))
    assert not loop.busy
    assert not engine.busy
    assert all(game.success for game in loop.play(games(4), GREEDY))


def test_failures_are_counted_over_games_that_come_one_by_one(chat: ChatFormat) -> None:
    """A lone replacement that fails is one of as many as are played side by side."""
    loop, _ = looped(chat, saying(chat, "Stay"), GameLimits(failed_share=0.5))
    loop.begin(games(4), GREEDY)
    loop.begin([Game(13, 9, 0)], GREEDY)
    found = loop.advance()
    assert [game.failure is not None for game in found] == [True]


def test_games_played_in_pieces_are_those_played_at_once(chat: ChatFormat) -> None:
    words = saying(chat, "Go", "Stay", "Raise", "nonsense")
    loop, engine = looped(chat, words)
    at_once = by_place(list(loop.play(games(24), SAMPLED)))
    assert {Outcome.SUCCESS, Outcome.FAILED} < {game.outcome for game in at_once} | {Outcome.MAX_TURNS}
    loop, engine = looped(chat, words)
    pieces: list[Trajectory] = []
    for first in range(0, 24, 8):
        loop.begin(games(24)[first : first + 8], SAMPLED)
        pieces += loop.advance()
    assert engine.forgotten == 1
    while loop.busy:
        pieces += loop.advance()
    assert by_place(pieces) == at_once


def test_a_round_is_played_beside_games_that_run(chat: ChatFormat) -> None:
    loop, engine = looped(chat, saying(chat, "Go"))
    loop.begin(games(2), GREEDY)
    loop.advance()
    round_ = list(loop.play(games(3, first=500), GREEDY))
    assert [game.seed for game in by_place(round_)] == [500, 500, 501]
    assert engine.forgotten == 1
    assert loop.busy
    assert [game.seed for game in loop.advance()] == [100, 100]
    assert not loop.busy


def test_what_nobody_needs_is_given_up(chat: ChatFormat) -> None:
    loop, engine = looped(chat, saying(chat, "Go"))
    loop.begin(games(6), GREEDY)
    loop.advance()
    loop.advance()
    gone = loop.abort({0, 2})
    assert sorted((game.group, game.sample) for game in gone) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert {game.outcome for game in gone} == {Outcome.ABORTED}
    assert [turn.stop for turn in gone[0].turns] == [StopReason.STOP, StopReason.ABORT]
    assert sorted(engine.aborted) == [0, 1, 4, 5]
    rest: list[Trajectory] = []
    while loop.busy:
        rest += loop.advance()
    assert [(game.group, game.outcome) for game in rest] == [(1, Outcome.SUCCESS)] * 2
    assert loop.abort({0, 1, 2}) == []


def test_a_round_that_is_left_in_the_middle_leaves_nothing_behind(chat: ChatFormat) -> None:
    loop, engine = looped(chat, saying(chat, "Go", "Stay"))
    playing: Iterator[Trajectory] = loop.play(games(8), SAMPLED)
    next(playing)
    playing.close()  # type: ignore[attr-defined]
    assert not loop.busy
    assert not engine.busy


def test_time_and_changes_are_told_since_they_were_asked_for_last(chat: ChatFormat) -> None:
    loop, _ = looped(chat, saying(chat, "Stay"), window_size=1)
    list(loop.play(games(2), GREEDY))
    first, second = loop.measures(), loop.measures()
    assert first["prompt/window"] == 8
    assert min(first[f"timing_s/{part}"] for part in ("engine", "world", "loop")) > 0
    assert set(second.values()) == {0.0}
    for name in first:
        describe(name)


SLOW = '''
import time
from pathlib import Path
from quintet.envs.frozenlake import FrozenLake
from quintet.config.native import FrozenLakeConfig
from quintet.records import Observation, Step


class Slow:
    """Its games take as long as their seeds say, until somebody leaves a note."""

    actions = ("Go",)

    def __init__(self, note):
        self.note = Path(note)

    def instruction(self):
        return "Walk."

    def reset(self, seed):
        self.seed, self.place = seed, 0
        return Observation(" at 0")

    def step(self, action):
        while self.seed == 7 and not self.note.exists():
            time.sleep(0.01)
        self.place += 1
        return Step(Observation(f" at {self.place}"), 0.0, self.place == 3, False)

    def close(self):
        pass


class Flaky(FrozenLake):
    """Falls over in some games."""

    def __init__(self, size):
        super().__init__(FrozenLakeConfig(size=size))

    def reset(self, seed):
        if seed % 4 == 0:
            raise RuntimeError("this map is torn")
        return super().reset(seed)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worlds") / "slow.py"
    path.write_text(SLOW)
    return path


def test_nobody_waits_for_a_slow_world(chat: ChatFormat, file: Path, tmp_path: Path) -> None:
    """The slow game's first step ends only when the others have been played to their end."""
    note = tmp_path / "note"
    config = CustomWorldConfig(name="custom", path=f"{file}:Slow", arguments={"note": str(note)})
    worlds = open_worlds(config)
    rollout = RolloutConfig(max_turns=5, window_size=None, max_prompt_tokens=900)
    engine = Desk(saying(chat, "Go"))
    loop = AgentLoop(engine, chat, worlds, rollout, "slow")
    seeds: list[int] = []
    for game in loop.play([Game(7, 0, 0), Game(8, 1, 0), Game(9, 2, 0)], GREEDY):
        seeds.append(game.seed)
        if len(seeds) == 2:
            note.touch()
    loop.close()
    assert seeds[-1] == 7
    assert engine.steps > 3


def test_games_are_the_same_with_worlds_in_processes(chat: ChatFormat) -> None:
    """What the policy writes follows from what it saw and from its seed, whoever was asked first."""
    replies = [saying(chat, word) for word in ("Left", "Down", "Right", "Up", "Right || Down", "well")]

    def reply(request: Request, step: int) -> Generation:
        return replies[derive_seed(*request.prompt, request.seed) % len(replies)](request, step)

    played = []
    for processes in (None, WorldProcessesConfig(most=5)):
        world = FrozenLakeConfig(slippery=True, processes=processes)
        rollout = RolloutConfig(max_turns=6, max_actions_per_turn=2, max_prompt_tokens=900)
        loop = AgentLoop(Desk(reply), chat, open_worlds(world), rollout, world.name)
        played.append(by_place(list(loop.play(games(12), SAMPLED))))
        loop.close()
    assert played[0] == played[1]
    assert len({game.outcome for game in played[0]}) > 1


def test_a_real_policy_plays_on_while_a_user_s_world_fails(policy_directory: Path, file: Path) -> None:
    from quintet.config.native import Experiment
    from quintet.rollout.engine import ENGINES, EngineSetup

    world = CustomWorldConfig(name="custom", path=f"{file}:Flaky", arguments={"size": 3})
    config = Experiment(world=world, rollout=RolloutConfig(max_turns=2, max_response_tokens=6, max_prompt_tokens=400))
    tokenizer, model = load_tokenizer(policy_directory), load_model(policy_directory)
    setup = EngineSetup(
        directory=policy_directory,
        model=model,
        dtype=model.dtype,
        slots=8,
        context=406,
        decode=lambda tokens: str(tokenizer.decode(list(tokens))),
        options=config.rollout.engine_options,
    )
    loop = AgentLoop.of(ENGINES.get("hf").load()(setup), ChatFormat(tokenizer), config)
    played = list(loop.play([Game(seed, seed, 0) for seed in range(1, 13)], SAMPLED))
    loop.close()
    metrics = summarize_games(played)
    assert metrics["trajectory/failures/reset/RuntimeError"] == metrics["trajectory/failed"] == 3
    assert {game.seed for game in played if game.failure} == {4, 8, 12}
    assert all(game.turns for game in played if not game.failure)
    with pytest.raises(MachineError, match=r"world.max_failed_share \(now 0.5\)"):
        list(AgentLoop.of(loop._engine, ChatFormat(tokenizer), config).play([Game(4, 0, 0)], SAMPLED))
