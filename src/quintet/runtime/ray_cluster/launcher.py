"""Start the ranks of a run on the nodes of a Ray cluster, watch them, and restart them from the last checkpoint.

Ray places one actor per node, which starts the ranks as child processes (`node_processes.py`); the ranks find each
other as those of torchrun do.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quintet.config.torchrun import RankInfo
from quintet.errors import SIGNALLED, ConfigError, MachineError
from quintet.hardware import extra_packages, install_command
from quintet.runtime.ray_cluster.node_processes import NodeProcesses
from quintet.runtime.ray_cluster.rank_watch import POLL_SECONDS, Node, RankFailureError, RankWatch
from quintet.runtime.signals import StopRequest, stop_on_signals
from quintet.tracking.run_processes import RunProcess

CONNECT_SECONDS = 10.0
"""Time for the address of a cluster to accept a connection."""
OBJECT_STORE_BYTES = 100 << 20
"""Object store of a local Ray, which passes only small messages."""
FORWARDED = ("NCCL_", "GLOO_", "OMP_", "TORCH_", "CUDA_LAUNCH_", "HF_", "WANDB_", "QUINTET_", "PYTHONPATH")
"""Beginnings of the environment variables that the ranks receive from the launcher."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """What every rank runs."""

    words: Sequence[str]
    """Program and arguments, the same on all nodes."""
    directory: str
    """Working directory, which all nodes share."""
    ranks: RankInfo
    """Number of ranks, in total and per node."""
    start_seconds: float
    """Time to wait for devices."""
    lost_seconds: float
    """A node that does not answer for so long, or a rank that is stopped for so long, is lost."""
    record_of: Callable[[int], RunProcess | None]
    """Returns the record of a rank's process."""
    restartable: frozenset[int] = frozenset()
    """Ranks that are started again alone when they fail; the failure of any other rank restarts all."""


def run_on_ray(address: str, command: RankCommand, max_restarts: int, show: Callable[[str], None]) -> int:
    """Run the command on a cluster until all ranks have ended; return the exit status of rank 0.

    Args:
        address: `local` starts Ray on this machine, `auto` or `HOST:PORT` joins a cluster.
        max_restarts: How often the ranks are started again after a failure.
        show: Prints the output of rank 0.

    Raises:
        ConfigError: the cluster does not have the devices.
        MachineError: the cluster cannot be reached, or the ranks failed once more.
    """
    with _connected(address, command.ranks), stop_on_signals() as stop:
        restarts = 0
        wait_seconds = 0.0 if address == "local" else command.start_seconds
        while True:
            try:
                resources = _wait_for_resources(command.ranks, wait_seconds, stop, show)
                with _placed(command, resources, stop) as nodes:
                    watch = RankWatch(nodes, stop, show, command.restartable, max_restarts, command.record_of)
                    return watch.run()
            except RankFailureError as error:
                if stop:
                    return SIGNALLED + stop.number  # type: ignore[operator]  # set, since it is true
                if restarts == max_restarts:
                    hint = "rerun the same command to continue from the last checkpoint"
                    raise MachineError(f"{error}, after {restarts} restarts", hint) from error
                restarts += 1
                show(f"quintet: {error}; restarting from the last checkpoint ({restarts} of {max_restarts})\n")


