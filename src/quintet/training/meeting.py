"""How the processes that torchrun started find each other, and who of them is still there."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it here
from torch.distributed.distributed_c10d import PrefixStore, Store

from quintet.config.started import Started
from quintet.errors import MachineError
from quintet.training.ranks import Ranks

__all__ = ["LostRank", "Meeting", "Peer", "ended", "meet"]

HANG_SECONDS = 1800.0
"""How long a rank waits inside a calculation for the others' parts: they compute at the same time."""
QUIET_DAYS = 365
"""How long a follower waits for the next call, which is as long as games last. Who dies is noticed at once."""
LOOK_SECONDS, GRACE_SECONDS = 1.0, 10.0
"""How often a rank looks whether the others are there, and how long it then has to end in its own way."""
REAPED_SECONDS = 3.0
"""Time in which a dead process also goes from the system's list."""

BROKEN = ("Connection closed", "Connection reset", "Broken pipe", "remote process exited")
"""What gloo and NCCL say where the other side is no more."""
OF_TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


class LostRank(MachineError):
    """Another rank isn't there any more."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One of the processes, and what it says of its run."""

    rank: int
    host: str
    process: int
    told: str

    @property
    def gone(self) -> bool:
        """It is known to have ended: of a process on another machine nothing is known."""
        if self.host != _machine():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _is_zombie(self.process)


@cache
def _machine() -> str:
    """Where processes are counted as here: this machine since it was started, and of containers this one."""
    told = [socket.gethostname()]
    with suppress(OSError):  # a system without /proc has no containers either
        told += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(told)


