"""As which of several processes this one was started: what torchrun says in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from quintet.errors import MachineError

__all__ = ["Started", "started"]

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process, and anything that starts them as it does; all of them or none."""


@dataclass(frozen=True, slots=True)
class Started:
    """Rank `rank` of `size` processes, the `local_rank`-th of `local_size` on this machine; alone by default."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def one_machine(self) -> bool:
        """All of them run on this one."""
        return self.local_size == self.size


def started(environment: Mapping[str, str] | None = None) -> Started:
    """What the environment, by default this process's own, says.

    Raises:
        MachineError: one of the variables isn't a number, or a rank isn't below its size.
    """
    given = os.environ if environment is None else environment
    if not all(name in given for name in NAMES):
        return Started()
    rank, size = _number(given, "RANK"), _number(given, "WORLD_SIZE", least=1)
    local_size = _number(given, "LOCAL_WORLD_SIZE", least=1, otherwise=size)
    local_rank = _number(given, "LOCAL_RANK", otherwise=rank % local_size)
    if rank >= size or local_rank >= local_size:
        told = f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}"
        raise MachineError(f"{told}: ranks count from 0", "let torchrun set them, or unset all of them")
    return Started(rank, size, local_rank, local_size)


def _number(given: Mapping[str, str], name: str, *, least: int = 0, otherwise: int = 0) -> int:
    word = given.get(name, str(otherwise))
    if not word.isascii() or not word.isdigit() or int(word) < least:
        raise MachineError(f"{name}={word!r} in the environment is no number from {least} on", f"unset {name}")
    return int(word)