@contextmanager
def _connected(address: str, ranks: RankInfo) -> Iterator[None]:
    """Connect to a cluster, or start one of this machine, which requires a token."""
    if address == "local":
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise MachineError("--ray needs the package ray", install_command(extra_packages("ray"))) from None
    options: dict[str, Any] = {"address": address}
    if address == "local":
        cores = max(os.cpu_count() or 1, ranks.size)
        options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        _check_reachable(address)
        ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError and TimeoutError are OSErrors
        reason = str(error).strip().splitlines()[0]
        hint = (
            "--ray local starts Ray on this machine; `ray start --head` starts a cluster; one with a token needs "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here, too"
        )
        raise MachineError(f"--ray {address}: cannot connect to Ray: {reason}", hint) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """
    Raises:
        OSError: nothing listens at `HOST:PORT`; Ray would try for minutes.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


@contextmanager
def _placed(command: RankCommand, resources: Mapping[str, float], stop: StopRequest) -> Iterator[list[Node]]:
    """Start the ranks on nodes with enough devices; kill those that are left in the end."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num_nodes = command.ranks.size // command.ranks.local_size
    group = placement_group([dict(resources)] * num_nodes, "STRICT_SPREAD" if num_nodes > 1 else "STRICT_PACK")
    actors: list[Any] = []
    try:
        deadline = time.monotonic() + command.start_seconds
        while not group.wait(POLL_SECONDS):
            _check_stop(stop)
            if time.monotonic() >= deadline:
                wanted = f"{num_nodes} free nodes with {_describe(resources)}"
                raise MachineError(
                    f"the cluster has no {wanted} after {command.start_seconds:g} seconds",
                    "wait for other runs to end, or raise placement.join_timeout_seconds",
                )
        options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "max_restarts": 0}
        remote = ray.remote(NodeProcesses)
        for index in range(num_nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actors.append(remote.options(**options, scheduling_strategy=strategy).remote())
        yield _start_ranks(command, actors, _hosts(group))
    finally:
        # ranks that are left must not write into the run directory beside those that are started next
        ray.wait([actor.kill.remote() for actor in actors], num_returns=len(actors) or 1, timeout=command.lost_seconds)
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _check_stop(stop: StopRequest) -> None:
    """
    Raises:
        RankFailureError: a stop was requested before the ranks have started.
    """
    if stop:
        raise RankFailureError("stopped before the start")


def _wait_for_resources(
    ranks: RankInfo, seconds: float, stop: StopRequest, show: Callable[[str], None]
) -> dict[str, float]:
    """Return the resources of a node's ranks; wait for nodes that join the cluster, or replace lost ones.

    Raises:
        ConfigError: no node of the cluster, or too few, have so many.
    """
    deadline, shown = time.monotonic() + seconds, ""
    while True:
        try:
            return _resources_per_node(ranks)
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            if error.message != shown:
                shown = error.message
                show(f"quintet: {shown}; waiting up to {seconds:g} seconds for more\n")
            _check_stop(stop)
            time.sleep(POLL_SECONDS)


def _resources_per_node(ranks: RankInfo) -> dict[str, float]:
    """Return the resources of a node's ranks: a GPU each or, on a cluster without GPUs, a CPU.

    Raises:
        ConfigError: no node of the cluster, or too few, have so many.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpus = any(node.get("GPU") for node in nodes)
    resources = {"GPU": float(ranks.local_size), "CPU": 1.0} if has_gpus else {"CPU": float(ranks.local_size)}
    suitable = [node for node in nodes if all(node.get(name, 0) >= count for name, count in resources.items())]
    needed = ranks.size // ranks.local_size
    if len(suitable) < needed:
        kind = "GPU" if has_gpus else "CPU"
        present = ", ".join(f"{node.get(kind, 0):g}" for node in nodes)
        raise ConfigError(
            f"the run needs {needed} nodes with {_describe(resources)}; the cluster has {len(nodes)}, with {present} "
            f"{kind}s",
            key="placement.devices_per_node",
            value=ranks.local_size,
            hint="change placement.nodes and placement.devices_per_node, or add nodes to the cluster",
        )
    return resources


def _describe(resources: Mapping[str, float]) -> str:
    kind = "GPU" if "GPU" in resources else "CPU"
    return f"{resources[kind]:g} {kind}{'s' * (resources[kind] != 1)} each"


def _hosts(group: Any) -> list[str]:
    """Return the address of each bundle's node."""
    import ray
    from ray.util.placement_group import placement_group_table

    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    return [addresses[node_ids[index]] for index in range(len(node_ids))]


def _start_ranks(command: RankCommand, actors: Sequence[Any], hosts: Sequence[str]) -> list[Node]:
    """Start the ranks on the nodes, which are sorted by address: their order varies from start to start."""
    per_node = command.ranks.local_size
    order = sorted(range(len(hosts)), key=lambda index: [part.zfill(3) for part in hosts[index].split(".")])
    nodes = [
        Node(hosts[index], actors[index], range(number * per_node, (number + 1) * per_node), command.lost_seconds)
        for number, index in enumerate(order)
    ]
    port = nodes[0].call("free_port", nodes[0].host)
    shared = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    shared |= {"MASTER_ADDR": nodes[0].host, "MASTER_PORT": str(port), "WORLD_SIZE": str(command.ranks.size)}
    for node in nodes:
        environments = {
            rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(per_node)}
            for local, rank in enumerate(node.ranks)
        }
        try:
            node.call("start", list(command.words), command.directory, environments)
        except OSError as error:
            message = f"node {node.host} cannot start {command.words[0]} in {command.directory}: {error}"
            hint = "install quintet on all nodes at the same path, and use a directory that all nodes share"
            raise MachineError(message, hint) from error
    return nodes
