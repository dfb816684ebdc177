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
from quintet.envs.event_messages import event_digest
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.svg.env import SvgEnv
from quintet.envs.svg.icons import icon_code
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
    "svg": ["env={name: svg, image_size: 32, max_shapes: 1, success_score: 0.7}"],
    "custom": ["env={name: custom, path: 'painter.py:Painter', processes: null}"],
}
CASES = ENV_WORDS | {
    "frozenlake as images": ["env.render=vision"],
    "sokoban as images": ["env.name=sokoban", "env.render=vision"],
}
SEEDS = range(12)
TURNS = 8
DRAWINGS = [icon_code(seed, 1) for seed in range(24)] + ["<svg><script/></svg>", ""]
"""Actions of the env `svg`: any code, most of it of another picture."""


def experiment(*words: str) -> Experiment:
    return load_experiment(None, words).experiment


@contextmanager
def opened(way: str, words: Sequence[str]) -> Iterator[VectorEnv]:
    if way == "service":
        with env_service("frozenlake", "sokoban", "svg", "painter.py:Painter") as server:
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
                actions[number] = DRAWINGS if event.actions == SvgEnv.actions else event.actions
            turns[number] += 1
            ended = isinstance(event, ActionsExecuted) and (event.steps[-1].terminated or event.steps[-1].truncated)
            if isinstance(event, EpisodeFailed) or ended or turns[number] == TURNS:
                envs.drop(number)
                if number < len(SEEDS):
                    envs.start(number + len(SEEDS), number + 100)
            else:
                envs.step(number, choices[number].choices(actions[number], k=2, weights=_weights(actions[number])))
    return events


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
    assert [event_digest(event) for event in played] == [event_digest(event) for event in expected]
    assert [event.episode for event in played] == [event.episode for event in expected]
    if name in ("frozenlake", "sokoban"):
        assert played == expected
    else:
        assert any(isinstance(event, EpisodeStarted) and event.observation.images for event in played)
        assert any(isinstance(event, EpisodeFailed) for event in played) == (name == "custom")