def _is_zombie(process: int) -> bool:
    """Ended, and not yet asked for its status by whoever started it; False where the system has no /proc."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks, together."""

    ranks: Ranks
    """They compute over this."""
    line: dist.ProcessGroup
    """Rank 0 tells the others over this what to do."""
    peers: tuple[Peer, ...]

    def gone(self) -> list[int]:
        """The other ranks that have ended."""
        return [peer.rank for peer in self.peers if peer.rank != self.ranks.rank and peer.gone]

    def soon_gone(self) -> list[int]:
        """The same after a connection broke: waits a little for the system to notice, too."""
        until = time.monotonic() + REAPED_SECONDS
        while not (found := self.gone()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def ended(self, error: RuntimeError) -> str | None:
        """Who has ended, where that is why there is this error, as it is told; None where it isn't."""
        if gone := self.soon_gone():
            return ended(gone)
        if any(word in str(error) for word in BROKEN):
            return f"the connection to another rank broke ({str(error).splitlines()[0]})"
        return None

    @contextmanager
    def watched(self, give_up: Callable[[str], None]) -> Iterator[None]:
        """Inside, `give_up` is called in a thread and told who has ended, where this rank is still there
        `GRACE_SECONDS` later: one that waits on its GPU for a rank that is no more, or for that one's part of a
        checkpoint, doesn't notice by itself."""
        left = threading.Event()

        def watch() -> None:
            while not left.wait(LOOK_SECONDS):
                if (gone := self.gone()) and not left.wait(GRACE_SECONDS):
                    give_up(ended(gone))
                    return

        watching = threading.Thread(target=watch, name="ranks", daemon=True)
        watching.start()
        try:
            yield
        finally:
            left.set()
            watching.join()  # cut off by the end of the interpreter it would abort the process

    def leave(self) -> None:
        """Part from the others."""
        dist.destroy_process_group()


def ended(gone: list[int]) -> str:
    """Those ranks, in words."""
    return f"{_listed(gone)} {'has' if len(gone) == 1 else 'have'} ended"


def meet(started: Started, told: str, timeout_seconds: float) -> Meeting:
    """Wait for all ranks, on loopback where all of them run on this machine unless `GLOO_SOCKET_IFNAME` names another
    interface; with GPUs each takes the one of its local rank. `told` is what a rank says of its run: all have to say
    the same.

    Raises:
        MachineError: some don't come in time, have another configuration, or no GPU to themselves; the message names
            them.
    """
    if started.one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(_own_gpu(started, torch.cuda.device_count()))
        backend = "cpu:gloo,cuda:nccl"
    store = _meeting_place(started, timeout_seconds)
    peers = _introduced(store, started, told, timeout_seconds)
    dist.init_process_group(
        backend,
        store=PrefixStore("ranks", store),
        rank=started.rank,
        world_size=started.size,
        timeout=timedelta(seconds=HANG_SECONDS),
    )
    line = dist.new_group(backend="gloo", timeout=timedelta(days=QUIET_DAYS))
    _forget_torchrun()
    return Meeting(Ranks(started.rank, started.size), line, peers)


def _own_gpu(started: Started, visible: int) -> int:
    """Which of the visible GPUs is this process's: the one of its local rank, or the only one that its starter lets it
    see, as Slurm does.

    Raises:
        MachineError: there are fewer than processes.
    """
    if started.local_rank < visible:
        return started.local_rank
    if visible == 1:
        return 0
    raise _too_few_gpus(f"rank {started.rank} is process {started.local_rank} of its machine, which has {visible} GPUs")


def _gpu_name() -> str | None:
    """Of the GPU in use, the same in all processes; None where there is none."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _refuse_shared_gpus(cards: list[dict[str, Any]]) -> None:
    """
    Raises:
        MachineError: two ranks have the same GPU, of which NCCL would say that something is wrong with it.
    """
    first: dict[str, int] = {}
    for rank, card in enumerate(cards):
        owner = rank if card["gpu"] is None else first.setdefault(card["gpu"], rank)
        if owner != rank:
            raise _too_few_gpus(f"{_listed([owner, rank])} have the same GPU")


def _too_few_gpus(told: str) -> MachineError:
    hint = "start one process for each GPU: torchrun --nproc-per-node N …; CUDA_VISIBLE_DEVICES= runs all on the CPU"
    return MachineError(told, hint)


def _forget_torchrun() -> None:
    """Processes that this one starts, such as engines, are no ranks: torch in them would look for a meeting place that
    is this run's."""
    for name in [name for name in os.environ if name in OF_TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def _meeting_place(started: Started, timeout_seconds: float) -> Store:
    """What all ranks can write to and read: torchrun's, or else rank 0's at the address that the environment says."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listening = None
    try:
        if started.rank == 0 and not by_torchrun:
            # torch itself would listen on every interface
            listening = socket.create_server((host, port)).detach()
        store = TCPStore(
            host,
            port,
            is_master=listening is not None,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (dist.DistError, OSError) as error:
        told = f"rank {started.rank} of {started.size} finds no meeting place at {host}:{port}"
        raise _not_met(f"{told}: {str(error).splitlines()[0]}") from error
    return PrefixStore(f"quintet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _introduced(store: Store, started: Started, told: str, timeout_seconds: float) -> tuple[Peer, ...]:
    """Who came, by rank."""
    card = {"host": _machine(), "process": os.getpid(), "told": told, "gpu": _gpu_name()}
    store.set(f"card/{started.rank}", json.dumps(card))
    names = [f"card/{rank}" for rank in range(started.size)]
    try:
        store.wait(names, timedelta(seconds=timeout_seconds))
    except dist.DistError as error:
        told = f"{_absent(store, names)} of {started.size} didn't come within {timeout_seconds:g} seconds"
        raise _not_met(told) from error
    cards = [json.loads(store.get(name)) for name in names]
    peers = tuple(Peer(rank, str(c["host"]), int(c["process"]), str(c["told"])) for rank, c in enumerate(cards))
    if other := [peer.rank for peer in peers if peer.told != peers[0].told]:
        hint = "start all of them with the same words, files and version"
        raise MachineError(f"{_listed(other)} of {started.size}: another configuration than that of rank 0", hint)
    _refuse_shared_gpus(cards)
    return peers


def _absent(store: Store, names: list[str]) -> str:
    try:
        return _listed([rank for rank, name in enumerate(names) if not store.check([name])])
    except dist.DistError:
        return "some ranks"


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _not_met(told: str) -> MachineError:
    return MachineError(told, "start all of them together: torchrun --nproc-per-node N -m quintet …")
