"""If these fail, games of one world are played by the rules of another, or one world's failures end a run that the
limit of another allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_agent_loop import GREEDY, RIGHT, Corridor, Script

from quintet.config.native import RolloutConfig
from quintet.envs.mixture import MixedWorlds
from quintet.envs.seeds import start_in
from quintet.envs.worlds import LocalWorlds
from quintet.errors import MachineError
from quintet.policies.causal_lm import load_tokenizer
from quintet.records import Generation, Observation, Outcome, Trajectory
from quintet.rollout.agent_loop import AgentLoop, Game
from quintet.rollout.dialogue import ChatFormat
from quintet.rollout.rules import GameLimits, Rules

TWICE = "<think> go </think><answer> Right || Right </answer>"


class Told(Script):
    """An engine that may be told to leave off."""

    def abort(self, ids: object) -> list[Generation]:
        self.waiting.clear()
        return []


class Torn(Corridor):
    """It has no start."""

    def reset(self, seed: int) -> Observation:
        raise OSError("no map")


@pytest.fixture
def chat(policy_directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(policy_directory))


def rules(name: str, limits: GameLimits | None = None, **options: object) -> Rules:
    config = RolloutConfig.model_validate({"max_turns": 5, "window_size": None, "max_prompt_tokens": 900, **options})
    return Rules(name, config, limits or GameLimits(), f"worlds.{name}.world", "corridor")


def play(chat: ChatFormat, words: str, both: list[Rules], kinds: list[type[Corridor]]) -> dict[str, list[Trajectory]]:
    worlds = MixedWorlds([LocalWorlds(kind) for kind in kinds])
    loop = AgentLoop.playing(Told(chat, [words]), chat, worlds, both)
    games = [Game(start_in(number % 2, 20 + number), number, 0) for number in range(8)]
    found: dict[str, list[Trajectory]] = {}
    for game in loop.play(games, GREEDY):
        found.setdefault(game.world, []).append(game)
    loop.close()
    return found


def test_every_world_has_its_own_rules_and_its_own_name(chat: ChatFormat) -> None:
    both = [rules("slow"), rules("quick", max_actions_per_turn=2)]
    found = play(chat, TWICE, both, [Corridor, Corridor])
    assert {name: len(games) for name, games in found.items()} == {"slow": 4, "quick": 4}
    assert {len(game.turns) for game in found["slow"]} == {3}
    assert {len(game.turns) for game in found["quick"]} == {2}
    assert sorted(game.seed for game in found["quick"]) == [21, 23, 25, 27], "the world's own seeds"
    assert {game.kind for games in found.values() for game in games} == {"corridor"}


def test_every_world_has_its_own_limits(chat: ChatFormat) -> None:
    found = play(chat, RIGHT, [rules("free"), rules("bound", GameLimits(actions=2))], [Corridor, Corridor])
    assert {game.outcome for game in found["free"]} == {Outcome.SUCCESS}
    assert {game.outcome for game in found["bound"]} == {Outcome.MAX_ACTIONS}


def test_failures_count_against_their_own_worlds_limit(chat: ChatFormat) -> None:
    strict, lenient = GameLimits(failed_share=0.0), GameLimits(failed_share=1.0)
    found = play(chat, RIGHT, [rules("whole", strict), rules("torn", lenient)], [Corridor, Torn])
    assert {game.outcome for game in found["torn"]} == {Outcome.FAILED}
    assert {game.outcome for game in found["whole"]} == {Outcome.SUCCESS}
    half = GameLimits(failed_share=0.5)
    with pytest.raises(MachineError, match=r"(?s)of 4 games failed .*worlds\.torn\.world\.max_failed_share") as error:
        play(chat, RIGHT, [rules("whole", lenient), rules("torn", half)], [Corridor, Torn])
    assert "now 0.5" in str(error.value)
