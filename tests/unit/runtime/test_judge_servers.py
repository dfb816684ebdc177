"""If these fail, the server of a judge does not start, outlives its run, holds memory that others need, or is on other
devices than the configuration says."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.config.native.data import JudgeConfig, JudgeServerConfig, RewardConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.placement import ComponentConfig, PlacementConfig
from quintet.data.chat_templates import chat_template
from quintet.errors import MachineError
from quintet.records import PromptRow, Response
from quintet.rewards.judge_server import JudgeServer
from quintet.rewards.llm_judge import LlmJudge
from quintet.rollout.engines.engine import EngineSetup
from quintet.runtime.controller import Controller
from quintet.runtime.judge_servers import JudgeServers, _devices_of, judge_server
from quintet.runtime.serving import launched
from quintet.runtime.serving.launch_settings import LaunchSettings

ROW = PromptRow(0, "math", ({"role": "user", "content": "2 + 2 = ?"},), "4")


def run_with(server: JudgeServerConfig, placement: PlacementConfig | None = None) -> Experiment:
    judge = JudgeConfig(server=server, verdict="yes_no", prompt="{answer}", max_tokens=4, temperature=1.0, concurrent=2)
    reward = RewardConfig(function_arguments={}, judge=judge)
    return Experiment(reward=reward, placement=placement or PlacementConfig())


def served(path: Path) -> Experiment:
    return run_with(JudgeServerConfig(path=str(path), dtype="float32", template="chatml", arguments={}))


class EngineIsBuilt(Exception):
    """Ends a server where it would build its engine."""


def engine_of(server: JudgeServerConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[str, EngineSetup, Any]:
    """Return the name and the setup of the engine that the server of a run builds, and the tokenizer, without starting
    them."""
    started: list[tuple[str, EngineSetup]] = []
    tokenizers: list[Any] = []

    def start(settings: LaunchSettings, gpu: str | None) -> SimpleNamespace:
        monkeypatch.setattr("sys.stdin", io.StringIO(settings.to_line().decode()))
        with pytest.raises(EngineIsBuilt):
            launched.main()
        return SimpleNamespace(wait_until_ready=lambda _: "http://127.0.0.1:1/v1")

    class Engines:
        @staticmethod
        def get(name: str) -> SimpleNamespace:
            def build(setup: EngineSetup) -> None:
                started.append((name, setup))
                raise EngineIsBuilt

            return SimpleNamespace(load=lambda: build)

    monkeypatch.setattr(launched, "hide_memory", lambda: None)
    monkeypatch.setattr("quintet.runtime.judge_servers.JudgeProcess", start)
    monkeypatch.setattr("quintet.runtime.serving.build.ENGINES", Engines)
    monkeypatch.setattr(
        "quintet.runtime.serving.build.build_chat_tokenizer", lambda _, one, *__: tokenizers.append(one)
    )
    JudgeServers(run_with(server))
    return *started[0], tokenizers[0]


def test_the_engine_of_a_server_is_as_configured(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"engine": "vllm", "memory_share": 0.25, "arguments": {"enforce_eager": True}, "max_model_tokens": 300}
    settings = {"path": str(policy_directory), "dtype": "float32", "template": "none", **options}
    name, setup, tokenizer = engine_of(JudgeServerConfig.model_validate(settings), monkeypatch)
    assert (name, setup.directory, setup.dtype, setup.max_model_len) == ("vllm", policy_directory, torch.float32, 300)
    assert (setup.options.memory_share, setup.options.arguments) == (0.25, {"enforce_eager": True})
    assert tokenizer.chat_template == chat_template("none").text


def judge_of(config: Experiment, servers: list[JudgeServer]) -> LlmJudge:
    assert config.reward is not None
    assert config.reward.judge is not None
    return LlmJudge(config.reward, config.reward.judge, 100, servers)


def test_a_served_judge_sleeps_between_rollouts_and_judges_in_each(policy_directory: Path) -> None:
    config = served(policy_directory)
    ((section, server),) = Controller.in_process().start_judge_servers(config)
    assert (section, server.sleeps) == ("judge", True)
    with closing(judge_of(config, [server])) as judge:
        for _ in range(2):
            for number in range(3):
                judge.submit(Response(number, ROW, str(number), 1))
            results = {result.id: result for result in judge.drain()}
            assert set(results) == {0, 1, 2}
            # a model with random weights gives no verdict, and all requests have replies
            failures = [result.failure for result in results.values()]
            assert all(failure is None or failure.error_type == "NoVerdict" for failure in failures)
    with pytest.raises(MachineError, match="does not answer"):
        server.control("wake_up")


def test_a_server_that_does_not_start_shows_why(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="nowhere"):
        JudgeServers(served(tmp_path / "nowhere"))


def test_a_server_that_hangs_at_its_start_ends_the_run_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.runtime.judge_servers.SHUTDOWN_SECONDS", 0.1)
    monkeypatch.setattr("quintet.runtime.judge_servers.MODULE", "code")  # a prompt, and no line
    config = run_with(JudgeServerConfig(path="x", arguments={}), PlacementConfig(call_timeout_seconds=0.5))
    monkeypatch.setattr(
        "quintet.runtime.judge_servers.LaunchSettings.to_line", lambda _: b"import time; time.sleep(60)\n"
    )
    with pytest.raises(MachineError, match=r"not started within 0\.5 seconds \(placement\.call_timeout_seconds\)"):
        JudgeServers(config)


def test_a_server_is_closed_to_others_and_ends_with_its_run(policy_directory: Path) -> None:
    config = served(policy_directory)
    code = (
        "import sys, json\n"
        "from quintet.config.native.experiment import Experiment\n"
        "from quintet.runtime.judge_servers import JudgeServers\n"
        "servers = JudgeServers(Experiment.model_validate_json(sys.argv[1], strict=False))\n"
        "print(json.dumps(servers.addresses), flush=True)\n"
        "sys.stdin.read()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, config.model_dump_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert run.stdout is not None
    ((_, url, _),) = json.loads(run.stdout.readline())
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/models")
    run.kill()
    run.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url.removesuffix('/v1')}/health")
        except (urllib.error.URLError, OSError):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the server outlives the run that was killed")


def test_each_device_has_a_server_started_on_its_node() -> None:
    """Two nodes of two devices; the judge is on the second device of each, one of which the actor does not use."""
    server = JudgeServerConfig(path="x", devices=(1, 3), arguments={})
    placement = PlacementConfig(nodes=2, devices_per_node=2, actor=ComponentConfig(devices=(0, 2, 3)))
    config = run_with(server, placement)
    assert [list(_devices_of(config, server, rank)) for rank in range(3)] == [[1], [3], []]
    alone = JudgeServerConfig(path="x", arguments={})
    assert [list(_devices_of(config, alone, rank)) for rank in range(3)] == [[0], [], []]


def test_responses_are_distributed_over_all_servers() -> None:
    config = run_with(JudgeServerConfig(path="x", devices=(0, 1), arguments={}))
    servers = [judge_server(config, "judge", f"http://127.0.0.1:{port}/v1", "t")[1] for port in (1, 2)]
    assert all(server.sleeps for server in servers)
    awake = [JudgeServer(server.url, server.token, sleeps=False) for server in servers]
    judge = judge_of(config, awake)
    for number in range(4):
        judge.submit(Response(number, ROW, "a", 1))
    messages = {result.id: str(result.failure) for result in judge.drain()}
    judge.close()
    assert all("refused" in message for message in messages.values())
    assert [endpoint.url for endpoint in judge._endpoints] == [f"{server.url}/chat/completions" for server in servers]
