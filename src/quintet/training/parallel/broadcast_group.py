"""A process group beside the default one, for broadcasts to processes that take part in nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it here

BUCKET_BYTES = 16 << 20
"""Size of one broadcast: the fastest of 16, 64 and 256 MiB over gloo."""
TIMEOUT = timedelta(seconds=600)


def create_store(host: str, timeout_seconds: float) -> TCPStore:
    """Return a store that listens at a free port of `host`."""
    # torch would listen on all interfaces
    server = socket.create_server((host, 0))
    port, timeout = server.getsockname()[1], timedelta(seconds=timeout_seconds)
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=server.detach()
    )


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Address, size and backend by which processes join a broadcast group."""

    host: str
    port: int
    size: int
    """Number of processes, with the sender."""
    backend: str
    """`gloo` or `nccl`."""


class BroadcastGroup:
    """Broadcasts buffers from rank 0, in buckets."""

    def __init__(self, address: GroupAddress, rank: int, store: TCPStore | None = None) -> None:
        """Wait until all ranks have joined; rank 0 passes the `store` that it created.

        Raises:
            RuntimeError: one of them does not come in time.
        """
        self.device = torch.device("cuda" if address.backend == "nccl" else "cpu")
        store = store or TCPStore(address.host, address.port, is_master=False, timeout=TIMEOUT)
        self._store: TCPStore | None = store
        self._group = _create_group(address, rank, store)

    def broadcast(self, buffers: Iterable[Tensor]) -> None:
        """Send or receive buffers, uint8 [bytes], of the same sizes on all ranks; those of rank 0 may be on the host.

        Raises:
            RuntimeError: the connection to another rank broke.
        """
        for buffer in buffers:
            for start in range(0, len(buffer), BUCKET_BYTES):
                self._group.broadcast(buffer[start : start + BUCKET_BYTES].to(self.device), 0).wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Release the connections, so that other ranks do not wait for this one; a broadcast that runs keeps them."""
        self._group = self._store = None


def _create_group(address: GroupAddress, rank: int, store: TCPStore) -> Any:
    if address.backend == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        return nccl(store, rank, address.size, nccl.Options())
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = TIMEOUT
    options._devices = [gloo.create_device(hostname=address_towards(address.host, address.port))]
    return gloo(store, rank, address.size, options)


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # connecting a datagram socket sends nothing, and selects the interface that leads there
        probe.connect((host, port))
        return str(probe.getsockname()[0])
