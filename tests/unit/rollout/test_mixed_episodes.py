"""If these fail, episodes of one env are played by the rules of another, or one env's failures end a run that the
limit of another allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_agent_loop import GREEDY, RIGHT, Corridor, Script

from quintet.config.native.rollout import RolloutConfig
from quintet.envs.mixed_env import MixedVectorEnv
from quintet.envs.start_states import env_start
from quintet.envs.vector_env import LocalVectorEnv
from quintet.errors import MachineError
from quintet.policies.model_loading import load_tokenizer
from quintet.records import Generation, Observation, Outcome, Trajectory
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeLimits, EpisodeRules

TWICE = "<think> go </think><answer> Right || Right </answer>"


class ScriptedEngine(Script):
    """An engine that supports abort."""

    def abort(self, ids: object) -> list[Generation]:
        self.waiting.clear()
        return []


class Torn(Corridor):
    """An env whose reset fails."""

    def reset(self, seed: int) -> Observation:
        raise OSError("no map")


@pytest.fixture
def chat(policy_directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(policy_directory))


def rules(name: str, limits: EpisodeLimits | None = None, **options: object) -> EpisodeRules:
    config = RolloutConfig.model_validate({"max_turns": 5, "window_size": None, "max_prompt_tokens": 900, **options})
    return EpisodeRules(name, config, limits or EpisodeLimits(), f"envs.{name}.env", "corridor")


def play(
    chat: ChatFormat, response: str, both: list[EpisodeRules], kinds: list[type[Corridor]]
) -> dict[str, list[Trajectory]]:
    envs = MixedVectorEnv([LocalVectorEnv(kind) for kind in kinds])
    loop = AgentLoop.with_rules(ScriptedEngine(chat, [response]), chat, envs, both)
    episodes = [Episode(env_start(number % 2, 20 + number), number, 0) for number in range(8)]
    results: dict[str, list[Trajectory]] = {}
    for episode in loop.collect_rollouts(episodes, GREEDY):
        results.setdefault(episode.env, []).append(episode)
    loop.close()
    return results


def test_each_env_has_its_own_rules_and_name(chat: ChatFormat) -> None:
    both = [rules("slow"), rules("quick", max_actions_per_turn=2)]
    actual = play(chat, TWICE, both, [Corridor, Corridor])
    assert {name: len(episodes) for name, episodes in actual.items()} == {"slow": 4, "quick": 4}
    assert {len(episode.turns) for episode in actual["slow"]} == {3}
    assert {len(episode.turns) for episode in actual["quick"]} == {2}
    assert sorted(episode.seed for episode in actual["quick"]) == [21, 23, 25, 27], "the env's own seeds"
    assert {episode.env_type for episodes in actual.values() for episode in episodes} == {"corridor"}


def test_each_env_has_its_own_limits(chat: ChatFormat) -> None:
    actual = play(chat, RIGHT, [rules("free"), rules("bound", EpisodeLimits(max_actions=2))], [Corridor, Corridor])
    assert {episode.outcome for episode in actual["free"]} == {Outcome.SUCCESS}
    assert {episode.outcome for episode in actual["bound"]} == {Outcome.MAX_ACTIONS}


def test_failures_count_toward_the_limit_of_their_env(chat: ChatFormat) -> None:
    strict, lenient = EpisodeLimits(max_failed_share=0.0), EpisodeLimits(max_failed_share=1.0)
    actual = play(chat, RIGHT, [rules("whole", strict), rules("torn", lenient)], [Corridor, Torn])
    assert {episode.outcome for episode in actual["torn"]} == {Outcome.FAILED}
    assert {episode.outcome for episode in actual["whole"]} == {Outcome.SUCCESS}
    half = EpisodeLimits(max_failed_share=0.5)
    with pytest.raises(MachineError, match=r"(?s)of 4 episodes failed .*envs\.torn\.env\.max_failed_share") as error:
        play(chat, RIGHT, [rules("whole", lenient), rules("torn", half)], [Corridor, Torn])
    assert "now 0.5" in str(error.value)
