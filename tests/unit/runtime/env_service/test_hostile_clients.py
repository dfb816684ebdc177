"""If these fail, a client can take an environment service down, read its files, or use the sessions of others."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgpack
import psutil
import pytest
from env_services import env_service, post, request

from quintet.envs.service.png import MAX_PIXELS, SIGNATURE, decode_png
from quintet.errors import ConfigError
from quintet.runtime.env_service.app import EnvServiceServer
from quintet.runtime.env_service.sessions import SessionLimits
from quintet.runtime.env_service.worker_pool import WorkerPool
from quintet.runtime.http_service import limits
from quintet.runtime.http_service.address import Address

pytestmark = pytest.mark.attack

TOKEN = "the right token"
SECRET = "a file that nobody serves"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvServiceServer]:
    folder = tmp_path_factory.mktemp("secret")
    (folder / "secret.py").write_text(f"raise SystemExit({SECRET!r})")
    with (
        pytest.MonkeyPatch.context() as patch,
        env_service("frozenlake", limits=SessionLimits(max_sessions=32), max_body_bytes=1 << 20) as server,
    ):
        patch.chdir(folder)
        patch.setattr(limits, "BODY_SECONDS", 1.0)
        patch.setattr(limits, "HEAD_SECONDS", 1.0)
        yield server


@pytest.fixture(autouse=True)
def still_serves(server: EnvServiceServer) -> Iterator[None]:
    yield
    session = post(server.url, "/sessions", {})["session"]
    (result,) = post(server.url, f"/sessions/{session}/reset", {"seeds": {"a": 1}})["results"]
    assert "observation" in result
    post(server.url, f"/sessions/{session}", method="DELETE")


def refused(server: EnvServiceServer, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
    status, _, data = request(server.url, "POST", path, body, headers or {})
    return status, str(json.loads(data)["error"])


def connect(server: EnvServiceServer) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"env": ' * 20_000,
        b"\xff\xfe\x00",
        b'{"env": {"size": 1e999}}',
        b'{"env": {"size": "' + b"9" * 10_000 + b'"}}',
        b'{"env": {"name": {"a": 1}}}',
        b'{"env": {"name": null, "path": [1]}}',
    ],
)
def test_a_malformed_body_is_refused(server: EnvServiceServer, body: bytes) -> None:
    status, error = refused(server, "/sessions", body)
    assert 400 <= status < 500
    assert len(error) < 4000


@pytest.mark.parametrize("body", [b"\xc1", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", msgpack.packb({1: 2})])
def test_a_malformed_msgpack_body_is_refused(server: EnvServiceServer, body: bytes) -> None:
    assert refused(server, "/sessions", body, {"Content-Type": "application/msgpack"})[0] == 400


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd:x", "secret.py:Env", "..%2f..%2fetc", "custom", "os:system", "simulator"]
)
def test_no_file_or_module_but_those_served_can_be_named(server: EnvServiceServer, name: str) -> None:
    for env in ({"name": name}, {"name": "custom", "path": name}, {"name": "frozenlake", "path": name}):
        status, error = refused(server, "/sessions", {"env": env})
        assert status in (400, 404)
        assert SECRET not in error
    assert request(server.url, "GET", f"/sessions/{name}")[0] in (404, 405)
    assert request(server.url, "GET", "/../../etc/passwd")[0] == 404
    status, error = refused(server, "/environments", {"ids2configs": {"a": {"env_name": name}}})
    assert status == 400


def test_an_oversized_body_is_refused_by_its_declared_size(server: EnvServiceServer) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    assert refused(server, "/sessions", b" " * ((1 << 20) + 1))[0] == 413


def test_bodies_without_a_size_type_or_plain_encoding_are_refused(server: EnvServiceServer) -> None:
    for headers, status in (
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
    ):
        assert refused(server, "/sessions", b"{}", headers)[0] == status
    with connect(server) as connection:
        connection.sendall(
            b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 411")


def test_slow_bodies_and_heads_are_cut_off_and_delay_nobody(server: EnvServiceServer) -> None:
    head = (
        b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    )
    with ExitStack() as stack:
        bodies = [stack.enter_context(connect(server)) for _ in range(20)]
        heads = [stack.enter_context(connect(server)) for _ in range(20)]
        silent = [stack.enter_context(connect(server)) for _ in range(20)]
        for connection in bodies:
            connection.sendall(head + b"{")
        for connection in heads:
            connection.sendall(head[:30])
        started = time.monotonic()
        assert request(server.url, "GET", "/health")[0] == 200
        assert time.monotonic() - started < 1.0
        assert all(connection.recv(100).startswith(b"HTTP/1.1 408") for connection in bodies)
        assert all(connection.recv(100) == b"" for connection in heads + silent)


def test_a_thousand_sessions_are_refused_beyond_the_maximum(server: EnvServiceServer) -> None:
    opened: list[str] = []
    with connect(server) as connection, connection.makefile("rb") as stream:
        head = b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        body = head + b"Content-Length: 2\r\n\r\n{}"
        for _ in range(10):
            connection.sendall(body * 100)
            for _ in range(100):
                status = stream.readline().split()[1]
                size = 0
                while (line := stream.readline().lower()) != b"\r\n":
                    size = int(line.split(b":")[1]) if line.startswith(b"content-length") else size
                answer = json.loads(stream.read(size))
                assert status == (b"200" if "session" in answer else b"429")
                opened += [answer["session"]] if "session" in answer else []
    assert len(opened) == 32
    assert len(set(opened)) == 32
    for session in opened:
        post(server.url, f"/sessions/{session}", method="DELETE")


def test_too_many_requests_or_impossible_seeds_are_refused(server: EnvServiceServer) -> None:
    session = post(server.url, "/sessions", {})["session"]
    many = [{"env": str(number), "seed": 0} for number in range(9000)]
    assert refused(server, f"/sessions/{session}/exchange", {"requests": many})[0] == 400
    for seed in (-1, 1 << 70, 0.5, "x", [1]):
        assert refused(server, f"/sessions/{session}/reset", {"seeds": {"a": seed}})[0] == 400
    post(server.url, f"/sessions/{session}", method="DELETE")


def test_a_session_of_another_client_cannot_be_guessed(server: EnvServiceServer) -> None:
    session = post(server.url, "/sessions", {})["session"]
    assert len(session) >= 32
    for guess in (session[:-1], session + "x", "1", "vagen", "%00", "a" * 5000):
        assert request(server.url, "POST", f"/sessions/{guess}/reset", {"seeds": {"a": 1}})[0] == 404
    post(server.url, f"/sessions/{session}", method="DELETE")


def test_impossible_actions_fail_their_own_step_without_being_computed(server: EnvServiceServer) -> None:
    session = post(server.url, "/sessions", {})["session"]
    array = {"dtype": "uint8", "data": "AAAA"}
    actions = ["1e999", "NaN", "1" + "0" * 400, "[" * 150 + "]" * 150, '{"png": 5}', json.dumps({"png": "AAAA"})]
    actions += [
        json.dumps({**array, "shape": shape}) for shape in ([-1], [1] * 1000, [10**18, 10**18], ["x"], 5, [4.5])
    ]
    actions += [json.dumps({**array, "dtype": "object", "shape": [4]})]
    for action in actions:
        post(server.url, f"/sessions/{session}/reset", {"seeds": {"a": 1}})
        body = f'{{"actions": {{"a": [{action}]}}}}'.encode()
        status, _, data = request(server.url, "POST", f"/sessions/{session}/step", body)
        assert status in (200, 400)
        if status == 200:
            assert "failure" in json.loads(data)["results"][0], action
    started = time.monotonic()
    body = json.dumps({"actions": {"a": [{"dtype": "uint8", "shape": [int("9" * 4000)] * 200, "data": ""}]}}).encode()
    request(server.url, "POST", f"/sessions/{session}/step", body)
    assert time.monotonic() - started < 5.0
    post(server.url, f"/sessions/{session}", method="DELETE")


def png_bomb(width: int, height: int) -> bytes:
    """A PNG file of a few KB that declares a large image, and has its zeros."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    return SIGNATURE + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_a_png_bomb_fails_its_own_step_without_being_decompressed(server: EnvServiceServer) -> None:
    session = post(server.url, "/sessions", {})["session"]
    post(server.url, f"/sessions/{session}/reset", {"seeds": {"a": 1, "b": 2}})
    bomb = base64.b64encode(png_bomb(100_000, 100_000)).decode()
    before = psutil.Process().memory_info().rss
    answer = post(server.url, f"/sessions/{session}/step", {"actions": {"a": [{"png": bomb}], "b": [{"png": "AAAA"}]}})
    assert [result["failure"][1] for result in answer["results"]] == ["InvalidAction", "InvalidAction"]
    assert "100000×100000" in answer["results"][0]["failure"][2]
    assert psutil.Process().memory_info().rss - before < 64 << 20
    (stepped,) = post(server.url, f"/sessions/{session}/step", {"actions": {"a": ["Up"]}})["results"]
    assert "steps" in stepped
    post(server.url, f"/sessions/{session}", method="DELETE")


