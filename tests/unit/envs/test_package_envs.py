"""If these fail, an env of another package plays by other rules, downloads something, or fails without a cause."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from quintet.config.native.envs import GymnasiumConfig, TextArenaConfig
from quintet.envs.factory import build_vector_env, env_factory
from quintet.envs.gymnasium_env import GymnasiumEnv
from quintet.envs.textarena_env import TextArenaEnv
from quintet.envs.vector_env import EpisodeFailed, EpisodeStarted
from quintet.errors import ConfigError
from quintet.records import Step

TOYS = """
import gymnasium
import numpy as np
from gymnasium import spaces

class Painting(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Discrete(2, start=5)
    observation_space = spaces.Box(0, 255, (40, 20, 3), np.uint8)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.picture = self.np_random.integers(0, 256, (40, 20, 3), dtype=np.uint8)
        return self.picture, {}

    def step(self, action):
        self.picture = np.full_like(self.picture, action)
        return self.picture, -1.0, action == 6, False, {"solved": action == 6}

    def render(self):
        return self.picture

class Echo(gymnasium.Env):
    action_space = spaces.Text(5, charset="abc")
    sizes = spaces.Tuple((spaces.Discrete(9), spaces.Box(-9, 9, (2,))))
    observation_space = spaces.Dict({"last": spaces.Text(5), "sizes": sizes})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation("-"), {}

    def step(self, action):
        return self._observation(action), float(len(action)), action == "cab", False, {}

    def _observation(self, text):
        return {"last": text, "sizes": (len(text), np.array([0.5, -len(text)], np.float32))}

gymnasium.register("Painting-v0", Painting)
gymnasium.register("Echo-v0", Echo, max_episode_steps=3, reward_threshold=4)
"""


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_envs.py").write_text(TOYS)
    monkeypatch.syspath_prepend(str(tmp_path))


def play(env: GymnasiumEnv | TextArenaEnv, *actions: str, seed: int = 3) -> list[Step]:
    env.reset(seed)
    return [env.step(action) for action in actions]


def test_an_env_has_gymnasiums_states_rewards_and_ends() -> None:
    ours = GymnasiumEnv(GymnasiumConfig(id="Taxi-v4"))
    theirs = gymnasium.make("Taxi-v4")
    state, _ = theirs.reset(seed=8)
    assert ours.reset(8).text == str(state)
    for number in np.random.default_rng(0).integers(0, 6, 250).tolist():
        state, reward, terminated, truncated, _ = theirs.step(number)
        step = ours.step(str(number))
        assert (step.observation.text, step.reward) == (str(state), reward)
        assert (step.terminated, step.truncated) == (terminated, truncated)
        if terminated or truncated:
            break
    assert truncated


def test_actions_have_names_and_numbers_and_drawings_keep_their_highlights() -> None:
    config = GymnasiumConfig(actions=("Left", "Down", "Right", "Up"), observation="ansi", kwargs={"is_slippery": False})
    env = GymnasiumEnv(config)
    assert env.actions == ("Left", "Down", "Right", "Up", "0", "1", "2", "3")
    assert "Left, Down, Right, Up." in env.instruction()
    assert env.reset(0).text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert env.step("Right").observation.text.endswith("S[F]FF\nFHFH\nFFFH\nHFFG")
    assert env.step("2").observation.text.endswith("SF[F]F\nFHFH\nFFFH\nHFFG")
    with pytest.raises(ConfigError, match=r"env\.actions has 2 names, and FrozenLake-v1 has 4"):
        GymnasiumEnv(GymnasiumConfig(actions=("Left", "Right")))


def test_an_instruction_of_the_configuration_replaces_the_list_of_actions() -> None:
    assert GymnasiumEnv(GymnasiumConfig(instruction="Cross the lake.")).instruction() == "Cross the lake."


def test_a_task_is_solved_by_threshold_return_or_info(toys: None) -> None:
    way = ("1", "1", "2", "1", "2", "2")
    lake = {"kwargs": {"is_slippery": False}}
    last = play(GymnasiumEnv(GymnasiumConfig(**lake)), *way)[-1]
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)
    assert not play(GymnasiumEnv(GymnasiumConfig(success_return=1.5, **lake)), *way)[-1].info["success"]
    solved = GymnasiumConfig(id="toy_envs:Painting-v0", render="vision", success_key="solved")
    assert [step.info["success"] for step in play(GymnasiumEnv(solved), "5", "6")] == [False, True]


def test_pictures_are_those_of_the_env_in_the_wanted_size(toys: None) -> None:
    env = GymnasiumEnv(GymnasiumConfig(id="toy_envs:Painting-v0", render="vision", image_size=20))
    first = env.reset(4)
    assert (first.text, first.images[0].shape, first.images[0].dtype) == ("<image>", (20, 10, 3), np.uint8)
    assert (env.reset(4).images[0] == first.images[0]).all()
    assert (env.step("6").observation.images[0] == 6).all()


def test_text_actions_are_taken_as_they_are(toys: None) -> None:
    env = GymnasiumEnv(GymnasiumConfig(id="toy_envs:Echo-v0"))
    assert env.actions == ("{text}",)
    assert env.reset(0).text == "last: -\nsizes: 1 0.5 -1"
    steps = play(env, "cc", "what?", "cab")
    assert steps[1].info["valid_format"] is False
    assert steps[1].observation == steps[0].observation
    assert steps[0].observation.text == "last: cc\nsizes: 2 0.5 -2"
    assert (steps[2].terminated, steps[2].info["success"]) == (True, True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"id": "Pendulum-v1"}, r"its actions are Box.*\n.*Discrete or Text action space.*your own class"),
    ({"id": "FrozenLak-v1"}, r"doesn't exist.*\n.*did you mean FrozenLake-v1\?"),
    ({"id": "no_such_module:Maze-v0"}, r"module no_such_module cannot be imported\n.*install the package"),
    ({"id": "CartPole-v1", "observation": "ansi"}, r"no render mode ansi\n.*env\.render=text env\.observation=space"),
    ({"id": "toy_envs:Painting-v0"}, r"its observations are Box.*\n.*use env\.render=vision"),
    ({"kwargs": {"sise": 3}}, r"cannot be built: .*sise.*\n.*correct env\.kwargs"),
    ({"id": "LunarLander-v3"}, r"a package is missing: Box2D.*\n.*install what the message names"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_an_env_that_cannot_be_shown_is_refused_with_the_cause(
    toys: None, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        env_factory(GymnasiumConfig(**fields))


def test_a_run_with_worker_processes_is_refused_before_its_first_episode() -> None:
    with pytest.raises(ConfigError, match=r"Pendulum.*Discrete or Text"):
        build_vector_env(GymnasiumConfig(id="Pendulum-v1"))


def test_worker_processes_play_the_same_episodes() -> None:
    config = GymnasiumConfig(id="Blackjack-v1")
    envs = build_vector_env(config)
    envs.start(0, 7)
    (event,) = envs.poll(wait=True)
    assert isinstance(event, EpisodeStarted)
    assert event.observation == GymnasiumEnv(config).reset(7)
    envs.close()


# ---- TextArena


def test_a_game_depends_on_its_seed_alone_and_leaves_other_randomness_alone() -> None:
    """Games draw from the global generators; two games side by side must not disturb each other."""
    config = TextArenaConfig(id="TicTacToe-v0")
    alone = [step.observation for step in play(TextArenaEnv(config), "[0]", "[8]")]
    first, second = TextArenaEnv(config), TextArenaEnv(config)
    random.seed(1)
    expected = random.Random(1).random()
    first.reset(3)
    second.reset(4)
    one = first.step("[0]")
    second.step("[3]")
    two = first.step("[8]")
    assert random.random() == expected
    assert [one.observation, two.observation] == alone
    assert TextArenaEnv(config).reset(3) != TextArenaEnv(config).reset(6)


def test_games_for_one_give_their_reward_and_reason() -> None:
    env = TextArenaEnv(TextArenaConfig(id="GuessTheNumber-v0"))
    low, high = 1, 20
    env.reset(5)
    while True:
        guess = (low + high) // 2
        step = env.step(f"[{guess}]")
        if step.terminated:
            break
        assert step.reward == 0.0
        if "higher" in step.observation.text.rsplit(f"[{guess}]", 1)[-1]:
            low = guess + 1
        else:
            high = guess - 1
    assert (step.reward, step.info["success"]) == (1.0, True)
    assert step.observation.text == step.info["reason"] != ""


def test_a_random_opponent_plays_legal_moves_until_someone_wins() -> None:
    rewards = set()
    for seed in range(0, 36, 3):
        env = TextArenaEnv(TextArenaConfig(id="TicTacToe-v0"))
        shown = env.reset(seed).text
        assert f"You are Player {env._player}" in shown
        step = None
        for square in (4, 0, 8, 2, 6, 1, 3, 5, 7):
            if f"'[{square}]'" in shown.splitlines()[-1]:
                step = env.step(f"[{square}]")
                shown = step.observation.text
                if step.terminated:
                    break
        assert step is not None
        assert step.terminated
        assert not step.info["invalid_move"]
        rewards.add(step.reward)
    assert {1.0, -1.0} <= rewards


GAMES: list[tuple[dict[str, Any], str]] = [
    ({"id": "TicTacTo-v0"}, r"no such game\n.*did you mean TicTacToe-v0\?"),
    ({"id": "ConnectFour-v0"}, r"lists no legal moves.*\n.*such as TicTacToe-v0"),
    ({"id": "ThreePlayerTicTacToe-v0"}, r"cannot be started with 1 or 2 players.*\n.*one or two players"),
    ({"id": "TicTacToe-v0", "players": 1}, r"cannot be started with 1 players.*\n.*one or two players"),
    ({"id": "GuessTheNumber-v0", "kwargs": {"sise": 3}}, r"cannot be built.*\n.*correct env\.kwargs"),
    ({"id": "Klondike-v0"}, r"TextArena cannot load it.*\n.*use another game"),
]


@pytest.mark.parametrize(("fields", "message"), GAMES, ids=[case[0]["id"] for case in GAMES])
def test_a_game_that_cannot_be_played_is_refused_with_the_cause(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env_factory(TextArenaConfig(**fields))


def test_word_lists_are_never_downloaded_but_read_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("nltk downloads"))
    config = TextArenaConfig(id="Hangman-v0")
    with pytest.raises(ConfigError, match=r"nltk's corpora/words.*\n.*python -m nltk\.downloader words.*NLTK_DATA"):
        env_factory(config)
    (tmp_path / "corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (tmp_path / "corpora/words" / name).write_text("banana\n")
    env_factory(config)
    env = TextArenaEnv(config)
    env.reset(0)
    assert env.step("[banana]").info["success"]


def test_a_game_that_raises_costs_its_own_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = build_vector_env(TextArenaConfig(id="GuessTheNumber-v0", processes=None))
    monkeypatch.setattr("textarena.envs.GuessTheNumber.env.GuessTheNumberEnv.step", lambda *_, **__: 1 / 0)
    envs.start(0, 3)
    envs.poll()
    envs.step(0, ["[4]"])
    (event,) = envs.poll()
    assert isinstance(event, EpisodeFailed)
    assert event.failure.error_type == "ZeroDivisionError"
