"""If these fail, an environment behaves differently on a service or an env host than in the process of the run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from env_services import env_service
from standalone_workers import ThreadWorker

from quintet.config.compose import load_experiment
from quintet.config.native.envs import ENVS
from quintet.config.native.experiment import Experiment
from quintet.envs.env import NUMBER, TEXT
from quintet.envs.event_messages import event_digest
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted, VectorEnv
from quintet.runtime.standalone.envs import hosted_vector_env

PAINTER = """
import numpy as np
from quintet.records import Observation, Step

class Painter:
    actions = ("Dot", "Fail", "Wrong")

    def instruction(self):
        return "Paint."

    def reset(self, seed):
        self.image = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        return Observation("empty", (self.image,))

    def step(self, action):
        if action == "Fail":
            raise RuntimeError("no paint")
        if action == "Wrong":
            return Step(Observation("x", (self.image[0],)), 0.0, False, False)
        self.image = self.image.copy()
        self.image[3, 4] = 255
        ended = bool(self.image[0, 0, 0] % 2)
        observation = Observation("dot \\u2713", (self.image, self.image[:8]))
        return Step(observation, np.float32(0.5), ended, False, {"success": ended})

    def close(self):
        pass
"""
ENV_WORDS = {
    "frozenlake": ["env.slippery=true", "env.floor_density=0.9"],
    "sokoban": ["env.name=sokoban", "env.max_steps=9"],
    "custom": ["env={name: custom, path: 'painter.py:Painter', processes: null}"],
    "gymnasium": ["env={name: gymnasium, id: Blackjack-v1, processes: null}"],
    "textarena": ["env={name: textarena, id: TicTacToe-v0, processes: null}"],
    "navigation": ["env={name: navigation, render: text, max_steps: 12, distance_reward: 0.5}"],
    "primitive_skill": ["env={name: primitive_skill, task: StackThreeCube, render: text}"],
}
IMAGE_SIZE = "env.resolution=24"
CASES = ENV_WORDS | {
    "frozenlake as images": ["env.render=vision"],
    "sokoban as images": ["env.name=sokoban", "env.render=vision"],
    "navigation as images": ["env={name: navigation, multiview: true, eval_set: long_horizon}", IMAGE_SIZE],
    "primitive_skill as images": ["env={name: primitive_skill, task: PutAppleInDrawer}", IMAGE_SIZE],
}
SEEDS = range(12)
TURNS = 8


def experiment(*words: str) -> Experiment:
    return load_experiment(None, words).experiment


@contextmanager
def opened(way: str, words: Sequence[str]) -> Iterator[VectorEnv]:
    if way == "service":
        with env_service(*(name for name in ENV_WORDS if name != "custom"), "painter.py:Painter") as server:
            envs = build_run_envs(experiment(*words, f"env.service={{urls: [{server.url}]}}"))
            yield envs
            envs.close()
        return
    placed = experiment(*words, "placement.devices_per_node=3", "placement.envs.devices=[1,2]")
    is_local = way == "in process"
    envs = build_run_envs(placed) if is_local else hosted_vector_env([ThreadWorker(1), ThreadWorker(2)], placed)
    yield envs
    envs.close()


def play(envs: VectorEnv) -> list[EnvEvent]:
    """Play episodes with random actions, until each ends or fails, or for `TURNS` turns; new ones replace them once."""
    events: list[EnvEvent] = []
    choices = {number: random.Random(number) for number in range(2 * len(SEEDS))}
    actions: dict[int, Sequence[str]] = {}
    turns = dict.fromkeys(choices, 0)
    for number, seed in enumerate(SEEDS):
        envs.start(number, seed)
    while envs.pending:
        for event in envs.poll(wait=True):
            events.append(event)
            number = event.episode
            if isinstance(event, EpisodeStarted):
                actions[number] = event.actions
            turns[number] += 1
            ended = isinstance(event, ActionsExecuted) and (event.steps[-1].terminated or event.steps[-1].truncated)
            if isinstance(event, EpisodeFailed) or ended or turns[number] == TURNS:
                envs.drop(number)
                if number < len(SEEDS):
                    envs.start(number + len(SEEDS), number + 100)
            else:
                words = choices[number].choices(actions[number], k=2, weights=_weights(actions[number]))
                envs.step(number, [_filled(word, choices[number]) for word in words])
    return events


def _filled(word: str, choices: random.Random) -> str:
    """An action with numbers and texts for its placeholders."""
    while NUMBER in word:
        word = word.replace(NUMBER, str(choices.randrange(-120, 160)), 1)
    return word.replace(TEXT, f"[{choices.randrange(9)}]")


def _weights(actions: Sequence[str]) -> list[int]:
    return [1 if action in ("Fail", "Wrong") else 8 for action in actions]


@pytest.fixture
def painter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "painter.py").write_text(PAINTER)


def test_every_registered_env_is_compared() -> None:
    assert {entry.name for entry in ENVS if not entry.is_plugin} == ENV_WORDS.keys()


@pytest.mark.parametrize("way", ["service", "env hosts"])
@pytest.mark.parametrize("name", CASES)
def test_episodes_are_those_of_one_process_in_the_same_order(painter: None, name: str, way: str) -> None:
    with opened("in process", CASES[name]) as envs:
        expected = play(envs)
    with opened(way, CASES[name]) as envs:
        played = play(envs)
    failures = [event.failure for event in played if isinstance(event, EpisodeFailed)]
    assert bool(failures) == (name == "custom"), failures[:1]
    assert [event_digest(event) for event in played] == [event_digest(event) for event in expected]
    assert [event.episode for event in played] == [event.episode for event in expected]
    if "image" not in name and name != "custom":
        assert played == expected
        assert len({event.observation.text for event in played if isinstance(event, EpisodeStarted)}) > 1
    else:
        assert any(isinstance(event, EpisodeStarted) and event.observation.images for event in played)
        assert any(isinstance(event, EpisodeFailed) for event in played) == (name == "custom")