def test_a_client_refuses_a_png_bomb_of_a_server() -> None:
    with pytest.raises(ValueError, match=f"at maximum {MAX_PIXELS}"):
        decode_png(png_bomb(100_000, 100_000))
    with pytest.raises(ValueError, match="PNG"):
        decode_png(png_bomb(4000, 1)[:60])


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN[:-1]}])
def test_a_server_with_a_token_answers_only_those_who_have_it(header: dict[str, str]) -> None:
    with env_service("frozenlake", token=TOKEN) as server:
        for method, path, body in (
            ("POST", "/sessions", {}),
            ("GET", "/envs", None),
            ("POST", "/environments", {"ids2configs": {}}),
            ("DELETE", "/close/a", None),
        ):
            assert request(server.url, method, path, body, header)[0] == 401
        assert request(server.url, "GET", "/health")[0] == 200
        assert request(server.url, "POST", "/sessions", {}, {"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_other_machines_and_web_pages_have_no_access_without_a_token(server: EnvServiceServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no token"):
        Address("0.0.0.0").check()
    assert request(server.url, "GET", "/envs", headers={"Host": "evil.example"})[0] == 403


def test_a_large_configuration_is_refused_by_its_size(server: EnvServiceServer) -> None:
    """The instruction is repeated for each of up to 4096 environments."""
    for body in ({"instruction": "x" * 20_000}, {"instruction": ["x"] * 5000}):
        status, error = refused(server, "/sessions", {"env": {"name": "frozenlake"} | body})
        assert status == 413
        assert "the maximum is 16384" in error
    vagen = {"ids2configs": {"a": {"env_name": "frozenlake", "env_config": {"action_sep": "x" * 20_000}}}}
    status, error = refused(server, "/environments", vagen)
    assert status == 400
    assert "the maximum is 16384" in error


def test_the_results_of_a_request_have_a_maximum_size() -> None:
    limited = SessionLimits(max_response_bytes=60_000)
    with env_service("frozenlake", limits=limited, num_workers=1) as server:
        env = {"name": "frozenlake", "instruction": "x" * 10_000}
        session = post(server.url, "/sessions", {"env": env})["session"]
        seeds = {str(number): number for number in range(20)}
        results = post(server.url, f"/sessions/{session}/reset", {"seeds": seeds})["results"]
        assert ["observation" in result for result in results] == [True] * 5 + [False] * 15
        assert {result["failure"][1] for result in results[5:]} == {"ResultTooLarge"}
        steps = post(server.url, f"/sessions/{session}/step", {"actions": {"0": ["Up"], "19": ["Up"]}})["results"]
        assert ["steps" in result for result in steps] == [True, False]


def test_the_results_of_the_oldest_exchange_are_forgotten_beyond_the_maximum() -> None:
    limited = SessionLimits(max_stored_bytes=15_000)
    with env_service("frozenlake", limits=limited, num_workers=1) as server:
        env = {"name": "frozenlake", "instruction": "x" * 10_000}
        first, second = (post(server.url, "/sessions", {"env": env})["session"] for _ in range(2))
        body = {"number": 1, "requests": [{"env": "a", "seed": 1}]}
        answers = [post(server.url, f"/sessions/{session}/exchange", body) for session in (first, second)]
        assert post(server.url, f"/sessions/{second}/exchange", body) == answers[1]
        status, error = refused(server, f"/sessions/{first}/exchange", body)
        assert (status, "no longer stored" in error) == (404, True)
        post(server.url, f"/sessions/{first}/exchange", body | {"number": 2})


def test_a_configuration_is_sent_once_for_all_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = WorkerPool.send
    monkeypatch.setattr(WorkerPool, "send", lambda pool, worker, data: [sent.append(data), send(pool, worker, data)])
    with env_service("frozenlake", num_workers=1) as server:
        session = post(server.url, "/sessions", {"env": {"name": "frozenlake", "instruction": "x" * 5000}})["session"]
        post(server.url, f"/sessions/{session}/reset", {"seeds": {str(number): number for number in range(50)}})
    assert max(map(len, sent)) < 10_000


@pytest.mark.parametrize("depth", [70, 500, 990, 5000])
def test_deep_values_are_refused(server: EnvServiceServer, depth: int) -> None:
    value = "[" * depth + "]" * depth
    session = post(server.url, "/sessions", {})["session"]
    post(server.url, f"/sessions/{session}/reset", {"seeds": {"a": 1}})
    for path, body in (
        ("/sessions", f'{{"env": {{"size": {value}}}}}'),
        (f"/sessions/{session}/step", f'{{"actions": {{"a": [{value}]}}}}'),
        (f"/sessions/{session}/exchange", f'{{"requests": [{{"env": "a", "actions": [{value}]}}]}}'),
        ("/environments", f'{{"ids2configs": {{"a": {{"env_name": "x", "env_config": {{"a": {value}}}}}}}}}'),
    ):
        assert refused(server, path, body.encode())[0] == 400
    post(server.url, f"/sessions/{session}", method="DELETE")


def test_many_values_are_refused_before_they_are_parsed(server: EnvServiceServer) -> None:
    assert refused(server, "/sessions/x/reset", b'{"seeds": [' + b"0," * 300_000 + b"0]}")[0] == 413


def test_a_damaged_host_header_is_refused(server: EnvServiceServer) -> None:
    assert request(server.url, "GET", "/envs", headers={"Host": "[::1"})[0] == 403


def test_an_error_does_not_return_large_names_of_the_request(server: EnvServiceServer) -> None:
    status, error = refused(server, "/sessions", {"x" * 50_000: 1, "y" * 50_000: 2})
    assert (status, len(error) < 5000) == (400, True)


SLOW_ENV = """
import time
from quintet.records import Observation, Step

class Slow:
    actions = ("Up",)

    def instruction(self):
        return ""

    def reset(self, seed):
        time.sleep(0.005)
        return Observation("")

    def step(self, action):
        return Step(Observation(""), 0.0, False, False)

    def close(self):
        pass
"""


def test_a_session_with_many_environments_does_not_delay_the_next_step_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_ENV)
    with env_service("slow.py:Slow", num_workers=1) as server:
        large, small = (post(server.url, "/sessions", {})["session"] for _ in range(2))
        post(server.url, f"/sessions/{small}/reset", {"seeds": {"a": 1}})
        finished: list[str] = []

        def reset_many() -> None:
            post(server.url, f"/sessions/{large}/reset", {"seeds": {str(number): number for number in range(600)}})
            finished.append("reset")

        attacker = threading.Thread(target=reset_many)
        attacker.start()
        while json.loads(request(server.url, "GET", "/health")[2])["active_environments"] < 601:
            time.sleep(0.001)
        for _ in range(5):
            (stepped,) = post(server.url, f"/sessions/{small}/step", {"actions": {"a": ["Up"]}})["results"]
            assert "steps" in stepped
            finished.append("step")
        attacker.join()
        assert finished == ["step"] * 5 + ["reset"]


