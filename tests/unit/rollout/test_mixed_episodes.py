"""If these fail, episodes of one env are played by the rules of another, or one env's failures end a run that the
limit of another allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_agent_loop import GREEDY, RIGHT, Corridor, Script

from quintet.config.compose import load_experiment
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
from quintet.rollout.episode_limits import EpisodeLimits, EpisodeRules, build_episode_rules

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
    loop = AgentLoop(ScriptedEngine(chat, [response]), chat, envs, both)
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


@pytest.mark.parametrize(
    ("rollout", "override", "response", "plain", "replaced"),
    [
        ("think=false", "think: true", "<answer>Up</answer>", (True, ("Up",), 0.0), (False, (), -0.1)),
        (
            "max_actions_per_turn=1",
            "max_actions_per_turn: 2",
            RIGHT.replace("Right", "Up || Left || Up"),
            (True, ("Up",), 0.0),
            (True, ("Up", "Left"), 0.0),
        ),
        (
            "action_separator=||",
            "action_separator: '|'",
            RIGHT.replace("Right", "Left | Up"),
            (False, (), -0.1),
            (True, ("Left",), 0.0),
        ),
        ("ignore_case=false", "ignore_case: true", RIGHT.lower(), (False, (), -0.1), (True, ("Right",), 0.0)),
        ("format_penalty=-0.1", "format_penalty: -0.5", "hm", (False, (), -0.1), (False, (), -0.5)),
    ],
    ids=["think", "max_actions_per_turn", "action_separator", "ignore_case", "format_penalty"],
)
def test_an_entry_of_envs_replaces_keys_of_rollout(
    chat: ChatFormat, rollout: str, override: str, response: str, plain: object, replaced: object
) -> None:
    overrides = [f"rollout.{rollout}", "envs.plain={}", f"envs.other={{{override}}}"]
    config = load_experiment(None, overrides).experiment
    actual = play(chat, response, list(build_episode_rules(config)), [Corridor, Corridor])
    first = {name: episodes[0].turns[0] for name, episodes in actual.items()}
    turns = {name: (turn.valid_format, turn.actions, turn.reward) for name, turn in first.items()}
    assert turns == {"plain": plain, "other": replaced}


def test_an_entry_of_envs_may_demand_that_a_response_has_nothing_besides_thoughts_and_answer(chat: ChatFormat) -> None:
    """By default, thoughts with sections count wherever they are, and only make the response invalid."""
    thought = "<think><observation>a</observation><reasoning>b</reasoning></think>"
    options = ["envs.plain={}", "envs.other.response_format=strict", "rollout.thoughts=grounding"]
    config = load_experiment(None, [*options, "rollout.max_prompt_tokens=2000"]).experiment
    actual = play(chat, f"So: {thought}<answer>Right</answer>", list(build_episode_rules(config)), [Corridor] * 2)
    actions = {name: episodes[0].turns[0].actions for name, episodes in actual.items()}
    assert actions == {"plain": ("Right",), "other": ()}


@pytest.mark.parametrize(
    ("limit", "outcome"), [("max_actions=2", Outcome.MAX_ACTIONS), ("max_tokens=100", Outcome.MAX_TOKENS)]
)
def test_an_episode_ends_at_the_limits_of_its_env(chat: ChatFormat, limit: str, outcome: Outcome) -> None:
    (rule,) = build_episode_rules(load_experiment(None, [f"env.{limit}"]).experiment)
    engine = ScriptedEngine(chat, [RIGHT.replace("Right", "Up")])
    loop = AgentLoop(engine, chat, LocalVectorEnv(Corridor), [rule])
    (episode,) = loop.collect_rollouts([Episode(10, 0, 0)], GREEDY)
    assert episode.outcome is outcome


def test_one_failure_of_four_ends_a_run_that_allows_none(chat: ChatFormat) -> None:
    """The corridor of seed 13 cannot be reset."""
    (rule,) = build_episode_rules(load_experiment(None, ["env.max_failed_share=0"]).experiment)
    loop = AgentLoop(ScriptedEngine(chat, [RIGHT]), chat, LocalVectorEnv(Corridor), [rule])
    with pytest.raises(MachineError, match=r"1 of \d episodes failed"):
        list(loop.collect_rollouts([Episode(10 + number, number, 0) for number in range(4)], GREEDY))


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
