"""Start the ranks of a run on the nodes of a Ray cluster, watch them, and restart them from the last checkpoint.

Ray places one actor per node, which starts the ranks as child processes (`node_processes.py`); the ranks find each
other as those of torchrun do.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quintet import hardware
from quintet.config.torchrun import RankInfo
from quintet.errors import SIGNALLED, ConfigError, MachineError
from quintet.hardware import extra_packages, install_command
from quintet.runtime.calls.run_secret import VARIABLE as RUN_SECRET
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
NICENESS = "RAY_worker_niceness"
"""Environment variable with the niceness of the processes that Ray starts."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """Command that every rank runs."""

    argv: Sequence[str]
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
    cpu_ranks: frozenset[int] = frozenset()
    """Ranks that need no GPU; a node that only has such ranks may be one without."""
    gpus_per_node: int | None = None
    """GPUs of a node with other ranks; None for one per rank."""
    components: Sequence[str] = ()
    """Names of each rank's components, for messages; see `ProcessLayout.components_of`."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.ranks.size // self.ranks.local_size

    @property
    def cpu_nodes(self) -> frozenset[int]:
        """Numbers of the nodes that need no GPU."""
        per_node = self.ranks.local_size
        nodes = {node: range(node * per_node, (node + 1) * per_node) for node in range(self.num_nodes)}
        return frozenset(node for node, ranks in nodes.items() if self.cpu_ranks.issuperset(ranks))


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
                resources = _wait_for_resources(command, wait_seconds, stop, show)
                with _placed(command, resources, stop) as nodes:
                    restartable, components = command.restartable, command.components
                    watch = RankWatch(nodes, stop, show, restartable, max_restarts, command.record_of, components)
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
        # with Ray's default of 15, any other process of this machine would slow down the run
        os.environ.setdefault(NICENESS, "0")
    try:
        import ray
    except ImportError:
        raise MachineError("--ray needs the package ray", install_command(extra_packages("ray"))) from None
    options: dict[str, Any] = {"address": address}
    if address == "local":
        cores = max(hardware.cpu_cores(), ranks.size)
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
def _placed(command: RankCommand, resources: Sequence[Mapping[str, float]], stop: StopRequest) -> Iterator[list[Node]]:
    """Start the ranks on nodes with the resources that they need; at the end, kill remaining ranks."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([*map(dict, resources)], "STRICT_SPREAD" if len(resources) > 1 else "STRICT_PACK")
    actors: list[Any] = []
    try:
        deadline = time.monotonic() + command.start_seconds
        while not group.wait(POLL_SECONDS):
            _check_stop(stop)
            if time.monotonic() >= deadline:
                raise MachineError(
                    f"the cluster has no {_describe_all(resources, 'free ')} after {command.start_seconds:g} seconds",
                    "wait for other runs to end, or raise placement.join_timeout_seconds",
                )
        remote = ray.remote(NodeProcesses)
        for index, node in enumerate(resources):
            options = {"num_cpus": node["CPU"], "num_gpus": node.get("GPU", 0), "max_restarts": 0}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actors.append(remote.options(**options, scheduling_strategy=strategy).remote())
        yield _start_ranks(command, actors, _hosts(group), resources)
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
    command: RankCommand, seconds: float, stop: StopRequest, show: Callable[[str], None]
) -> list[dict[str, float]]:
    """Return the resources of each node's ranks; wait for nodes that join the cluster, or replace lost ones.

    Raises:
        ConfigError: no node of the cluster, or too few, have so many.
    """
    deadline, shown = time.monotonic() + seconds, ""
    while True:
        try:
            return _resources_per_node(command)
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            if error.message != shown:
                shown = error.message
                show(f"quintet: {shown}; waiting up to {seconds:g} seconds for more\n")
            _check_stop(stop)
            time.sleep(POLL_SECONDS)


def _resources_per_node(command: RankCommand) -> list[dict[str, float]]:
    """Return the resources of each node's ranks: a GPU per device or, where no rank needs one and on a cluster without
    GPUs, a CPU per rank.

    Raises:
        ConfigError: no node of the cluster, or too few, have so many.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node.get("GPU") for node in nodes) else "CPU"
    per_node = command.ranks.local_size
    cpus = {"CPU": float(per_node)}
    gpus = per_node if command.gpus_per_node is None else command.gpus_per_node
    devices = {"GPU": float(gpus), "CPU": 1.0} if kind == "GPU" else cpus
    resources = [cpus if node in command.cpu_nodes else devices for node in range(command.num_nodes)]
    with_devices = [node for node in nodes if _has(node, devices)]
    with_either = [node for node in nodes if _has(node, devices) or _has(node, cpus)]
    if len(with_devices) < resources.count(devices) or len(with_either) < len(resources):
        present = ", ".join(f"{node.get(kind, 0):g}" for node in nodes)
        raise ConfigError(
            f"the run needs {_describe_all(resources)}; the cluster has {len(nodes)}, with {present} {kind}s",
            key="placement.devices_per_node",
            value=per_node,
            hint="change placement.nodes and placement.devices_per_node, or add nodes to the cluster",
        )
    return resources


def _has(node: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(node.get(name, 0) >= count for name, count in resources.items())


def _describe_all(resources: Sequence[Mapping[str, float]], adjective: str = "") -> str:
    counts = Counter(map(_describe, resources))
    return " and ".join(f"{count} {adjective}nodes with {each}" for each, count in counts.items())


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


def _order(hosts: Sequence[str], resources: Sequence[Mapping[str, float]]) -> list[int]:
    """Return, for the resources of each node, the index of a placement-group bundle with these resources, in the order
    of addresses."""
    by_address = sorted(range(len(hosts)), key=lambda index: [part.zfill(3) for part in hosts[index].split(".")])
    order: list[int] = []
    for resource in resources:
        order.append(next(each for each in by_address if each not in order and resources[each] == resource))
    return order


def _start_ranks(
    command: RankCommand, actors: Sequence[Any], hosts: Sequence[str], resources: Sequence[Mapping[str, float]]
) -> list[Node]:
    """Start the ranks on the nodes with their `resources`, which are sorted by address among equal ones: their order
    varies from start to start."""
    per_node = command.ranks.local_size
    order = _order(hosts, resources)
    nodes = [
        Node(hosts[index], actors[index], range(number * per_node, (number + 1) * per_node), command.lost_seconds)
        for number, index in enumerate(order)
    ]
    port = nodes[0].call("free_port", nodes[0].host)
    shared = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    shared.setdefault(RUN_SECRET, secrets.token_hex(32))
    shared |= {"MASTER_ADDR": nodes[0].host, "MASTER_PORT": str(port), "WORLD_SIZE": str(command.ranks.size)}
    for node in nodes:
        environments = {
            rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(per_node)}
            for local, rank in enumerate(node.ranks)
        }
        try:
            node.call("start", list(command.argv), command.directory, environments)
        except OSError as error:
            message = f"node {node.host} cannot start {command.argv[0]} in {command.directory}: {error}"
            hint = "install quintet on all nodes at the same path, and use a directory that all nodes share"
            raise MachineError(message, hint) from error
    return nodes