def ask_from(host: str, server: EnvServiceServer, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Send a request from another loopback address."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60, source_address=(host, 0))
    with closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_client_at_its_maximum_leaves_sessions_and_environments_for_others() -> None:
    with env_service("frozenlake", limits=SessionLimits(max_sessions=8, max_envs=8), num_workers=1) as server:
        mine, *_ = [post(server.url, "/sessions", {})["session"] for _ in range(8)]
        status, body = ask_from("127.0.0.1", server, "/sessions", {})
        assert (status, body["code"]) == (429, "too_many_sessions")
        assert "maximum of 8 sessions (--max-sessions)" in body["error"]
        post(server.url, f"/sessions/{mine}/reset", {"seeds": {str(number): number for number in range(8)}})
        (refused_env,) = post(server.url, f"/sessions/{mine}/reset", {"seeds": {"8": 1}})["results"]
        assert "maximum of 8 environments (--max-envs)" in refused_env["failure"][2]
        status, other = ask_from("127.0.0.2", server, "/sessions", {})
        assert status == 200
        seeds = {"seeds": {"a": 1, "b": 2}}
        started, refused_by_server = ask_from("127.0.0.2", server, f"/sessions/{other['session']}/reset", seeds)[1][
            "results"
        ]
        assert "observation" in started
        assert "the server has its maximum of 9 environments" in refused_by_server["failure"][2]
        assert ask_from("127.0.0.3", server, "/sessions", {})[0] == 503


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "+5", "5, 6", "x"])
def test_a_length_that_is_none_is_refused(server: EnvServiceServer, length: str) -> None:
    with connect(server) as connection:
        head = f"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
