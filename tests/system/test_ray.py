"""If these fail, a run that Ray starts isn't the run of one process, is lost with a process, or leaves some behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from network_namespaces import INTERFACE, Network, can_create
from paused_runs import wait_for
from tests.system.test_ranks import TINY, all_metrics, metrics

from quintet.kernels.decode import decode_kernels
from quintet.tracking.run_status import read_status

pytest.importorskip("ray", reason="pip install 'quintet[ray]'")

OVERRIDES = ("sft=null", "placement.devices_per_node=2")


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def start(
    workdir: Path,
    name: str,
    *overrides: str,
    command: str = "train",
    environment: Mapping[str, str] = MappingProxyType({}),
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """`prefix` comes before the command, to run it elsewhere."""
    with (workdir / f"{name}.log").open("a") as log:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "quintet", command, "tiny.yaml", f"name={name}", *overrides],
            cwd=workdir,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def log(workdir: Path, name: str) -> str:
    return (workdir / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    workdir = tmp_path_factory.mktemp("alone")
    (workdir / "tiny.yaml").write_text(TINY)
    assert start(workdir, "one", "sft=null").wait(timeout=240) == 0, log(workdir, "one")
    return workdir / "runs/one"


def processes(workdir: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Processes that work in the directory, with their environment."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "cwd").resolve() == workdir and int(directory.name) != os.getpid():
                pairs = (word.partition("=") for word in (directory / "environ").read_text().split("\0"))
                yield int(directory.name), {name: value for name, _, value in pairs}
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def quintet(workdir: Path, *arguments: str) -> str:
    """Output of a command that ends."""
    command = [sys.executable, "-m", "quintet", *arguments]
    return subprocess.run(command, cwd=workdir, check=True, capture_output=True, text=True, timeout=60).stdout


def rank(workdir: Path, name: str, number: int) -> int:
    """Process of a rank, as `quintet status` shows it."""
    pid = read_status(workdir / "runs" / name).ranks[number].process.pid
    assert dict(processes(workdir))[pid]["RANK"] == str(number)
    return pid


def wait_until_gone(workdir: Path, variable: str = "") -> None:
    """Wait until no process is left, or none with this environment variable."""
    end = time.monotonic() + 20
    while left := [pid for pid, environment in processes(workdir) if not variable or variable in environment]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_a_killed_rank_costs_only_what_came_after_the_last_checkpoint(workdir: Path, single_process_run: Path) -> None:
    run = start(workdir, "two", *OVERRIDES, "--ray", "local")
    try:
        wait_for(workdir / "runs/two/checkpoints/global_step_1", run)
        os.kill(rank(workdir, "two", 1), signal.SIGKILL)
        assert run.wait(timeout=240) == 0, log(workdir, "two")
    finally:
        run.kill()
    output = log(workdir, "two")
    assert "was killed by SIGKILL, probably because the node ran out of memory" in output
    assert "quintet: rank 1 on " in output
    assert "restarting from the last checkpoint (1 of 3)" in output
    assert "resuming from runs/two/checkpoints/global_step_" in output
    for ours, theirs in zip(metrics(single_process_run), metrics(workdir / "runs/two"), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-6)
    wait_until_gone(workdir)


def test_a_killed_engine_costs_neither_the_run_nor_a_number(workdir: Path, single_process_run: Path) -> None:
    devices = ("placement.devices_per_node=2", "placement.actor.devices=[0]", "placement.rollout.devices=[1]")
    overrides = ("sft=null", *devices, "placement.rollout.processes_per_device=2", "placement.rollout.group=Samplers")
    run = start(workdir, "three", *overrides, "--ray", "local")
    try:
        wait_for(workdir / "runs/three/checkpoints/global_step_1", run)
        os.kill(rank(workdir, "three", 2), signal.SIGKILL)
        assert run.wait(timeout=240) == 0, log(workdir, "three")
    finally:
        run.kill()
    output = log(workdir, "three")
    assert "quintet: rank 2 (Samplers) on " in output
    assert "was killed by SIGKILL, probably because the node ran out of memory; restarting it (1 of 3)" in output
    assert "from the last checkpoint" not in output
    faults = {"engine/requests_reassigned": 0.0, "engine/restarts": 0.0}
    has_kernels = decode_kernels(torch.float32, "cpu") is not None
    for ours, theirs in zip(all_metrics(single_process_run), all_metrics(workdir / "runs/three"), strict=True):
        expected = ours | faults
        assert theirs | faults == (expected if has_kernels else pytest.approx(expected, rel=1e-5, abs=1e-6))
    wait_until_gone(workdir)


def test_a_killed_env_host_costs_neither_the_run_nor_a_number(workdir: Path) -> None:
    # with so much of a warm start, most responses are actions
    warm_start = ("warm_start.updates=12", "warm_start.episodes=60", "rollout.think=false")
    overrides = ("sft=null", *warm_start, "rollout.max_response_tokens=8", "rollout.max_turns=4", "training.steps=6")
    single_process_run = start(workdir, "one", *overrides)
    hosts = ("placement.envs.devices=[1]", "placement.envs.processes_per_device=2")
    run = start(workdir, "three", *overrides, "placement.devices_per_node=2", *hosts, "--ray", "local")
    try:
        wait_for(workdir / "runs/three/checkpoints/global_step_1", run)
        os.kill(rank(workdir, "three", 2), signal.SIGKILL)
        assert run.wait(timeout=240) == 0, log(workdir, "three")
        assert single_process_run.wait(timeout=240) == 0, log(workdir, "one")
    finally:
        run.kill()
        single_process_run.kill()
    output = log(workdir, "three")
    assert "quintet: rank 2 (environments) on " in output
    assert "restarting it (1 of 3)" in output
    assert "from the last checkpoint" not in output
    ours, theirs = list(metrics(workdir / "runs/one")), list(metrics(workdir / "runs/three"))
    assert ours[-1]["response/valid_format"] > 0.5
    for alone_step, step in zip(ours, theirs, strict=True):
        assert step.pop("env/episodes_reassigned") <= 8
        assert step == alone_step
    wait_until_gone(workdir)


def test_fine_tuning_through_ray_is_fine_tuning_in_one_process(workdir: Path) -> None:
    overrides = ("sft.then_reinforce=false",)
    assert start(workdir, "one", *overrides, command="sft").wait(timeout=120) == 0, log(workdir, "one")
    two = ("placement.devices_per_node=2", "--ray", "local")
    assert start(workdir, "two", *overrides, *two, command="sft").wait(timeout=120) == 0, log(workdir, "two")
    assert (workdir / "runs/two/logs/rank_1.log").exists()
    for ours, theirs in zip(metrics(workdir / "runs/one"), metrics(workdir / "runs/two"), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-6)


def test_a_run_whose_launcher_is_killed_or_stopped_continues_and_leaves_no_process(workdir: Path) -> None:
    overrides = (*OVERRIDES, "training.steps=200", "--ray", "local")
    run = start(workdir, "stopped", *overrides)
    try:
        wait_for(workdir / "runs/stopped/checkpoints/global_step_1", run)
        launcher = read_status(workdir / "runs/stopped").launcher
        assert launcher is not None
        assert (launcher.process.role, launcher.process.pid, launcher.state) == ("Ray launcher", run.pid, "running")
    finally:
        run.kill()
        run.wait()
    wait_until_gone(workdir, "RANK")  # agents of Ray look for their head for a minute
    end = time.monotonic() + 5  # the memory of a killed process is released after its environment
    while any(record.state == "running" for record in read_status(workdir / "runs/stopped").ranks):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert read_status(workdir / "runs/stopped").state == "died"
    run = start(workdir, "stopped", *overrides)
    try:
        while "resuming from runs/stopped/checkpoints/global_step_" not in log(workdir, "stopped"):
            assert run.poll() is None, log(workdir, "stopped")
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130, log(workdir, "stopped")
    finally:
        run.kill()
    assert "stopped by SIGINT after step" in log(workdir, "stopped")
    assert read_status(workdir / "runs/stopped").state == "stopped"
    wait_until_gone(workdir, "RANK")


def test_a_frozen_rank_is_named_and_the_run_can_be_continued(workdir: Path) -> None:
    run = start(workdir, "frozen", *OVERRIDES, "training.steps=200", "--ray", "local", "--max-restarts", "0")
    try:
        wait_for(workdir / "runs/frozen/checkpoints/global_step_1", run)
        frozen = rank(workdir, "frozen", 1)
        assert os.getpriority(os.PRIO_PROCESS, frozen) == os.getpriority(os.PRIO_PROCESS, run.pid)
        os.kill(frozen, signal.SIGSTOP)
        assert run.wait(timeout=40) == 2, log(workdir, "frozen")
    finally:
        run.kill()
    output = log(workdir, "frozen")
    assert "is stopped (SIGSTOP), after 0 restarts" in output
    assert "rerun the same command to continue from the last checkpoint" in output
    wait_until_gone(workdir)


class Cluster:
    """A head and further nodes of Ray on this machine, in network namespaces or behind the loopback address."""

    def __init__(self, directory: Path, *head_options: str, network: Network | None = None, cpus: int = 1) -> None:
        self.directory = directory
        self.network = network
        self._cpus = cpus
        port = free_port()
        head = network.hosts[0] if network else "127.0.0.1"
        self.address = f"{head}:{port}"
        quick = {"initial_delay_ms": 1000, "period_ms": 500, "timeout_ms": 500, "failure_threshold": 3}
        self.environment = {f"RAY_health_check_{name}": str(value) for name, value in quick.items()}
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
        self.environment["GLOO_SOCKET_IFNAME"] = INTERFACE if network else "lo"
        self.nodes = {head: self._start(head, "--head", f"--port={port}", *head_options)}
        end = time.monotonic() + 60
        while "Ray runtime started" not in (directory / f"ray_{head}.log").read_text():
            assert time.monotonic() < end, (directory / f"ray_{head}.log").read_text()
            time.sleep(0.1)

    def command(self, host: str, *arguments: str) -> list[str]:
        """A command that runs on the node."""
        return self.network.command(host, *arguments) if self.network else list(arguments)

    def add(self, host: str) -> None:
        self.nodes[host] = self._start(host, f"--address={self.address}")

    def _start(self, host: str, *arguments: str) -> subprocess.Popen[bytes]:
        options = [f"--num-cpus={self._cpus}", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            *arguments,
            f"--node-ip-address={host}",
            *options,
        ]
        with (self.directory / f"ray_{host}.log").open("wb") as log:
            return subprocess.Popen(
                self.command(host, *command), env={**os.environ, **self.environment}, stdout=log, stderr=log
            )

    def close(self) -> None:
        for node in self.nodes.values():
            node.terminate()
        for node in self.nodes.values():
            node.wait(timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(300):
        with suppress(OSError), socket.create_connection((host, int(port))):
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens at {address}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    started = Cluster(tmp_path, "--include-dashboard=false")
    yield started
    started.close()


@pytest.mark.skipif(not can_create(), reason="network namespaces require root and the command ip")
def test_a_run_on_two_nodes_survives_the_loss_of_one(workdir: Path, single_process_run: Path) -> None:
    """FSDP2 spans the nodes, and each has an engine; one is cut off from the network."""
    network = Network(3)
    cluster = Cluster(workdir, "--include-dashboard=false", network=network, cpus=2)
    head, second, third = network.hosts
    overrides = ["sft=null", "placement.nodes=2", "placement.devices_per_node=2", "placement.actor.devices=[0,2]"]
    overrides += ["placement.rollout.devices=[1,3]", "--ray", cluster.address]
    try:
        cluster.add(second)
        run = start(workdir, "two", *overrides, environment=cluster.environment, prefix=cluster.command(head))
        wait_for(workdir / "runs/two/checkpoints/global_step_1", run)
        network.disconnect(second)
        lost = time.monotonic()
        while "restarting" not in log(workdir, "two"):
            assert time.monotonic() < lost + 10
            time.sleep(0.1)
        cluster.add(third)
        assert run.wait(timeout=240) == 0, log(workdir, "two")
        run.kill()
    finally:
        network.close()
    output = log(workdir, "two")
    assert "the run needs 2 nodes with 2 CPUs each; the cluster has 1, with 2 CPUs; waiting up to 300 seconds" in output
    assert f"node {second} is lost" in output
    for ours, theirs in zip(metrics(single_process_run), metrics(workdir / "runs/two"), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-6)


def test_a_run_that_waits_for_devices_can_be_stopped(workdir: Path, cluster: Cluster) -> None:
    overrides = ("sft=null", "placement.nodes=2", "placement.devices_per_node=1", "--ray", cluster.address)
    run = start(workdir, "waiting", *overrides, environment=cluster.environment)
    try:
        while "waiting up to 300 seconds" not in log(workdir, "waiting"):
            assert run.poll() is None, log(workdir, "waiting")
            time.sleep(0.1)
        assert "runs/waiting: stopped" in quintet(workdir, "stop", "waiting")
        assert run.wait(timeout=20) == 143
    finally:
        run.kill()


def test_a_submitted_job_is_followed_stopped_and_continued(workdir: Path, tmp_path: Path) -> None:
    for module in ("aiohttp_cors", "colorful"):
        pytest.importorskip(module, reason="pip install 'ray[default]'")
    endpoint = f"127.0.0.1:{free_port()}"
    cluster = Cluster(tmp_path, "--include-dashboard=true", f"--dashboard-port={endpoint.rpartition(':')[2]}")
    overrides = ("sft=null", "training.steps=200", "--ray", f"http://{endpoint}")
    try:
        wait_for_port(endpoint)
        run = start(workdir, "job", *overrides, environment=cluster.environment)
        wait_for(workdir / "runs/job/checkpoints/global_step_1", run)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130, log(workdir, "job")
        stopped = read_status(workdir / "runs/job")
        assert (stopped.state, stopped.message.partition(" after")[0]) == ("stopped", "stopped by SIGTERM")
        assert stopped.progress is not None
        steps = f"training.steps={stopped.progress.done + 1}"
        again = start(workdir, "job", *overrides, steps, environment=cluster.environment)
        assert again.wait(timeout=120) == 0, log(workdir, "job")
        assert "resuming from runs/job/checkpoints/global_step_" in log(workdir, "job")
        unknown = start(workdir, "job", *overrides, environment={**cluster.environment, "RAY_AUTH_TOKEN": "8" * 64})
        assert unknown.wait(timeout=60) == 2
        assert f"quintet: --ray http://{endpoint}: cannot submit a job: " in log(workdir, "job")
    finally:
        cluster.close()
    wait_until_gone(workdir)


def test_a_run_that_needs_more_than_the_cluster_has_is_refused(workdir: Path) -> None:
    run = start(workdir, "large", "sft=null", "placement.nodes=2", "--ray", "local")
    assert run.wait(timeout=60) == 2
    assert "placement.devices_per_node" in log(workdir, "large")
    assert "the run needs 2 nodes with 1 CPU each; the cluster has 1, with" in log(workdir, "large")
    unreachable = start(workdir, "unreachable", *OVERRIDES, "--ray", "127.0.0.1:1")
    assert unreachable.wait(timeout=60) == 2
    assert "quintet: --ray 127.0.0.1:1: cannot connect to Ray" in log(workdir, "unreachable")
