"""If these fail, environments behind a service lose their state, or one of them takes others with it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
from env_services import env_service, post, request

from quintet.config.compose import load_experiment
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.service.payload import encode_payload
from quintet.envs.service.png import decode_png, encode_png
from quintet.envs.vector_env import ActionsExecuted, EpisodeFailed
from quintet.errors import ConfigError, MachineError
from quintet.records import Observation, Step
from quintet.runtime.env_service.app import EnvServiceServer
from quintet.runtime.env_service.served_env_process import _Episode
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.env_service.sessions import SessionLimits
from quintet.runtime.http_service.request_error import RequestError

ENVS = """
import os, time, signal
import numpy as np
from quintet.records import Observation, Step

class Mixed:
    actions = ("Count", "Crash", "Hang", "Raise")

    def instruction(self):
        return "Count."

    def reset(self, seed):
        self.count = seed
        return self.look()

    def look(self):
        return Observation(str(self.count), (np.full((8, 8, 3), self.count % 256, np.uint8),))

    def step(self, action):
        if not isinstance(action, str):
            return Step(Observation(f"{type(action).__name__} {action.dtype} {action.shape}"), 1.0, False, False)
        if action == "Crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == "Hang":
            time.sleep(600)
        if action == "Raise":
            raise RuntimeError("raised")
        self.count += 1
        return Step(self.look(), 1.0, False, False)

    def close(self):
        pass
