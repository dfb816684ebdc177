"""If these fail, a lost connection or server of an environment service costs episodes, or executes actions twice."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from env_services import env_service, post, request

from quintet.config.compose import load_experiment
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.service import http_client, vector_env
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted, VectorEnv
from quintet.errors import ConfigError, MachineError
from quintet.runtime.env_service.sessions import SessionLimits

OVERRIDES = ("env.floor_density=1.0", "env.slippery=true", "env.size=6")
EPISODES, TURNS = 12, 6


def build(*urls: str, **service: object) -> VectorEnv:
    options = {"urls": list(urls), "timeout_seconds": 20.0, "max_retries": 1, **service}
    return build_run_envs(load_experiment(None, (*OVERRIDES, f"env.service={json.dumps(options)}")).experiment)


def play(envs: VectorEnv, after_turn: Callable[[int], None] = lambda turn: None) -> list[EnvEvent]:
    events: list[EnvEvent] = []
    for number in range(EPISODES):
        envs.start(number, number)
    for turn in range(TURNS):
        answers = envs.poll(wait=True)
        events += answers
        after_turn(turn)
        for event in answers:
            ended = isinstance(event, ActionsExecuted) and event.steps[-1].terminated
            if ended or isinstance(event, EpisodeFailed):
                envs.drop(event.episode)
            else:
                envs.step(event.episode, ["Left", "Up", "Right"][turn % 3 :])
    envs.close()
    return events


@pytest.fixture(scope="module")
def expected() -> list[EnvEvent]:
    return play(build_run_envs(load_experiment(None, OVERRIDES).experiment))


class UnreliableProxy:
    """Forwards connections to a server, and breaks them before or after the server has received a request."""

    def __init__(self, url: str) -> None:
        self._target = (urlsplit(url).hostname, urlsplit(url).port)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.num_exchanges = self.num_broken = 0
        self.breaks: Callable[[int], str | None] = lambda number: None
        """The way in which the n-th exchange is broken: before, or after it has been executed."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, socket.create_connection(self._target) as server:
            while data := self._receive(connection):
                way = None
                if b"/exchange" in data.split(b"\r\n")[0]:
                    self.num_exchanges += 1
                    way = self.breaks(self.num_exchanges)
                if way == "before":
                    self.num_broken += 1
                    return
                server.sendall(data)
                answer = self._receive(server)
                if way == "after":
                    self.num_broken += 1
                    connection.sendall(answer[: len(answer) // 2])
                    return
                connection.sendall(answer)

    def _receive(self, connection: socket.socket) -> bytes:
        """A whole request or response."""
        data = b""
        while b"\r\n\r\n" not in data:
            chunk = connection.recv(1 << 16)
            if not chunk:
                return b""
            data += chunk
        head = data.partition(b"\r\n\r\n")[0]
        sizes = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        size = len(head) + 4 + (sizes[0] if sizes else 0)
        while len(data) < size:
            data += connection.recv(1 << 16)
        return data

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("way", ["before", "after"])
def test_a_broken_connection_repeats_no_action_and_loses_no_session(expected: list[EnvEvent], way: str) -> None:
    with env_service("frozenlake") as server, closing(UnreliableProxy(server.url)) as proxy:
        proxy.breaks = lambda number: way if number % 3 == 2 else None
        envs = build(proxy.url)
        assert play(envs) == expected
        assert proxy.num_broken >= 2
        assert envs.pop_metrics() == {"env/episodes_reassigned": 0}


@pytest.mark.parametrize("protocol", ["quintet", "vagen"])
@pytest.mark.parametrize("turn", [0, 3])
def test_episodes_of_a_lost_server_continue_on_another(expected: list[EnvEvent], turn: int, protocol: str) -> None:
    with ExitStack() as others, env_service("frozenlake") as server:
        lost = others.enter_context(env_service("frozenlake"))
        envs = build(server.url, lost.url, protocol=protocol)
        events = play(envs, lambda now: lost.close() if now == turn else None)
        assert envs.pop_metrics()["env/episodes_reassigned"] >= 1
        assert not any(isinstance(event, EpisodeFailed) for event in events)
        if protocol == "quintet":
            assert events == expected


def test_a_restarted_server_gets_its_episodes_back(expected: list[EnvEvent]) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(env_service("frozenlake"))
        port = urlsplit(first.url).port

        def restart(turn: int) -> None:
            if turn == 2:
                first.close()
                stack.enter_context(env_service("frozenlake", port=port))

        envs = build(first.url)
        assert play(envs, restart) == expected
        assert envs.pop_metrics()["env/episodes_reassigned"] >= 1


@pytest.fixture
def full() -> Iterator[str]:
    """A server whose queue is full: connections to it are neither accepted nor refused."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_stays_away_costs_no_time(
    expected: list[EnvEvent], full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with env_service("frozenlake") as server:
        monkeypatch.setattr(http_client, "CONNECT_SECONDS", 0.3)
        envs = build(server.url, full, max_retries=0)
        monkeypatch.setattr(http_client, "CONNECT_SECONDS", 60.0)
        started = time.monotonic()
        assert play(envs) == expected
        assert time.monotonic() - started < 30


def test_an_expired_session_is_replayed(expected: list[EnvEvent]) -> None:
    with env_service("frozenlake", limits=SessionLimits(idle_seconds=1.0)) as server:

        def wait(turn: int) -> None:
            if turn == 2:
                threading.Event().wait(2.5)

        assert play(build(server.url), wait) == expected


def test_closing_the_envs_ends_the_session(expected: list[EnvEvent]) -> None:
    with env_service("frozenlake") as server:
        assert play(build(server.url)) == expected
        health = json.loads(request(server.url, "GET", "/health")[2])
        assert (health["sessions"], health["active_environments"]) == (0, 0)


def test_servers_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"127\.0\.0\.1:9: .*refused(?s:.*)quintet serve-envs"):
        build("http://127.0.0.1:9")
    with env_service("sokoban", token="secret") as server:
        with pytest.raises(MachineError, match=r"token(?s:.*)env\.service\.token_env"):
            build(server.url)
        monkeypatch.setenv("THE_TOKEN", "secret")
        with pytest.raises(MachineError, match="this server has no environment 'frozenlake'; it has sokoban"):
            build(server.url, token_env="THE_TOKEN")
    custom = "env={name: custom, path: 'x.py:X', service: {urls: ['http://127.0.0.1:9'], protocol: vagen}}"
    config = load_experiment(None, (custom,)).experiment
    with pytest.raises(ConfigError, match=r"VAGEN's protocol has no environment(?s:.*)frozenlake or sokoban"):
        build_run_envs(config)


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_does_not_answer_is_lost_after_its_time_limit(silent: str) -> None:
    with pytest.raises(MachineError, match=r"has not answered within 0\.5 s \(env\.service\.timeout_seconds\)"):
        build(silent, timeout_seconds=0.5)


def test_requests_have_the_configured_limits_and_the_token_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[tuple[object, ...]] = []
    monkeypatch.setenv("THE_TOKEN", "secret")
    monkeypatch.setattr(vector_env, "ServiceClient", lambda *arguments: clients.append(arguments))
    monkeypatch.setattr(vector_env, "ServiceHost", lambda *arguments: arguments)
    monkeypatch.setattr(vector_env, "HostedVectorEnv", lambda hosts, wait, **_: SimpleNamespace(wait=wait, close=None))
    envs = build("http://a:1", "http://b:2", timeout_seconds=7.0, max_retries=5, token_env="THE_TOKEN")
    assert envs.wait.seconds == 7.0  # type: ignore[attr-defined]
    assert clients == [("http://a:1", "secret", 7.0, 5), ("http://b:2", "secret", 7.0, 5)]


def rewards(events: Sequence[EnvEvent]) -> dict[int, float]:
    sums = dict.fromkeys(range(EPISODES), 0.0)
    for event in events:
        if isinstance(event, ActionsExecuted):
            sums[event.episode] += sum(step.reward for step in event.steps)
    return sums


def test_vagens_protocol_has_the_same_states_and_rewards(expected: list[EnvEvent]) -> None:
    with env_service("frozenlake") as server:
        overrides = (*OVERRIDES, "rollout.max_actions_per_turn=3")
        service = json.dumps({"urls": [server.url], "protocol": "vagen"})
        config = load_experiment(None, (*overrides, f"env.service={service}")).experiment
        events = play(build_run_envs(config))
    assert rewards(events) == rewards(expected)
    for event, other in zip(events, expected, strict=True):
        assert event.episode == other.episode
        if isinstance(event, EpisodeStarted) and isinstance(other, EpisodeStarted):
            grid = other.observation.text.rpartition("\n")[0]
            assert grid in event.observation.text
            assert event.instruction.startswith(other.instruction)
        elif isinstance(event, ActionsExecuted) and isinstance(other, ActionsExecuted):
            assert len(event.steps) == 1
            assert event.steps[-1].terminated == other.steps[-1].terminated
            assert event.steps[-1].info["success"] == other.steps[-1].info["success"]


def test_vagens_clients_see_what_its_servers_return() -> None:
    with env_service("frozenlake", "sokoban") as server:
        config = {"env_name": "sokoban", "env_config": {"dim_room": [7, 7], "max_actions_per_step": 2}, "seed": 3}
        assert post(server.url, "/environments", {"ids2configs": {"train1": config}}) == {"success": True}
        ((observation, info),) = post(server.url, "/batch/reset", {"ids2seeds": {"train1": 3}})["results"].values()
        assert observation.keys() == {"obs_str", "relations"}
        assert info == {}
        prompts = post(server.url, "/batch/system_prompt", {"env_ids": ["train1"]})["system_prompts"]
        assert prompts["train1"].startswith("Push every box")
        for text, valid, actions in (
            ("<think>a</think><answer>Up,Down,Left</answer>", True, ["Up", "Down"]),
            ("<answer>Up</answer>", False, []),
            ("<think>a</think><answer>Up,Fly</answer>", False, ["Up"]),
        ):
            stepped = post(server.url, "/batch/step", {"ids2actions": {"train1": text}})["results"]["train1"]
            assert stepped[3]["metrics"]["turn_metrics"]["action_is_valid"] is valid
            assert stepped[3]["actions"] == actions
            assert (stepped[1] > 0) == valid
            assert stepped[2] is False
        assert post(server.url, "/reset/train1", {"seed": 3})["observation"] == observation
        assert post(server.url, "/step/train1", {"action": "x"}).keys() == {"observation", "reward", "done", "info"}
        assert request(server.url, "GET", "/reward/train1")[2] == b'{"reward":0.0}'
        assert request(server.url, "GET", "/system_prompt/train1")[0] == 200
        assert post(server.url, "/batch/reward", {"env_ids": ["train1"]}) == {"rewards": {"train1": 0.0}}
        assert post(server.url, "/batch/close", {"env_ids": ["train1", "val1"]}) == {"status": "success"}
        assert post(server.url, "/close/train1", method="DELETE") == {"status": "success"}
        status, _, body = request(server.url, "POST", "/step/train1", {"action": "x"})
        assert (status, "train1" in json.loads(body)["error"]) == (500, True)
        for wrong, message in (
            ({"env_name": "chess"}, "not supported"),
            ({"env_name": "sokoban", "env_config": {"dim_rom": [6, 6]}}, "did you mean env_config.dim_room?"),
            ({"env_name": "sokoban", "env_config": {"num_boxes": 9}}, "an integer"),
        ):
            status, _, body = request(server.url, "POST", "/environments", {"ids2configs": {"a": wrong}})
            assert status == 400
            assert message in json.loads(body)["error"]
        described = {"env_name": "frozenlake", "env_config": {"render_mode": "vision", "prompt_format": "grounding"}}
        post(server.url, "/environments", {"ids2configs": {"val1": described}})
        (seen, _) = post(server.url, "/batch/reset", {"ids2seeds": {"val1": 1}})["results"]["val1"]
        assert seen["obs_str"].count("<image>") == len(seen["multi_modal_data"]["<image>"]) == 1
        assert "<observation>" in seen["obs_str"]
        for text, valid in (
            ("<think><observation>a</observation><reasoning>b</reasoning></think><answer>Up</answer>", True),
            ("Well. <think><observation>a</observation><reasoning>b</reasoning></think><answer>Up</answer>", False),
        ):
            stepped = post(server.url, "/step/val1", {"action": text})
            assert stepped["info"]["format_correct"] is valid
            assert stepped["info"]["actions"] == ["Up"]
        missing = request(server.url, "POST", "/batch/step", {"actions": {}})
        assert (missing[0], "ids2actions" in json.loads(missing[2])["error"]) == (400, True)
