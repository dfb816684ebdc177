"""If these fail, one env that hangs, dies or returns invalid output takes others down, or the whole run with it."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quintet.config.native.envs import CustomEnvConfig, EnvConfig, EnvProcessesConfig, FrozenLakeConfig, SokobanConfig
from quintet.envs import validation
from quintet.envs.env_process import EnvProcess
from quintet.envs.factory import build_env, build_vector_env
from quintet.envs.subprocess_env import SubprocessVectorEnv
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted, LocalVectorEnv, VectorEnv
from quintet.errors import ConfigError, MachineError
from quintet.records import Failure, Observation, Step
from quintet.relations import Relation

TIMEOUT = 0.6

ENV = '''
import os, random, signal, stat, subprocess, sys, time
import numpy as np
from quintet.records import Observation, Step


class Trouble:
    """Does what its actions say."""

    actions = ("go", "raise", "hang", "hang with a child", "SIGKILL", "exit", "sys.exit", "line", "deep", "flood")

    def __init__(self, note="", broken=False, odd=False):
        if broken:
            raise OSError("no room")
        self.note, self.odd = note, odd

    def instruction(self):
        return 7 if self.odd else "Go three times."

    def reset(self, seed):
        self.place = 0
        if seed == 13:
            raise ValueError("an unlucky map")
        if seed == 14:
            time.sleep(600)
        if seed == 15:
            return "a text"
        if seed == 16:
            os.kill(os.getpid(), signal.SIGSEGV)
        print("an env that talks")
        return Observation(f"{self.place} of 3 {random.random()} {np.random.random()}")

    def step(self, action):
        if action == "allocate":
            bytearray(4 << 30)
        if action == "raise":
            raise RuntimeError("the floor gave way")
        if action == "hang with a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(self.note, "w").write(f"{os.getpid()} {child.pid}")
        if action.startswith("hang"):
            time.sleep(600)
        if action == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "exit":
            os._exit(3)
        if action == "sys.exit":
            sys.exit(4)
        if action in ("line", "deep", "flood"):
            what = {"line": b"hello\\n", "deep": b"[" * 100000 + b"\\n", "flood": b'{"step": 1}\\n' * 3}[action]
            for number in range(3, 64):
                if os.path.exists(f"/proc/self/fd/{number}") and stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.write(number, what)
        if action in RUBBISH:
            return RUBBISH[action]
        self.place += 1
        won = self.place == 3
        told = str(os.getpid()) if action == "pid" else f"{self.place} of 3"
        seen = Observation(told, (np.full((2, 3, 3), self.place, np.uint8),))
        return Step(seen, np.float32(won), np.bool_(won), False, {"success": won, "seen": {1}})

    def close(self):
        if self.note.endswith("closed"):
            open(self.note, "a").write("closed ")


SEEN = Observation("")
RUBBISH = {
    "nothing": None,
    "tuple": (SEEN, 0.0, False, False, {}),
    "nan": Step(SEEN, float("nan"), False, False),
    "word": Step(SEEN, "much", False, False),
    "flag": Step(SEEN, 0.0, 1, False),
    "info": Step(SEEN, 0.0, False, False, ["success"]),
    "text": Step("a text", 0.0, False, False),
    "number": Step(Observation(5), 0.0, False, False),
    "picture": Step(Observation("", (np.zeros((2, 2)),)), 0.0, False, False),
}
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("envs") / "trouble.py"
    path.write_text(ENV)
    return f"{path}:Trouble"


@pytest.fixture(scope="module")
def envs(file: str) -> Iterator[VectorEnv]:
    start_episodes = build_vector_env(trouble(file))
    assert isinstance(start_episodes, SubprocessVectorEnv)
    yield start_episodes
    start_episodes.close()


def trouble(path: str, processes: dict[str, object] | None = None, **arguments: object) -> CustomEnvConfig:
    limits = {"step_timeout_seconds": TIMEOUT, "reset_timeout_seconds": TIMEOUT, **(processes or {})}
    return CustomEnvConfig(
        name="custom", path=path, arguments=arguments, processes=EnvProcessesConfig.model_validate(limits)
    )


def poll_events(envs: VectorEnv, count: int) -> dict[int, EnvEvent]:
    """The next answers, by episode."""
    results: dict[int, EnvEvent] = {}
    while len(results) < count:
        some = envs.poll(wait=True)
        assert some, f"{len(results)} answers, and no more to come"
        results |= {answer.episode: answer for answer in some}
    assert len(results) == count
    return results


def start_episodes(envs: VectorEnv, seeds: dict[int, int]) -> dict[int, EnvEvent]:
    for episode, seed in seeds.items():
        envs.start(episode, seed)
    return poll_events(envs, len(seeds))


def failure(envs: VectorEnv, action: str, episode: int = 100) -> Failure:
    """What becomes of an episode that takes an action, while another goes on."""
    start_episodes(envs, {episode: 1, episode + 1: 2})
    envs.step(episode, [action])
    envs.step(episode + 1, ["go", "go"])
    answers = poll_events(envs, 2)
    envs.drop(episode)
    envs.drop(episode + 1)
    other, broke = answers[episode + 1], answers[episode]
    assert isinstance(other, ActionsExecuted)
    assert [step.observation.text for step in other.steps] == ["1 of 3", "2 of 3"]
    assert isinstance(broke, EpisodeFailed)
    return broke.failure


def gone(pid: int, seconds: float = 5.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_each_episode_runs_in_its_own_process(envs: VectorEnv) -> None:
    answers = start_episodes(envs, {1: 5, 2: 6})
    begun = answers[1]
    assert isinstance(begun, EpisodeStarted)
    assert (begun.instruction, begun.actions[0]) == ("Go three times.", "go")
    for episode in (1, 2):
        envs.step(episode, ["pid", "go", "go", "go"])
    actual = poll_events(envs, 2)
    steps = {episode: answer.steps for episode, answer in actual.items() if isinstance(answer, ActionsExecuted)}
    assert [(step.reward, step.terminated, step.info["success"]) for step in steps[1]] == [
        (0.0, False, False),
        (0.0, False, False),
        (1.0, True, True),
    ]
    assert np.array_equal(steps[1][2].observation.images[0], np.full((2, 3, 3), 3))
    assert len({os.getpid(), *(int(one[0].observation.text) for one in steps.values())}) == 3
    for episode in (1, 2):
        envs.drop(episode)
    assert not envs.pending


@pytest.mark.parametrize(
    ("action", "error_type", "message"),
    [
        ("raise", "RuntimeError", r"the floor gave way \(trouble.py:\d+\)"),
        ("hang", "Timeout", "no step after 0.6 s: its process was killed"),
        ("SIGKILL", "ProcessDied", r"its process died of SIGKILL \(out of memory\?\)"),
        ("exit", "ProcessDied", "its process ended with status 3"),
        ("sys.exit", "SystemExit", "4"),
        ("line", "InvalidOutput", "the worker process sent b'hello'"),
        ("deep", "InvalidOutput", "the worker process sent"),
        ("flood", "InvalidOutput", "the worker process sent"),
    ],
)
def test_an_env_error_fails_only_its_own_episode(envs: VectorEnv, action: str, error_type: str, message: str) -> None:
    actual = failure(envs, action)
    assert (actual.where, actual.error_type) == ("step", error_type)
    assert re.match(message, actual.message), actual.message


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("nothing", "step() returned a NoneType, not a Step"),
        ("tuple", "step() returned a tuple, not a Step"),
        ("nan", "the reward of step() is nan, not a finite number"),
        ("word", "the reward of step() is 'much', not a finite number"),
        ("flag", "terminated of step() is an int, not a bool"),
        ("info", "the info of step() is a list, not a mapping"),
        ("text", "step() returned a str, not an Observation"),
        ("number", "the observation of step() returned an int, not text"),
        ("picture", "an image of step() is not a uint8 array [height, width, 3]"),
    ],
)
@pytest.mark.parametrize("here", [False, True], ids=["process", "in this process"])
def test_invalid_output_fails_the_episode_with_its_cause(
    envs: VectorEnv, file: str, action: str, message: str, here: bool
) -> None:
    played = build_vector_env(trouble(file).model_copy(update={"processes": None})) if here else envs
    assert failure(played, action) == Failure("step", "InvalidOutput", message)


def test_an_env_that_exceeds_its_memory_fails_only_its_own_episode(file: str) -> None:
    envs = build_vector_env(trouble(file, {"memory_gib": 2.0, "step_timeout_seconds": 30.0}))
    with closing(envs):
        assert failure(envs, "allocate").error_type == "MemoryError"


def test_a_failing_reset_fails_only_its_own_episode(envs: VectorEnv) -> None:
    answers = start_episodes(envs, {1: 13, 2: 14, 3: 15, 4: 16, 5: 17})
    actual = {episode: answer.failure for episode, answer in answers.items() if isinstance(answer, EpisodeFailed)}
    assert {episode: (one.where, one.error_type) for episode, one in actual.items()} == {
        1: ("reset", "ValueError"),
        2: ("reset", "Timeout"),
        3: ("reset", "InvalidOutput"),
        4: ("reset", "ProcessDied"),
    }
    assert actual[3].message == "reset() returned a str, not an Observation"
    assert "SIGSEGV" in actual[4].message
    assert isinstance(answers[5], EpisodeStarted)
    for episode in range(1, 6):
        envs.drop(episode)


@pytest.mark.parametrize(("option", "error_type"), [("broken", "OSError"), ("odd", "InvalidOutput")])
def test_an_env_that_cannot_be_constructed_fails_every_episode(file: str, option: str, error_type: str) -> None:
    played = build_vector_env(trouble(file, **{option: True}))
    actual = start_episodes(played, {1: 1, 2: 2})
    played.close()
    failures = [answer.failure for answer in actual.values() if isinstance(answer, EpisodeFailed)]
    assert [(one.where, one.error_type) for one in failures] == [("start", error_type)] * 2


def test_a_reset_and_a_step_have_their_own_time_limits() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        limits = EnvProcessesConfig(reset_timeout_seconds=7.0, step_timeout_seconds=3.0)
        process = EnvProcess(0, ours, limits=limits)
        process.start_episode(1, 5)
        theirs.sendall(b'{"ready": true}\n')
        ours.setblocking(False)
        assert list(process.receive()) == []
        assert (process.where, process.time_limit) == ("reset", 7.0)
        process.step(["go"])
        assert (process.where, process.time_limit) == ("step", 3.0)


def test_a_hanging_env_is_killed_with_its_child_processes(file: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    played = build_vector_env(trouble(file, note=str(note)))
    assert failure(played, "hang with a child").error_type == "Timeout"
    assert all(gone(int(pid)) for pid in note.read_text().split())
    played.close()


def test_a_process_that_dies_between_steps_is_reported_at_the_next_step(file: str) -> None:
    played = build_vector_env(trouble(file))
    start_episodes(played, {1: 1})
    played.step(1, ["pid"])
    (moved,) = poll_events(played, 1).values()
    assert isinstance(moved, ActionsExecuted)
    pid = int(moved.steps[0].observation.text)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    time.sleep(0.2)
    assert played.poll() == []
    played.step(1, ["go"])
    (broke,) = poll_events(played, 1).values()
    assert isinstance(broke, EpisodeFailed)
    assert broke.failure.error_type == "ProcessDied"
    played.close()


@pytest.mark.parametrize(("episodes", "expected"), [(None, 1), (2, 2), (1, 4)])
def test_processes_play_on_and_are_replaced_when_that_is_wanted(file: str, episodes: int | None, expected: int) -> None:
    """Four episodes, one after another, in one process at a time."""
    played = build_vector_env(
        trouble(file, {"max_processes": 1, "episodes_per_process": episodes, "reset_timeout_seconds": 20.0})
    )
    for episode in range(4):
        played.start(episode, episode)
    pids = set()
    for _ in range(4):
        (begun,) = poll_events(played, 1).values()
        assert isinstance(begun, EpisodeStarted)
        played.step(begun.episode, ["pid"])
        (moved,) = poll_events(played, 1).values()
        assert isinstance(moved, ActionsExecuted)
        pids.add(moved.steps[0].observation.text)
        played.drop(begun.episode)
    played.close()
    assert len(pids) == expected


@pytest.mark.parametrize("here", [False, True], ids=["process", "in this process"])
def test_a_episode_that_ended_is_closed(file: str, tmp_path: Path, here: bool) -> None:
    note = tmp_path / "closed"
    config = trouble(file, {"max_processes": 1}, note=str(note))
    played = build_vector_env(config.model_copy(update={"processes": None}) if here else config)
    start_episodes(played, {1: 1})
    played.drop(1)
    # the only process is free when the episode before is closed
    start_episodes(played, {2: 2})
    assert note.read_text() == "closed "
    played.close()


def test_draws_from_everybody_s_generators_follow_from_the_seed(envs: VectorEnv) -> None:
    first = start_episodes(envs, {1: 50, 2: 51, 3: 50})
    seen = {episode: answer.observation.text for episode, answer in first.items() if isinstance(answer, EpisodeStarted)}
    for episode in first:
        envs.drop(episode)
    assert seen[1] == seen[3] != seen[2]


def test_dropping_a_busy_env_kills_its_process(file: str) -> None:
    played = build_vector_env(trouble(file, {"step_timeout_seconds": 600}))
    start_episodes(played, {1: 1})
    played.step(1, ["hang"])
    assert played.poll() == []
    played.drop(1)
    assert not played.pending
    assert played.poll(wait=True) == []
    assert isinstance(start_episodes(played, {2: 2})[2], EpisodeStarted)
    played.close()


UNLOADABLE = [
    ("trouble.py:Truoble", {}, "has no 'Truoble'"),
    ("trouble.py:Trouble", {"depth": 3}, "cannot be called with depth"),
    ("nowhere.py:Trouble", {}, "there is no file"),
    ("trouble.py", {}, "does not name a function or class"),
    ("trouble.py:RUBBISH", {}, "is dict, not a class"),
    ("half.py:Half", {}, r"lacks step\(\), close\(\)"),
    ("worse.py:Env", {}, "importing it failed: ZeroDivisionError"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "message", "here"),
    [(*case, True) for case in UNLOADABLE] + [(*UNLOADABLE[0], False), (*UNLOADABLE[-1], False)],
)
def test_an_env_that_cannot_be_loaded_is_reported_at_once(
    file: str, name: str, arguments: dict[str, object], message: str, here: bool
) -> None:
    folder = Path(file).parent
    (folder / "half.py").write_text(
        "class Half:\n    actions = ('a',)\n    def instruction(self): ...\n    def reset(self, seed): ...\n"
    )
    (folder / "worse.py").write_text("1 / 0\n")
    config = trouble(str(folder / name), **arguments)
    with pytest.raises(ConfigError, match=message):
        build_vector_env(config.model_copy(update={"processes": None}) if here else config)


def test_failing_to_start_a_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    played = build_vector_env(FrozenLakeConfig(processes=EnvProcessesConfig()))
    played.start(1, 1)
    with pytest.raises(MachineError, match="cannot start processes"):
        poll_events(played, 1)
    played.close()


def test_the_death_of_the_fork_server_fails_only_running_episodes(file: str) -> None:
    played = build_vector_env(trouble(file))
    start_episodes(played, {1: 1})
    played.step(1, ["pid"])
    (moved,) = poll_events(played, 1).values()
    assert isinstance(moved, ActionsExecuted)
    pid = moved.steps[0].observation.text
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    played.step(1, ["hang"])
    (broke,) = poll_events(played, 1).values()
    assert isinstance(broke, EpisodeFailed)
    assert broke.failure.error_type == "ProcessDied"
    played.drop(1)
    assert isinstance(start_episodes(played, {2: 2})[2], EpisodeStarted)
    played.close()
    assert gone(int(pid))


@pytest.mark.parametrize("config", [FrozenLakeConfig(slippery=True), SokobanConfig()], ids=lambda config: config.name)
def test_an_env_behaves_the_same_in_and_out_of_process(config: EnvConfig) -> None:
    words = build_env(config).actions
    transcripts = []
    for processes in (None, EnvProcessesConfig(max_processes=3)):
        played = build_vector_env(config.model_copy(update={"processes": processes}))
        assert isinstance(played, LocalVectorEnv) == (processes is None)
        results = [_transcript(played, seed, words) for seed in range(4)]
        played.close()
        transcripts.append(results)
    assert transcripts[0] == transcripts[1]
    assert len({str(one) for one in transcripts[0]}) == 4


def _transcript(envs: VectorEnv, seed: int, actions: tuple[str, ...]) -> list[object]:
    envs.start(seed, seed)
    (begun,) = poll_events(envs, 1).values()
    answers: list[object] = [begun]
    for turn in range(6):
        envs.step(seed, [actions[(seed + turn) % 4], actions[turn % 4]])
        (moved,) = poll_events(envs, 1).values()
        assert isinstance(moved, ActionsExecuted)
        answers.append(moved)
        if moved.steps[-1].terminated:
            break
    envs.drop(seed)
    return answers


RUN = """
import sys, time
from quintet.config.native.envs import CustomEnvConfig, EnvProcessesConfig
from quintet.envs.factory import build_vector_env