"""
MIXED = "mixed.py:Mixed"


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.py").write_text(ENVS)
    return MIXED


@pytest.fixture
def server() -> Iterator[EnvServiceServer]:
    with env_service("frozenlake", limits=SessionLimits(max_sessions=4, max_envs=6)) as server:
        yield server


def results(server: EnvServiceServer, session: str, path: str, body: Any) -> list[dict[str, Any]]:
    return list(post(server.url, f"/sessions/{session}/{path}", body)["results"])


def open_session(server: EnvServiceServer, **env: Any) -> str:
    return str(post(server.url, "/sessions", {"env": env})["session"])


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def test_a_session_is_reset_stepped_and_closed_in_batches(server: EnvServiceServer) -> None:
    session = open_session(server, size=5)
    started = results(server, session, "reset", {"seeds": {"a": 1, "b": 2}})
    assert [each["observation"]["text"].count("\n") for each in started] == [5, 5]
    stepped = results(server, session, "step", {"actions": {"b": ["Left", "Up"], "a": ["Down"]}})
    assert [len(each["steps"]) for each in stepped] == [2, 1]
    assert results(server, session, "reward", {"envs": ["a"]}) == [{"reward": 0.0}]
    assert results(server, session, "system_prompt", {"envs": ["b"]}) == [{"system_prompt": started[0]["instruction"]}]
    assert results(server, session, "close", {"envs": ["a", "a2"]}) == [{"closed": True}] * 2
    assert results(server, session, "close", {"envs": ["a"]}) == [{"closed": True}]
    (gone,) = results(server, session, "step", {"actions": {"a": ["Left"]}})
    assert "no such environment" in gone["lost"]
    assert post(server.url, f"/sessions/{session}", method="DELETE") == {"closed": True}
    assert post(server.url, f"/sessions/{session}", method="DELETE") == {"closed": True}
    assert request(server.url, "POST", f"/sessions/{session}/reset", {"seeds": {"a": 1}})[0] == 404


def test_health_and_list_name_the_envs_and_the_page_documents_every_route(server: EnvServiceServer) -> None:
    health = json.loads(request(server.url, "GET", "/health")[2])
    assert (health["status"], health["registered_envs"], health["workers"]) == ("ok", ["frozenlake"], 2)
    (listed,) = json.loads(request(server.url, "GET", "/envs")[2])["envs"]
    assert (listed["name"], listed["config"]["size"]) == ("frozenlake", 4)
    page = json.loads(request(server.url, "GET", "/openapi.json")[2])
    assert {"/sessions/{session_id}/exchange", "/batch/step", "/close/{env_id}"} <= page["paths"].keys()
    assert request(server.url, "GET", "/docs")[0] == 200


def test_a_repeated_exchange_is_not_executed_twice(server: EnvServiceServer) -> None:
    session = open_session(server, floor_density=1.0)
    results(server, session, "exchange", {"number": 1, "requests": [{"env": "a", "seed": 3}]})
    step = {"number": 2, "requests": [{"env": "a", "actions": ["Up"]}, {"env": "b", "seed": 4}]}
    first = results(server, session, "exchange", step)
    assert results(server, session, "exchange", step) == first
    step["number"] = 3
    assert results(server, session, "exchange", step) != first
    status, _, body = request(server.url, "POST", f"/sessions/{session}/exchange", {"number": 2, "requests": []})
    assert (status, json.loads(body)["code"]) == (409, "old_exchange")


def test_an_env_can_be_closed_and_started_again_in_one_exchange(server: EnvServiceServer) -> None:
    session = open_session(server)
    (first,) = results(server, session, "exchange", {"requests": [{"env": "a", "seed": 3}]})
    requests = [{"env": "a"}, {"env": "a", "seed": 3}, {"env": "a", "actions": ["Up"]}]
    closed, second, stepped = results(server, session, "exchange", {"requests": requests})
    assert (closed, second) == ({"closed": True}, first)
    assert "steps" in stepped
    assert json.loads(request(server.url, "GET", "/health")[2])["active_environments"] == 1


def test_msgpack_has_the_same_results_with_images_as_bytes(mixed: str) -> None:
    with env_service(mixed) as server:
        session, accept = open_session(server), {"Accept": "application/msgpack", "Content-Type": "application/msgpack"}
        (started,) = results(server, session, "reset", {"seeds": {"a": 7}})
        status, headers, body = request(
            server.url, "POST", f"/sessions/{session}/reset", msgpack.packb({"seeds": {"a": 7}}), accept
        )
        assert (status, headers["content-type"]) == (200, "application/msgpack")
        (packed,) = msgpack.unpackb(body)["results"]
        image = packed["observation"].pop("images")[0]["png"]
        assert (decode_png(image) == np.full((8, 8, 3), 7, np.uint8)).all()
        assert started["observation"].pop("images")
        assert packed == started


def test_the_rewards_of_an_episode_that_cancel_are_0() -> None:
    """In floats, 0.1 + 0.2 - 0.3 is 5.6e-17."""

    class Rewards:
        actions = ("Go",)

        def instruction(self) -> str:
            return ""

        def reset(self, seed: int) -> Observation:
            self.rewards = iter((0.1, 0.2, -0.3))
            return Observation("")

        def step(self, action: str) -> Step:
            return Step(Observation(""), next(self.rewards), False, False, {})

        def close(self) -> None: ...

    episode = _Episode(Rewards)
    episode.start(0)
    for actions in (["Go"], ["Go", "Go"]):
        episode.step(actions)
    assert episode.reward == 0.0


def test_actions_may_be_arrays_and_images(mixed: str) -> None:
    with env_service(mixed) as server:
        session = open_session(server)
        results(server, session, "reset", {"seeds": {"a": 7}})
        actions = [np.ones(3, np.float32), np.zeros((4, 5, 3), np.uint8)]
        body = encode_payload({"actions": {"a": actions}}, "json")
        (stepped,) = results(server, session, "step", body)
        texts = [each["observation"]["text"] for each in stepped["steps"]]
        assert texts == ["ndarray float32 (3,)", "ndarray uint8 (4, 5, 3)"]


@pytest.mark.parametrize(("action", "kind"), [("Crash", "ProcessDied"), ("Hang", "Timeout"), ("Raise", "RuntimeError")])
def test_an_env_that_fails_is_named_and_others_continue_or_are_reported_as_lost(
    mixed: str, action: str, kind: str
) -> None:
    # only a hanging env costs the test this time; on a busy machine, a reset may take seconds
    with env_service(mixed, env_seconds=5.0 if action == "Hang" else 60.0) as server:
        session = open_session(server)
        names = [f"env{number}" for number in range(8)]
        results(server, session, "reset", {"seeds": {name: number for number, name in enumerate(names)}})
        actions = {name: [action if name == "env4" else "Count"] for name in names}
        stepped = dict(zip(names, results(server, session, "step", {"actions": actions}), strict=True))
        assert stepped["env4"]["failure"][:2] == ["step", kind]
        others = {name: result for name, result in stepped.items() if name != "env4"}
        assert all("steps" in each or "lost" in each for each in others.values())
        lost = {name for name, result in others.items() if "lost" in result}
        assert len(lost) <= 3
        eventually(lambda: json.loads(request(server.url, "GET", "/health")[2])["workers"] == 2)
        again = dict(
            zip(names, results(server, session, "step", {"actions": {name: ["Count"] for name in names}}), strict=True)
        )
        alive = {name for name, result in again.items() if "steps" in result}
        dead = set(names) - alive
        assert len(dead) == (0 if action == "Raise" else 4)
        assert results(server, session, "reset", {"seeds": dict.fromkeys(sorted(dead), 1)}) == [
            {**result, "actions": ["Count", "Crash", "Hang", "Raise"]}
            for result in results(server, session, "reset", {"seeds": dict.fromkeys(sorted(dead), 1)})
        ]


def test_a_crash_fails_the_request_of_its_own_session_among_those_of_others(mixed: str) -> None:
    with env_service(mixed, num_workers=1) as server, ThreadPoolExecutor(1) as threads:
        crashing, counting = open_session(server), open_session(server)
        names = [f"env{number}" for number in range(200)]
        results(server, crashing, "reset", {"seeds": {"a": 1, "b": 2}})
        results(server, counting, "reset", {"seeds": dict.fromkeys(names, 1)})
        actions = {name: ["Count"] * 200 for name in names}
        counted = threads.submit(results, server, counting, "step", {"actions": actions})
        first, second = results(server, crashing, "step", {"actions": {"a": ["Crash"], "b": ["Count"]}})
        assert first["failure"][:2] == ["step", "ProcessDied"]
        assert "lost" in second
        assert {"failure"}.isdisjoint(key for result in counted.result() for key in result)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_killed_worker_or_fork_server_is_replaced_and_no_process_outlives_the_server(mixed: str) -> None:
    before = children()
    with env_service(mixed) as server:
        session = open_session(server)
        for _ in range(2):
            for pid in children() - before:
                if not psutil.Process(pid).children():
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: "observation" in results(server, session, "reset", {"seeds": {"a": 1}})[0])
        (fork_server,) = [pid for pid in children() - before if psutil.Process(pid).children()]
        os.kill(fork_server, signal.SIGKILL)
        eventually(lambda: "observation" in results(server, session, "reset", {"seeds": {"a": 1}})[0])
    eventually(lambda: children() <= before)


def test_a_request_waits_for_the_replacement_of_the_only_worker(mixed: str) -> None:
    with env_service(mixed, num_workers=1) as server:
        session = open_session(server)
        results(server, session, "reset", {"seeds": {"a": 1}})
        assert "failure" in results(server, session, "step", {"actions": {"a": ["Crash"]}})[0]
        assert "observation" in results(server, session, "reset", {"seeds": {"a": 1}})[0]


def test_an_idle_session_ends_and_frees_its_envs(mixed: str) -> None:
    with env_service(mixed, limits=SessionLimits(idle_seconds=1.0)) as server:
        session = open_session(server)
        results(server, session, "reset", {"seeds": {"a": 1}})
        eventually(lambda: json.loads(request(server.url, "GET", "/health")[2])["active_environments"] == 0)
        assert request(server.url, "POST", f"/sessions/{session}/reset", {"seeds": {"a": 1}})[0] == 404


def test_more_envs_than_allowed_are_refused_one_by_one(server: EnvServiceServer) -> None:
    session = open_session(server)
    started = results(server, session, "reset", {"seeds": {str(number): number for number in range(8)}})
    assert ["failure" in each for each in started] == [False] * 6 + [True] * 2
    assert started[-1]["failure"][1] == "TooManyEnvironments"
    results(server, session, "close", {"envs": ["0", "1"]})
    assert all("observation" in result for result in results(server, session, "reset", {"seeds": {"8": 1, "9": 2}}))


@pytest.mark.parametrize(
    "env",
    [
        {"name": "gymnasium", "id": "antigravity:FrozenLake-v1"},
        {"name": "navigation", "backend": "ai2thor", "thor_build": "/bin/sh"},
        {"name": "search", "url": "http://169.254.169.254"},
        {"name": "navigation", "backend": "ai2thor", "thor_tasks": "/etc"},
        {"name": "primitive_skill", "backend": "maniskill", "maniskill_builder": "os:system"},
        {"name": "alfworld", "config_path": "$HOME/alf-config.yaml"},
        {"name": "alfworld", "data_path": "/etc"},
    ],
)
def test_clients_name_no_modules_files_or_programs_of_the_server(env: dict[str, Any]) -> None:
    served = ServedEnvs(("gymnasium", "navigation", "primitive_skill", "alfworld", "search"))
    with pytest.raises(
        RequestError, match=r"names a module, program or service of|is outside of the directory of"
    ) as refused:
        served.config(env)
    assert refused.value.status == 403
    plain = {"name": env["name"]} | {key: env[key] for key in ("backend",) if key in env}
    assert json.loads(served.config(plain))["name"] == env["name"]


def test_unknown_envs_and_addresses_in_use_are_named(server: EnvServiceServer) -> None:
    with pytest.raises(ConfigError, match=r"--env frozenlak: (?s:.*)did you mean frozenlake\?"):
        ServedEnvs(["frozenlak"])
    with pytest.raises(ConfigError, match="missing"):
        ServedEnvs(["missing.py:Env"])
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(MachineError, match=f"cannot listen on 127.0.0.1:{port}"), env_service(port=port):
        pass


def test_png_files_are_those_of_their_image_and_of_other_writers() -> None:
    import io

    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, (5, 9, 3), dtype=np.uint8)
    assert (decode_png(encode_png(image)) == image).all()
    for mode in ("RGB", "P", "L", "RGBA", "1"):
        written, other = io.BytesIO(), Image.fromarray(image).convert(mode)
        other.save(written, "PNG", optimize=True)
        assert (decode_png(written.getvalue()) == np.array(other.convert("RGB"))).all()


def test_an_episode_that_others_take_with_them_continues_every_time(mixed: str) -> None:
    with env_service(mixed, num_workers=1) as server:
        service = f"service: {{urls: ['{server.url}']}}"
        envs = build_run_envs(load_experiment(None, (f"env={{name: custom, path: '{mixed}', {service}}}",)).experiment)
        envs.start(0, 100)
        envs.poll(wait=True)
        for number in range(1, 5):
            envs.start(number, number)
            envs.poll(wait=True)
            envs.step(number, ["Crash"])
            envs.step(0, ["Count"])
            events = {event.episode: event for event in envs.poll(wait=True)}
            failed, counted = events[number], events[0]
            assert isinstance(failed, EpisodeFailed)
            assert failed.failure.error_type == "ProcessDied"
            assert isinstance(counted, ActionsExecuted)
            assert counted.steps[0].observation.text == str(100 + number)
            envs.drop(number)
        assert dict(envs.pop_metrics()) == {"env/episodes_reassigned": 4}
        envs.close()
