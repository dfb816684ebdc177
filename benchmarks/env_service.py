"""Measure an environment service on loopback: steps and images per second, and its state under random kills.

    python benchmarks/env_service.py [--only kills] [--kill-seconds 600] [--workers 2]
        [--out benchmarks/results/env_service.json]

`steps`: 256 text environments (FrozenLake of 8×8 cells), stepped in this process, behind the service with one request
for all, and with one request per environment: over one connection, over one each, and by `requests.post` as VAGEN's
client sends them. Rounds alternate, so that other load on the machine affects all of them. `images`: 64 environments
that return a rendered image of 224×224 pixels each, decoded by the client. `kills`: worker processes and connections
are killed at random while a second copy of the environments runs in this process, and every observation and reward is
compared. Writes one JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests

from machine import machine
from quintet.config.compose import load_experiment
from quintet.envs.event_messages import event_digest
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, VectorEnv

ROOT = Path(__file__).parents[1]
NUM_ENVS, NUM_IMAGE_ENVS, SIDE = 256, 64, 224
ROUNDS = 40
NUM_SEEDS = 256
"""Few enough that the cache of maps has its final size before the kills."""
KILL_SECONDS = 2.0
"""Mean time between two kills."""
WORDS = ("env.floor_density=1.0", "env.size=8")
ACTIONS = ("Left", "Right", "Up", "Down")
RENDERED = f"""
import numpy as np
from quintet.config.native.envs import SokobanConfig
from quintet.envs.sokoban import Sokoban
from quintet.records import Observation, Step

class Rendered(Sokoban):
    def __init__(self):
        super().__init__(SokobanConfig(width=7, height=7, max_steps=1000000))

    def reset(self, seed):
        super().reset(seed)
        return self.look()

    def look(self):
        return Observation("", (np.ascontiguousarray(self.render()[:{SIDE}, :{SIDE}]),))

    def step(self, action):
        step = super().step(action)
        return Step(self.look(), step.reward, False, False, {{}})
"""


@contextmanager
def served(directory: Path, workers: int, *envs: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run `quintet serve-envs` and yield its URL and process."""
    names = [word for env in envs for word in ("--env", env)]
    command = [sys.executable, "-m", "quintet", "serve-envs", *names, "--port", "0", "--workers", str(workers)]
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield re.search(r"http\S+", process.stdout.readline())[0], psutil.Process(process.pid)  # type: ignore[index]
    finally:
        process.terminate()
        process.wait()


def build(*words: str) -> VectorEnv:
    """Return the vector env of a configuration."""
    return build_run_envs(load_experiment(None, words).experiment)


def start(envs: VectorEnv, count: int) -> None:
    """Start an episode in each env."""
    for number in range(count):
        envs.start(number, number)
    envs.poll(wait=True)


def step_all(envs: VectorEnv, count: int, choose: Callable[[], str]) -> float:
    """Step every env once; return the seconds."""
    actions = [choose() for _ in range(count)]
    started = time.perf_counter()
    for number, action in enumerate(actions):
        envs.step(number, [action])
    events = envs.poll(wait=True)
    seconds = time.perf_counter() - started
    assert len(events) == count
    assert all(isinstance(event, ActionsExecuted) for event in events)
    return seconds


class SingleRequests:
    """One request per environment, over one connection or, as VAGEN's client does, over a connection each."""

    def __init__(self, url: str, *, keeps_connection: bool) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        self._keeps_connection = keeps_connection
        config = {"name": "frozenlake", "size": 8, "floor_density": 1.0}
        self._session = self._post("/sessions", {"env": config})["session"]
        self._post(f"/sessions/{self._session}/reset", {"seeds": {str(each): each for each in range(NUM_ENVS)}})

    def _post(self, path: str, body: Any) -> Any:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(self._connection.getresponse().read())
        if not self._keeps_connection:
            self._connection.close()
        return answer

    def step_all(self, choose: Callable[[], str]) -> float:
        """Step every env once; return the seconds."""
        started = time.perf_counter()
        for number in range(NUM_ENVS):
            results = self._post(f"/sessions/{self._session}/step", {"actions": {str(number): [choose()]}})["results"]
            assert "steps" in results[0]
        return time.perf_counter() - started