limits, told = EnvProcessesConfig(step_timeout_seconds=600.0), dict(note=sys.argv[2])
envs = build_vector_env(CustomEnvConfig(name="custom", path=sys.argv[1], arguments=told, processes=limits))
envs.start(1, 1)
envs.poll(wait=True)
envs.step(1, ["hang with a child"])
{last}
"""


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ("envs.poll(wait=True)", lambda run: run.send_signal(signal.SIGKILL)),
        ("envs.poll(wait=True)", lambda run: run.send_signal(signal.SIGTERM)),
        ("while not __import__('os').path.exists(sys.argv[2]): time.sleep(0.05)", lambda run: None),
    ],
    ids=["SIGKILL", "SIGTERM", "no close"],
)
def test_no_process_outlives_the_run(
    file: str, tmp_path: Path, last: str, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    note = tmp_path / "pids"
    command = [sys.executable, "-c", textwrap.dedent(RUN.format(last=last)), file, str(note)]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 30
    while not (note.exists() and " " in note.read_text()) and time.monotonic() < ends:
        time.sleep(0.02)
    end(run)
    run.wait(20)
    assert all(gone(int(pid)) for pid in note.read_text().split())


def test_observations_and_actions_are_unchanged_between_processes() -> None:
    image, relations = np.arange(24, dtype=np.uint8).reshape(2, 4, 3), (Relation("box", "above", None),)
    step = Step(Observation("seen", (image,), relations), 0.5, True, False, {"a": 1})
    again = validation.step_from_message(validation.step_message(step))
    assert (again.reward, again.terminated, again.info) == (0.5, True, {"a": 1})
    assert np.array_equal(again.observation.images[0], step.observation.images[0])
    assert again.observation.relations == relations
    wrong = replace(step.observation, relations=(Relation("box", "up", None),))
    with pytest.raises(validation.InvalidEnvOutputError, match="above, below, same, left, right or None"):
        validation.validate_observation(wrong)
    with pytest.raises(validation.InvalidEnvOutputError):
        validation.step_from_message({**validation.step_message(step), "reward": math.inf})
