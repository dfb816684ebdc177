"""If these fail, an environment behaves differently on a service, or under Ray, than in the process of the run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from env_services import env_service
from standalone_workers import ThreadWorker

from quintet.config.compose import load_experiment
from quintet.config.native.envs import ENVS
from quintet.config.native.experiment import Experiment
from quintet.envs.env import NUMBER, TEXT
from quintet.envs.event_messages import event_digest
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.svg.env import SvgEnv
from quintet.envs.svg.targets import icon_code
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted, VectorEnv
from quintet.hardware import is_installed
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.listener import WorkerListener
from quintet.runtime.env_hosts import hosted_vector_env

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
HOST = """
import os, sys
from quintet.config.compose import load_experiment
from quintet.runtime.calls.code_check import AllowedCode
from quintet.runtime.calls.listener import ControllerAddress
from quintet.runtime.worker import Worker
from quintet.runtime.worker_process import WorkerProcess
host, port, token = sys.argv[1:]
own = load_experiment(None, ["env={name: custom, path: 'painter.py:Painter', processes: null}"]).experiment
controller = ControllerAddress(host, int(port), token)
WorkerProcess(controller, int(os.environ["RANK"]), "the run", allowed_code=AllowedCode(own)).run(Worker())
"""
LAUNCHER = """
import os, sys
from quintet.config.torchrun import RankInfo
from quintet.runtime.ray_cluster.launcher import _connected
from quintet.runtime.ray_cluster.node_processes import NodeProcesses
with _connected("local", RankInfo(rank=0, size=2, local_rank=0, local_size=2)):
    import ray
    actor = ray.remote(NodeProcesses).options(num_cpus=2).remote()
    variables = {rank: {"RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in (1, 2)}
    ray.get(actor.start.remote([sys.executable, "-c", *sys.argv[1:]], os.getcwd(), variables))
    sys.stdin.read()
    ray.get(actor.kill.remote())
"""
QUESTIONS = [{"query": f"{number} + 1?", "response": f"The answer is: {number + 1}"} for number in range(60)]
ARGUMENTS: Mapping[str, Sequence[Sequence[str]]] = {
    "frozenlake": [["env.slippery=true", "env.floor_density=0.9"], ["env.render=vision"]],
    "sokoban": [["env.max_steps=9"], ["env.render=vision"]],
    "svg": [["env.image_size=32", "env.max_shapes=1", "env.success_score=0.7"]],
    "gymnasium": [["env.id=Blackjack-v1", "env.processes=null"]],
    "textarena": [["env.id=TicTacToe-v0", "env.processes=null"]],
    "navigation": [
        ["env.render=text", "env.max_steps=12", "env.distance_reward=0.5"],
        ["env.multiview=true", "env.eval_set=long_horizon", "env.resolution=24"],
    ],
    "primitive_skill": [
        ["env.task=StackThreeCube", "env.render=text"],
        ["env.task=PutAppleInDrawer", "env.resolution=24"],
    ],
    "blackjack": [["env.natural=true"], ["env.render=vision", "env.sab=true"]],
    "search": [["env.path=questions.jsonl", "env.question_key=query", "env.answer_key=response", "env.processes=null"]],
    "custom": [["env.path=painter.py:Painter", "env.processes=null"]],
}
"""Configurations in which each registered env is compared; its defaults if it has none here."""


SEEDS = range(12)
TURNS = 8
DRAWINGS = [icon_code(seed, 1) for seed in range(24)] + ["<svg><script/></svg>", ""]
"""Actions of the env `svg`: any code, most of it of another picture."""
Backends = Mapping[str, Callable[[Sequence[str]], VectorEnv]]


def cases() -> Iterator[ParameterSet]:
    """Each registered env; those with a missing package are skipped."""
    for entry in ENVS:
        missing = ", ".join(entry.missing())
        marks = [pytest.mark.skip(reason=f"requires {missing}")] if missing else []
        for words in () if entry.is_plugin else ARGUMENTS.get(entry.name, [[]]):
            yield pytest.param((f"env.name={entry.name}", *words), marks=marks, id=" ".join([entry.name, *words]))


def experiment(*overrides: str) -> Experiment:
    return load_experiment(None, overrides).experiment


def on_hosts(workers: Sequence[WorkerConnection], overrides: Sequence[str]) -> VectorEnv:
    placed = experiment(*overrides, "placement.devices_per_node=3", "placement.envs.devices=[1,2]")
    return hosted_vector_env(workers, placed)


@contextmanager
def ray_workers(directory: Path) -> Iterator[list[WorkerConnection]]:
    """Two env hosts, started as the ranks of a run are: by an actor of a Ray that runs on this machine."""
    if not is_installed("ray"):
        pytest.skip("pip install 'quintet[ray]'")
    listener = WorkerListener("127.0.0.1", {1: "envs", 2: "envs"}, "the run", lost_seconds=120.0)
    command = [sys.executable, "-c", LAUNCHER, HOST, *map(str, listener.address), listener.token]
    with subprocess.Popen(command, cwd=directory, stdin=subprocess.PIPE) as launcher:
        try:
            yield listener.wait_for((1, 2), timeout_seconds=300.0)
        finally:
            launcher.communicate(timeout=120)
            listener.close()


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    """Functions that build the vector env of a configuration: on one server, and on env hosts of one Ray."""
    directory = tmp_path_factory.mktemp("envs")
    (directory / "painter.py").write_text(PAINTER)
    (directory / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    names = [entry.name for entry in ENVS if not entry.is_plugin and entry.name != "custom" and not entry.missing()]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.chdir(directory)

        @cache
        def url() -> str:
            return stack.enter_context(env_service(*names, "painter.py:Painter")).url

        @cache
        def workers() -> list[WorkerConnection]:
            return stack.enter_context(ray_workers(directory))

        yield {
            "in process": lambda words: build_run_envs(experiment(*words)),
            "service": lambda words: build_run_envs(experiment(*words, f"env.service={{urls: ['{url()}']}}")),
            "env hosts in threads": lambda words: on_hosts([ThreadWorker(1), ThreadWorker(2)], words),
            "Ray": lambda words: on_hosts(workers(), words),
        }


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


@pytest.mark.parametrize("way", ["service", "env hosts in threads", "Ray"])
@pytest.mark.parametrize("overrides", tuple(cases()))
def test_episodes_are_those_of_one_process_in_the_same_order(
    ways: Backends, overrides: Sequence[str], way: str
) -> None:
    with closing(ways["in process"](overrides)) as envs:
        expected = play(envs)
    with closing(ways[way](overrides)) as envs:
        played = play(envs)
    failures = [event.failure for event in played if isinstance(event, EpisodeFailed)]
    assert bool(failures) == ("env.name=custom" in overrides), failures[:1]
    assert [event_digest(event) for event in played] == [event_digest(event) for event in expected]
    assert [event.episode for event in played] == [event.episode for event in expected]
    assert any(isinstance(event, ActionsExecuted) for event in played)
    if any(isinstance(event, EpisodeStarted) and event.observation.images for event in played):
        return
    assert played == expected or "env.name=custom" in overrides  # also `info`, which JSON can express here
    assert len({event.observation.text for event in played if isinstance(event, EpisodeStarted)}) > 1