def step_by_vagens_client(url: str, choose: Callable[[], str]) -> float:
    """Step every env once over VAGEN's route for one env; return the seconds."""
    seconds = 0.0
    for number in range(NUM_ENVS):
        text = f"<think></think><answer>{choose()}</answer>"
        started = time.perf_counter()
        response = requests.post(f"{url}/step/env{number}", json={"action": text}, timeout=60)
        assert "reward" in response.json()
        seconds += time.perf_counter() - started
    return seconds


def start_vagen(url: str) -> None:
    """Create the envs of VAGEN's client, and reset them."""
    config = {"env_name": "frozenlake", "env_config": {"size": 8, "p": 1.0}}
    for path, body in (
        ("environments", {"ids2configs": {f"env{each}": config for each in range(NUM_ENVS)}}),
        ("batch/reset", {"ids2seeds": {f"env{each}": each for each in range(NUM_ENVS)}}),
    ):
        requests.post(f"{url}/{path}", json=body, timeout=60).raise_for_status()


def measure_steps(directory: Path, workers: int) -> dict[str, Any]:
    """Return steps per second in the three ways, and the ratios of their medians."""
    choose = partial(random.Random(0).choice, ACTIONS[:2])
    with served(directory, workers, "frozenlake") as (url, _):
        local, remote = build(*WORDS), build(*WORDS, f"env.service.urls=['{url}']")
        single = {keeps: SingleRequests(url, keeps_connection=keeps) for keeps in (True, False)}
        start_vagen(url)
        start(local, NUM_ENVS)
        start(remote, NUM_ENVS)
        names = ("in_process", "batched", "one_per_env", "one_per_env_and_connection", "vagens_client")
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(ROUNDS):
            seconds["in_process"].append(step_all(local, NUM_ENVS, choose))
            seconds["batched"].append(step_all(remote, NUM_ENVS, choose))
            if number % 8 == 0:
                seconds["one_per_env"].append(single[True].step_all(choose))
                seconds["one_per_env_and_connection"].append(single[False].step_all(choose))
                seconds["vagens_client"].append(step_by_vagens_client(url, choose))
        remote.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    fastest = {name: min(values) for name, values in seconds.items()}
    return {
        "envs": NUM_ENVS,
        "median_seconds": medians,
        "fastest_seconds": fastest,
        "speed_of_batches_relative_to": {name: medians[name] / medians["batched"] for name in names},
        "fastest_relative_to": {name: fastest[name] / fastest["batched"] for name in names},
    }


def measure_images(directory: Path, workers: int) -> dict[str, Any]:
    """Return images per second that the client gets as arrays."""
    (directory / "rendered.py").write_text(RENDERED)
    choose = partial(random.Random(0).choice, ACTIONS)
    with served(directory, workers, "rendered.py:Rendered") as (url, _), contextlib.chdir(directory):
        custom = "env={name: custom, path: 'rendered.py:Rendered', processes: null"
        seconds = {}
        for name, service in (("in_process", ""), ("served", f", service: {{urls: ['{url}']}}")):
            envs = build(f"{custom}{service}}}")
            start(envs, NUM_IMAGE_ENVS)
            seconds[name] = [step_all(envs, NUM_IMAGE_ENVS, choose) for _ in range(ROUNDS)]
            envs.close()
    rates = {name: NUM_IMAGE_ENVS / statistics.median(values) for name, values in seconds.items()}
    fastest = NUM_IMAGE_ENVS / min(seconds["served"])
    return {"pixels": SIDE, "envs": NUM_IMAGE_ENVS, "images_per_second": rates, "fastest_images_per_second": fastest}


