"""Start the ranks of a process group, one process each, and join the group in them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from warm_processes import Popen

from quintet.training.parallel.process_group import RankGroup

SUPPORT = Path(__file__).parent


def run_ranks(script: str | Path, num_ranks: int, directory: Path, *arguments: object) -> list[str]:
    """Run a script of `tests/support`, or of another path, once per rank, and return the standard output of each rank.

    The script calls `join_ranks`. `directory` gets the rendezvous file.

    Raises:
        AssertionError: a rank failed; the message is the end of its standard error.
        TimeoutExpired: the ranks take longer than 400 s.
    """
    command = [sys.executable, "-W", "ignore", str(SUPPORT / script)]
    options = [str(num_ranks), str(directory / "rendezvous"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        Popen(
            [*command, str(rank), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr[-4000:]
    return [stdout for stdout, _ in outputs]


def join_ranks() -> tuple[RankGroup, list[str]]:
    """Join the process group that the command line of `run_ranks` names; return it and the script's arguments."""
    rank, num_ranks, rendezvous_file, *arguments = sys.argv[1:]
    return RankGroup.join(int(rank), int(num_ranks), Path(rendezvous_file), timeout_seconds=120.0), arguments


def free_port() -> int:
    with socket.socket() as actual:
        actual.bind(("127.0.0.1", 0))
        return int(actual.getsockname()[1])


def as_started(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank that torchrun has started."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {
        **os.environ,
        **{k: str(v) for k, v in environment.items()},
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
