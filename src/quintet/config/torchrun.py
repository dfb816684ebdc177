"""Rank of this process among the processes of a run, from the environment variables that torchrun sets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from quintet.errors import MachineError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun for each process; without all of them this process runs alone."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank of a process; by default it is the only one."""

    rank: int = 0
    size: int = 1
    """World size."""
    local_rank: int = 0
    local_size: int = 1
    """Processes on this node."""

    @property
    def is_single_node(self) -> bool:
        return self.local_size == self.size


def describe_rank(rank: int, components: str = "") -> str:
    """Return the name of a rank in messages and records, such as `rank 2 (critic and reference)`."""
    return f"rank {rank} ({components})" if components else f"rank {rank}"


def current_rank(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Read the rank from environment variables, by default those of this process.

    Raises:
        MachineError: a variable is not a number, or a rank is not below its size.
    """
    variables = os.environ if environment is None else environment
    if not all(name in variables for name in VARIABLES):
        return RankInfo()
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE", minimum=1)
    local_size = _number(variables, "LOCAL_WORLD_SIZE", minimum=1, default=size)
    local_rank = _number(variables, "LOCAL_RANK", default=rank % local_size)
    if rank >= size or local_rank >= local_size:
        ranks = f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}"
        raise MachineError(f"{ranks}: ranks count from 0", "let torchrun set them, or unset all of them")
    return RankInfo(rank, size, local_rank, local_size)


def _number(variables: Mapping[str, str], name: str, *, minimum: int = 0, default: int = 0) -> int:
    text = variables.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise MachineError(f"environment variable {name}={text!r} is not an integer ≥ {minimum}", f"unset {name}")
    return int(text)