class KillableProxy:
    """Forwards connections to a server, until they are killed."""

    def __init__(self, url: str) -> None:
        self._target = (urlsplit(url).hostname, urlsplit(url).port)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            server = socket.create_connection(self._target)
            self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            self._open.discard(each)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def kill(self) -> None:
        """Break all connections."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def resources(server: psutil.Process) -> dict[str, float]:
    """Return memory, processes and open files of a server."""
    children = server.children(recursive=True)
    memory = 0
    for each in (server, *children):
        with contextlib.suppress(psutil.Error):
            memory += each.memory_info().rss
    return {"rss_mib": memory / (1 << 20), "processes": 1 + len(children), "files": server.num_fds()}


def killer(server: psutil.Process, proxy: KillableProxy, stop: threading.Event, counts: dict[str, int]) -> None:
    """Kill worker processes and connections at random until `stop`."""
    choices = random.Random(1)
    while not stop.wait(choices.expovariate(1 / KILL_SECONDS)):
        if choices.random() < 0.5:
            proxy.kill()
            counts["connections"] += 1
            continue
        workers = [each for each in server.children(recursive=True) if each.ppid() != server.pid]
        if workers:
            with contextlib.suppress(psutil.Error):
                choices.choice(workers).kill()
                counts["workers"] += 1


def measure_kills(directory: Path, workers: int, seconds: float) -> dict[str, Any]:
    """Play short episodes while workers and connections are killed, and compare all events with a copy in process."""
    words = (*WORDS, "env.max_steps=12", "env.slippery=true")
    counts, stop = {"workers": 0, "connections": 0}, threading.Event()
    result: dict[str, Any] = {"episodes": 0, "events": 0, "different": 0, "failed": 0}
    with served(directory, workers, "frozenlake") as (url, server):
        proxy = KillableProxy(url)
        local = build(*words)
        remote = build(*words, f"env.service={{urls: ['{proxy.url}'], max_retries: 6}}")
        play_both(local, remote, time.monotonic() + 15.0, result, first=0)
        result["before"] = resources(server)
        thread = threading.Thread(target=killer, args=(server, proxy, stop, counts))
        thread.start()
        play_both(local, remote, time.monotonic() + seconds, result, first=1 << 20)
        stop.set()
        thread.join()
        play_both(local, remote, time.monotonic() + 2.0, result, first=1 << 21)
        result["after"] = resources(server)
        reassigned = dict(remote.pop_metrics())["env/episodes_reassigned"]
        remote.close()
        proxy.kill()
    load = os.getloadavg()[0]
    return {"seconds": seconds, "load": load, "killed": counts, "episodes_replayed": reassigned} | result


def play_both(local: VectorEnv, remote: VectorEnv, end: float, result: dict[str, Any], first: int) -> None:
    """Play rounds of 64 episodes in both until the end, with the same actions."""
    choices, number = random.Random(first), first
    while time.monotonic() < end:
        running = {number + index: None for index in range(64)}
        number += 64
        for episode in running:
            local.start(episode, episode % NUM_SEEDS)
            remote.start(episode, episode % NUM_SEEDS)
        result["episodes"] += len(running)
        while running:
            for expected, event in zip(local.poll(wait=True), remote.poll(wait=True), strict=True):
                compare(expected, event, result)
                ended = isinstance(expected, ActionsExecuted) and (
                    expected.steps[-1].terminated or expected.steps[-1].truncated
                )
                if ended or isinstance(event, EpisodeFailed):
                    del running[event.episode]
                    local.drop(event.episode)
                    remote.drop(event.episode)
            for episode in running:
                actions = [choices.choice(ACTIONS)]
                local.step(episode, actions)
                remote.step(episode, actions)


def compare(expected: EnvEvent, event: EnvEvent, result: dict[str, Any]) -> None:
    """Count an event, and whether it differs."""
    result["events"] += 1
    if isinstance(event, EpisodeFailed):
        result["failed"] += 1
        reasons = result.setdefault("failures", {})
        reasons[event.failure.message] = reasons.get(event.failure.message, 0) + 1
    elif expected.episode != event.episode or event_digest(expected) != event_digest(event):
        result["different"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kill-seconds", type=float, default=600.0)
    parser.add_argument("--only", choices=("steps", "images", "kills"), help="keep the file's other figures")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/env_service.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "workers": options.workers}
    if options.only:
        result = json.loads(options.out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in (
            ("steps", measure_steps),
            ("images", measure_images),
            ("kills", lambda *words: measure_kills(*words, options.kill_seconds)),
        ):
            if options.only not in (None, name):
                continue
            result[name] = measure(Path(folder), options.workers)
            print(name, json.dumps(result[name]), flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
