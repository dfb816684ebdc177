"""Servers of judges, started on the node of their devices."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from typing import Any
from urllib.parse import urlsplit

import torch

from quintet.config.native.data import JudgeConfig, JudgeServerConfig
from quintet.config.native.experiment import Experiment
from quintet.config.plan.overlap import overlaps_training
from quintet.config.plan.process_layout import process_layout
from quintet.data.chat_templates import chat_template
from quintet.errors import MachineError
from quintet.rewards.judge_server import JudgeServer
from quintet.runtime.serving.launch_settings import LaunchSettings

MODULE = "quintet.runtime.serving.launched"
LOOPBACK, ALL_INTERFACES = "127.0.0.1", "0.0.0.0"  # noqa: S104 - clients need the token
SHUTDOWN_SECONDS = 10.0
LOG_LINES = 12
PROMPT_TOKENS = 1024
"""Room for the judge's prompt around question and answer."""


class JudgeProcess:
    """Process of a judge's server; it ends with this process, however that ends."""

    def __init__(self, settings: LaunchSettings, gpu: str | None) -> None:
        """`gpu` is the only GPU that the server sees; None for the GPUs of this process. `wait_until_ready` returns its
        address.

        Its output goes to a file, whose end is shown if it does not start.
        """
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env=os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
        )
        with ExitStack() as failure:
            failure.callback(self.close)
            if self._process.stdin is None:
                raise OSError("the server has no standard input")
            self._process.stdin.write(settings.to_line())
            self._process.stdin.flush()
            failure.pop_all()

    def wait_until_ready(self, seconds: float) -> str:
        """Return the base URL, up to `/v1`.

        Raises:
            MachineError: the server does not start within that time; with the end of its output.
        """
        line = self._first_line(time.monotonic() + seconds)
        if line is None:
            raise MachineError(
                f"the server of a judge has not started within {seconds:g} seconds (placement.call_timeout_seconds). "
                f"The end of its output:\n{self._log_tail()}",
                "raise placement.call_timeout_seconds if it only needs more time",
            )
        if not line:
            self._process.wait()
            raise MachineError(f"the server of a judge does not start. The end of its output:\n{self._log_tail()}")
        return f"{line.decode().strip()}/v1"

    def _first_line(self, deadline: float) -> bytes | None:
        """Return the first line of the standard output, empty if there is none; None if it does not come in time."""
        output, line = self._process.stdout, b""
        while output is not None and b"\n" not in line:
            if not wait([output.fileno()], max(0.0, deadline - time.monotonic())):
                return None
            if not (data := os.read(output.fileno(), 1 << 12)):
                break
            line += data
        return line.partition(b"\n")[0]

    def close(self) -> None:
        """End the server."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])


class JudgeServers:
    """The servers that one rank has started."""

    def __init__(self, config: Experiment, rank: int = 0, address: str = LOOPBACK) -> None:
        """If this rank is the first rank of the actor on its node, start the servers of all judges on devices of the
        node; ranks of other nodes reach them at `address`.

        Raises:
            MachineError: one does not start.
        """
        token, is_local = secrets.token_urlsafe(32), config.placement.nodes == 1
        self._servers: list[tuple[str, JudgeProcess]] = []
        self.addresses: list[tuple[str, str, str]] = []
        """Section of the judge in `reward`, base URL and token of each server."""
        with ExitStack() as failure:
            failure.callback(self.close)
            for section, judge in _judges(config).items():
                server = judge.server
                if server is None:
                    continue
                settings = _settings(config, judge, server, LOOPBACK if is_local else ALL_INTERFACES, token)
                for device in _devices_of(config, server, rank):
                    self._servers.append((section, JudgeProcess(settings, _visible_gpu(config, device))))
            for section, launched in self._servers:
                port = urlsplit(launched.wait_until_ready(config.placement.call_timeout_seconds)).port
                self.addresses.append((section, f"http://{LOOPBACK if is_local else address}:{port}/v1", token))
            failure.pop_all()

    def close(self) -> None:
        """End all servers."""
        for _, server in self._servers:
            server.close()


def _judges(config: Experiment) -> Mapping[str, JudgeConfig]:
    return config.reward.judges if config.reward is not None else {}


def judge_server(
    config: Experiment, section: str, url: str, token: str, close: Callable[[], None] = lambda: None
) -> tuple[str, JudgeServer]:
    """Return a server, by one of `JudgeServers.addresses`, for its client."""
    server = _judges(config)[section].server
    thinking = chat_template(server.template if server else None).thinking
    fields = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    # between rollouts, the servers leave the memory of their devices to the learners
    sleeps = config.placement.colocated and not overlaps_training(config)
    return section, JudgeServer(url, token, sleeps, fields, close)


def _devices_of(config: Experiment, server: JudgeServerConfig, rank: int) -> Iterator[int]:
    """Yield the devices whose servers this rank of the actor starts: those of its node, if it is the node's first."""
    layout = process_layout(config)
    nodes = [layout.devices[learner_rank] // layout.devices_per_node for learner_rank in layout.learner_ranks]
    devices = layout.devices[:1] if server.devices is None else server.devices
    if nodes.index(nodes[rank]) == rank:
        yield from (device for device in devices if device // layout.devices_per_node == nodes[rank])


def _visible_gpu(config: Experiment, device: int) -> str | None:
    """Return the name of a device for `CUDA_VISIBLE_DEVICES`; None on a machine without GPUs.

    Raises:
        MachineError: this process does not see it.
    """
    if not torch.cuda.is_available():
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus: Sequence[str] = listed.split(",")
    number = device % config.placement.devices_per_node
    if number >= len(gpus):
        hint = "start the run with all GPUs of the node visible, or give the server another device"
        raise MachineError(f"the server of a judge uses device {device}, and this process sees {len(gpus)} GPUs", hint)
    return gpus[number]


def _settings(run: Experiment, judge: JudgeConfig, server: JudgeServerConfig, host: str, token: str) -> LaunchSettings:
    options: dict[str, Any] = {"arguments": server.arguments, "detokenize": True}
    options |= {} if server.memory_share is None else {"memory_share": server.memory_share}
    options |= {"offload": True} if server.engine == "hf" else {"sleep_between_steps": True}
    config = {
        "name": "judge",
        "policy": {"path": server.path, "preset": None, "dtype": server.dtype},
        "rollout": {"engine": server.engine, "max_concurrent": judge.concurrent, "engine_options": options},
        "warm_start": None,
    }
    rollout = run.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens + (judge.max_tokens or 0) + PROMPT_TOKENS
    return LaunchSettings(config, host, token, server.max_model_tokens, longest, server.template)
