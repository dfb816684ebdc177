"""What each of four processes does for test_stored_apart.py: a learner goes from files to one arrangement, makes a
step, goes back to files, and so on.

python stored_ranks.py POLICY RANK SIZE MEETING PLACE NAME…, of cases of `spread_cases`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loss_grid import objective, ragged_batch
from spread_cases import CASES, EXPERTS, STAGES, Case, actor

from quintet.config.native.learners import ParallelConfig
from quintet.training.learner import ActorLearner
from quintet.training.learner_files import copy_learner, restore_learner
from quintet.training.mesh import Mesh
from quintet.training.ranks import Ranks
from quintet.training.snapshot import HostMemory

EVERYTHING = ["model", "optimizer"]
EVEN = {"four ranks": Case(), **CASES, **EXPERTS, **STAGES}


def step(learner: ActorLearner) -> None:
    learner.update(ragged_batch(), objective("reinforce"), "token-mean", 1e-3)


def main(directory: Path, ranks: Ranks, place: Path, names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        case = EVEN[name]
        mesh = Mesh.over(ranks, ParallelConfig(**case.parallel), case.sharding.get("group_size"))
        learner = actor(directory, mesh, case)
        restore_learner(learner, place / f"{number - 1}", "actor", EVERYTHING)
        copy_learner(learner, "again", EVERYTHING, HostMemory(), ranks).write(place / f"{number}")
        step(learner)
        copy_learner(learner, "actor", EVERYTHING, HostMemory(), ranks).write(place / f"{number}")
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined = Ranks.join(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), timeout_seconds=120.0)
    main(Path(sys.argv[1]), joined, Path(sys.argv[5]), sys.argv[6:])
    joined.leave()
