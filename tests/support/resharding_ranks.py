"""One of the four ranks of test_resharding.py: restores and saves a learner's weights and moments in one parallel
layout after the other.

python resharding_ranks.py RANK NUM_RANKS RENDEZVOUS_FILE OUT
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_ranks, leave_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quintet.training.checkpoint.learner_state import restore_learner, snapshot_learner
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ReplicatedStrategy

NUM_RANKS = 4
CHAIN = (
    ("plain", 1),
    ("fsdp2", 2),
    ("fsdp", 4),
    ("hybrid2", 4),
    ("fsdp", 2),
    ("plain", 1),
    ("fsdp2", 4),
    ("no_shard", 2),
    ("tensor", 2),
    ("plain", 2),
    ("fsdp", 1),
)
"""Layouts and their number of ranks: each one restores what the one before saved, makes a step, and is saved."""
SHORT = (CHAIN[0], CHAIN[1], CHAIN[2], CHAIN[5])
CHAINS = {"tied": CHAIN, "untied": SHORT}
"""Layouts of a model with tied embeddings and of one without."""


class Wrapped(nn.Module):
    """Policy in a module, as in a learner."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=50,
                hidden_size=16,
                intermediate_size=28,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                tie_word_embeddings=tied,
            )
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.policy(input_ids=tokens, labels=tokens, use_cache=False).loss


def parallelize(module: Wrapped, kind: str, meshes: dict[str, DeviceMesh]) -> nn.Module:
    """Shard the module over the ranks of a mesh."""
    if kind in ("fsdp2", "hybrid2", "tensor"):
        if kind == "tensor":
            split(module, meshes["one"])
        mesh = {"mesh": meshes["two" if kind == "hybrid2" else "one"]} if kind != "tensor" else {"mesh": meshes["self"]}
        for layer in module.policy.model.layers:
            fully_shard(layer, **mesh)
        return fully_shard(module, **mesh)
    if kind in ("fsdp", "no_shard"):
        return FullyShardedDataParallel(
            module,
            process_group=meshes["one"].get_group(),
            sharding_strategy=ShardingStrategy.NO_SHARD if kind == "no_shard" else ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    return module


def split(module: Wrapped, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in module.policy.model.layers:
        names = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, mesh, names)


def build_learner(kind: str, meshes: dict[str, DeviceMesh], *, tied: bool) -> Any:
    module = parallelize(Wrapped(tied=tied), kind, meshes)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, fused=kind != "fsdp")
    return SimpleNamespace(strategy=ReplicatedStrategy(module), optimizer=optimizer, on_device=nullcontext)


def step(learner: Any) -> None:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 50
    learner.strategy.module(tokens).backward()
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def run(out: Path, rank: int, meshes: dict[int, dict[str, DeviceMesh]], *, tied: bool) -> None:
    for number, (kind, size) in enumerate(CHAINS[out.name]):
        directory = out / f"{number}"
        if rank < size:
            mesh = meshes[size]
            group = mesh["one"].get_group() if size > 1 else None
            learner, ranks = build_learner(kind, mesh, tied=tied), RankGroup(rank, size, group)
            if number:
                before = out / f"{number - 1}"
                restore_learner(learner, before, "actor", ["model", "optimizer"])
                snapshot_learner(learner, "again", ["model", "optimizer"], HostBuffers(), ranks).write(directory)
            step(learner)
            snapshot_learner(learner, "actor", ["model", "optimizer"], HostBuffers(), ranks).write(directory)
        dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    ranks, (out,) = join_ranks()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "pair"))
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("four",))
    singles = init_device_mesh("cpu", (4, 1), mesh_dim_names=("rest", "alone"))
    meshes = {
        1: {"one": singles["alone"], "self": singles["alone"]},
        2: {"one": pairs["pair"], "self": singles["alone"]},
        4: {"one": four, "two": pairs},
    }
    for name in CHAINS:
        run(Path(out) / name, ranks.rank, meshes, tied=name == "tied")
    leave_group(ranks)


if __name__ == "__main__":
    main()
