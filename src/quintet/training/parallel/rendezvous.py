"""Rendezvous of the ranks that torchrun has started, and detection of ranks that die."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it here
from torch.distributed.distributed_c10d import PrefixStore, Store

from quintet.config.plan.process_layout import LocalDevice
from quintet.config.torchrun import RankInfo, describe_rank
from quintet.errors import MachineError
from quintet.tracking.run_processes import ProcessStat, process_namespace
from quintet.training.parallel.broadcast_group import address_towards
from quintet.training.parallel.process_group import RankGroup

CONTROL_TIMEOUT_DAYS = 365
"""Timeout for a worker's next call: rollouts may take any time, and a rank that dies is detected at once."""
POLL_SECONDS, GRACE_SECONDS = 1.0, 8.0
"""Interval of checks for lost ranks, and time after the last sign of life of one in which this rank may end by an
ordinary error. Both together are less than the 10 seconds in which a loss must be noticed."""
MIN_GRACE_SECONDS = 0.5
"""The same at least for a rank whose last sign of life is long ago: no collective fails because of a stopped one."""
REAPED_SECONDS = 3.0
"""Time until a dead process disappears from the process list."""

CONNECTION_ERRORS = ("Connection closed", "Connection reset", "Broken pipe", "remote process exited")
"""Messages of gloo and NCCL when the other side has died."""
TORCHRUN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


