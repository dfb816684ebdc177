"""One of the four ranks of test_parallel_checkpoints.py: for each parallel layout in turn, restore the learner, make a
step and save it.

python checkpoint_ranks.py RANK NUM_RANKS RENDEZVOUS_FILE POLICY OUT CASE…, with the cases of `parallel_cases`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from loss_grid import objective, ragged_batch
from parallel_cases import CASES, EXPERTS, STAGES, Case, actor
from rank_processes import join_ranks, leave_group

from quintet.config.native.learners import ParallelConfig
from quintet.training.checkpoint.learner_state import restore_learner, snapshot_learner
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.learner import ActorLearner
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.process_group import RankGroup

EVERYTHING = ["model", "optimizer"]
ALL_CASES = {"four ranks": Case(), **CASES, **EXPERTS, **STAGES}


def step(learner: ActorLearner) -> None:
    learner.update(ragged_batch(), objective("reinforce"), "token-mean", 1e-3)


def main(directory: Path, ranks: RankGroup, out: Path, names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        case = ALL_CASES[name]
        mesh = LearnerMesh.build(ranks, ParallelConfig(**case.parallel), case.sharding.get("group_size"))
        learner = actor(directory, mesh, case)
        restore_learner(learner, out / f"{number - 1}", "actor", EVERYTHING)
        snapshot_learner(learner, "again", EVERYTHING, HostBuffers(), ranks).write(out / f"{number}")
        step(learner)
        snapshot_learner(learner, "actor", EVERYTHING, HostBuffers(), ranks).write(out / f"{number}")
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined, (policy, directory, *case_names) = join_ranks()
    main(Path(policy), joined, Path(directory), case_names)
    leave_group(joined)