class RankDiedError(MachineError):
    """Another rank has died."""


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that has ended, is stopped or cannot be reached."""

    reason: str
    """Message that names it, for example "rank 1 (critic) has ended"."""
    last_heartbeat: float
    """Its last sign of life, seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank, and the fingerprint of its run."""

    rank: int
    host: str
    pid: int
    fingerprint: str
    components: str = ""
    """Names of its components, for messages."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; False for a process on another machine, where this is unknown."""
        if self.host != process_namespace():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        stat = ProcessStat.of(self.pid)
        return stat is not None and stat.letter == "Z"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """All ranks of a run after they have found each other."""

    ranks: RankGroup
    """The default process group, for computations."""
    control_group: dist.ProcessGroup
    """Group over which rank 0 sends calls to the others."""
    processes: tuple[RankProcess, ...]
    address: str = "127.0.0.1"
    """Address of this machine under which the others reach it."""
    store: Store | None = None
    """The store of all processes."""

    @property
    def shared_store(self) -> Store:
        """The store of all processes.

        Raises:
            ValueError: the ranks have found each other without one.
        """
        if self.store is None:
            raise ValueError("the rendezvous has no store")
        return self.store

    def ended_ranks(self) -> str:
        """Return for example "rank 1 (critic) has ended"; empty if no other rank of this machine has."""
        others = (process for index, process in enumerate(self.processes) if index != self.ranks.rank)
        ended = [describe_rank(process.rank, process.components) for process in others if process.has_ended]
        return f"{', '.join(ended)} {'has' if len(ended) == 1 else 'have'} ended" if ended else ""

    def death_cause(self, error: Exception) -> str | None:
        """Describe the ended ranks or the broken connection behind this error; None if it has another cause."""
        deadline = time.monotonic() + REAPED_SECONDS
        while not (ended := self.ended_ranks()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return ended or broken_connection(error)

    @contextmanager
    def watchdog(
        self, on_rank_lost: Callable[[str], None], lost_rank: Callable[[], LostRank | None] = lambda: None
    ) -> Iterator[None]:
        """Call `on_rank_lost(reason)` from a thread if a rank is lost and this one is still within the context
        `GRACE_SECONDS` later: a rank that waits on its GPU, or for the lost rank's part of a checkpoint, does not
        notice the loss. `lost_rank` returns a rank that is lost besides those of this machine that have ended."""
        closed = threading.Event()

        def watch() -> None:
            while not closed.wait(POLL_SECONDS):
                ended = self.ended_ranks()
                lost = LostRank(ended, time.monotonic()) if ended else lost_rank()
                if lost is not None:
                    grace = lost.last_heartbeat + GRACE_SECONDS - time.monotonic()
                    if not closed.wait(max(grace, MIN_GRACE_SECONDS)):
                        on_rank_lost(lost.reason)
                    return

        thread = threading.Thread(target=watch, name="ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closed.set()
            thread.join()  # a thread that runs when the interpreter exits would abort the process

    def close(self) -> None:
        """Destroy the process groups."""
        dist.destroy_process_group()


def broken_connection(error: Exception) -> str | None:
    """Describe the connection that broke if that is why a collective has failed."""
    if any(message in str(error) for message in CONNECTION_ERRORS):
        return f"the connection to another rank broke ({str(error).splitlines()[0]})"
    return None


def rendezvous(
    info: RankInfo,
    fingerprint: str,
    timeout_seconds: float,
    collective_seconds: float = 1800.0,
    *,
    ranks: Sequence[int] | None = None,
    store: Store | None = None,
    components: str = "",
    address: str = "127.0.0.1",
) -> Rendezvous:
    """Wait for all `ranks` (default: all of the run) and create their process groups, which number them from 0.
    `fingerprint` identifies configuration and version, and must be equal on all ranks; `store` is that of `join_run`,
    which is called otherwise. `collective_seconds` is the timeout of collectives during a computation, in which all
    ranks take part at the same time. `components` are the names of this rank's components, for messages, and
    `address` is that of this machine for the others.

    Raises:
        MachineError: some ranks do not arrive in time, have another configuration or share a GPU; the message names
            them.
    """
    ranks = range(info.size) if ranks is None else ranks
    store = store or join_run(info, LocalDevice(info.local_rank, info.local_rank, info.local_size), timeout_seconds)
    processes = _exchange_processes(
        store, info, ranks, {"fingerprint": fingerprint, "components": components}, timeout_seconds
    )
    rank, size = ranks.index(info.rank), len(ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(f"ranks/{ranks[0]}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=collective_seconds),
    )
    control_group = dist.new_group(backend="gloo", timeout=timedelta(days=CONTROL_TIMEOUT_DAYS))
    return Rendezvous(RankGroup(rank, size), control_group, processes, address, store)


def join_run(info: RankInfo, device: LocalDevice | None, timeout_seconds: float) -> Store:
    """Prepare this process as one of several, and return the store of all. Each uses the GPU of its `device`, or none.
    If all run on this machine, they use the loopback interface unless `GLOO_SOCKET_IFNAME` is set.

    Raises:
        MachineError: the store cannot be reached, or there are fewer GPUs than processes.
    """
    if info.is_single_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if device is not None and torch.cuda.is_available():
        torch.cuda.set_device(_local_gpu(info.rank, device, torch.cuda.device_count()))
    store = _create_store(info, timeout_seconds)
    _remove_torchrun_variables()
    return store


def local_address() -> str:
    """Return the address of this machine under which the other processes of the run reach it; `join_run` must not have
    been called yet."""
    return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _local_gpu(rank: int, device: LocalDevice, visible: int) -> int:
    """Return a rank's GPU: the one with the number of its device; with as many visible GPUs as devices are used, as Ray
    provides them, the one of that index; or the only visible one, as under Slurm.

    Raises:
        MachineError: there are fewer GPUs.
    """
    if visible == device.num_used:
        return device.index
    if device.number < visible:
        return device.number
    if visible == 1:
        return 0
    raise _too_few_gpus(f"rank {rank} uses device {device.number} of its machine, which has {visible} GPUs")


def _gpu_name() -> str | None:
    """Return the UUID of the current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _check_no_shared_gpus(cards: Mapping[int, dict[str, Any]]) -> None:
    """Check that no two ranks share a GPU, for which the message of NCCL is unclear.

    Raises:
        MachineError: two ranks have the same GPU.
    """
    first: dict[str, int] = {}
    for rank, card in cards.items():
        owner = rank if card["gpu"] is None else first.setdefault(card["gpu"], rank)
        if owner != rank:
            raise _too_few_gpus(f"{_format_ranks([owner, rank])} have the same GPU")


def _too_few_gpus(problem: str) -> MachineError:
    hint = "start one process per GPU: torchrun --nproc-per-node N …; CUDA_VISIBLE_DEVICES= runs all on the CPU"
    return MachineError(problem, hint)


def _remove_torchrun_variables() -> None:
    """Remove torchrun's variables: in child processes, such as engines, torch would join this run's rendezvous."""
    for name in [name for name in os.environ if name in TORCHRUN_VARIABLES or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def _create_store(info: RankInfo, timeout_seconds: float) -> Store:
    """Return the store of all ranks: torchrun's, or one that rank 0 hosts at `MASTER_ADDR`:`MASTER_PORT`."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listen_fd = None
    try:
        if info.rank == 0 and not hosted_by_torchrun:
            # torch would listen on all interfaces
            listen_fd = socket.create_server((host, port)).detach()
        store = TCPStore(
            host,
            port,
            is_master=listen_fd is not None,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except (dist.DistError, OSError) as error:
        problem = f"rank {info.rank} of {info.size} cannot reach the rendezvous store at {host}:{port}"
        raise _rendezvous_failed(f"{problem}: {str(error).splitlines()[0]}") from error
    return PrefixStore(f"quintet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _exchange_processes(
    store: Store, info: RankInfo, ranks: Sequence[int], described: Mapping[str, str], timeout_seconds: float
) -> tuple[RankProcess, ...]:
    """Publish this rank's process, with how it is `described`, and return those of all `ranks`."""
    card = {"host": process_namespace(), "process": os.getpid(), "gpu": _gpu_name(), **described}
    store.set(f"card/{info.rank}", json.dumps(card))
    names = {rank: f"card/{rank}" for rank in ranks}
    try:
        store.wait(list(names.values()), timedelta(seconds=timeout_seconds))
    except dist.DistError as error:
        problem = f"{_missing_ranks(store, names)} of {info.size} did not start within {timeout_seconds:g} seconds"
        raise _rendezvous_failed(problem) from error
    cards = {rank: json.loads(store.get(name)) for rank, name in names.items()}
    processes = tuple(
        RankProcess(rank, str(card["host"]), int(card["process"]), str(card["fingerprint"]), str(card["components"]))
        for rank, card in cards.items()
    )
    if other := [process.rank for process in processes if process.fingerprint != processes[0].fingerprint]:
        hint = "start all ranks with the same command, files and version of quintet"
        raise MachineError(
            f"{_format_ranks(other)} of {info.size} started with another configuration than rank 0", hint
        )
    _check_no_shared_gpus(cards)
    return processes


def _missing_ranks(store: Store, names: Mapping[int, str]) -> str:
    try:
        return _format_ranks([rank for rank, name in names.items() if not store.check([name])])
    except dist.DistError:
        return "some ranks"


def _format_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _rendezvous_failed(problem: str) -> MachineError:
    return MachineError(problem, "start all ranks together: torchrun --nproc-per-node N -m quintet …")
