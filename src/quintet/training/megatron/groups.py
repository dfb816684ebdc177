"""The process groups of Megatron: who shares a layer, a stage, a batch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from quintet.config.megatron import has_transformer_engine
from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError
from quintet.training.megatron.package import at_home
from quintet.training.ranks import Ranks

__all__ = ["Place", "open_groups", "overlap_communication"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among those of one learner."""

    world: Ranks
    """All of them."""
    data: Ranks
    """Those that have the same part of the weights and other sequences."""
    speaks: bool
    """Of the processes that have the same sequences, the one whose results count."""


def open_groups(parallel: ParallelConfig, options: MegatronConfig, seed: int = 0) -> Place:
    """Form Megatron's groups over all processes; without `torch.distributed`, meets the others as `torchrun` says or
    stays alone. All learners of a process have the same groups.

    Raises:
        ConfigError: the processes can't be divided so, or another learner has divided them otherwise.
    """
    _meet(options)
    size = dist.get_world_size()
    model = parallel.tensor * parallel.pipeline * parallel.context
    if size % model or (size // model * parallel.tensor * parallel.context) % parallel.expert:
        raise ConfigError(
            f"{size} processes can't be divided into tensor {parallel.tensor} × pipeline {parallel.pipeline} × "
            f"context {parallel.context} × expert {parallel.expert}",
            key="actor.parallel",
            hint=f"start a multiple of {model} processes",
        )
    if parallel_state.model_parallel_is_initialized():
        _same(parallel)
    else:
        _divide(parallel, options, seed)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    data = Ranks(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    return Place(Ranks(dist.get_rank(), size), data, speaks=last and first)


def _meet(options: MegatronConfig) -> None:
    if dist.is_initialized():
        return
    backend = options.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    wait = timedelta(minutes=options.distributed_timeout_minutes)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=wait)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=wait)


def _divide(parallel: ParallelConfig, options: MegatronConfig, seed: int) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1 if parallel.expert > 1 else None,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # Megatron's own checkpoints would want them
    )
    with torch.random.fork_rng(devices=[]), at_home():
        model_parallel_cuda_manual_seed(seed)


def overlap_communication(options: MegatronConfig, parallel: ParallelConfig, hidden: int) -> None:
    """Have Transformer Engine make the buffers through which tensor-parallel ranks talk while they compute, as the YAML
    file `tp_comm_overlap_cfg` says; Megatron-LM does so before it builds a model.

    Raises:
        ConfigError: the file or a length that holds for all passes is missing, or Transformer Engine is.
    """
    path = options.tp_comm_overlap_cfg
    if path is None:
        return
    key = "actor.megatron.tp_comm_overlap_cfg"
    if not has_transformer_engine():
        raise ConfigError(f"{key}: transformer_engine isn't installed", key=key, value=path, hint="leave it out")
    if not Path(path).is_file():
        raise ConfigError(f"{key}: no file {path}", key=key, value=path)
    if options.variable_seq_lengths or options.seq_length is None:
        hint = "set actor.megatron.variable_seq_lengths=false and actor.megatron.seq_length"
        raise ConfigError(f"{key}: buffers are made for passes of one length", key=key, value=path, hint=hint)
    import transformer_engine.pytorch as te

    te.module.base.initialize_ub(
        shape=[options.seq_length // parallel.context, hidden],
        tp_size=parallel.tensor,
        use_fp8=False,
        ub_cfgs=yaml.safe_load(Path(path).read_text()),
        bootstrap_backend=options.tp_comm_bootstrap_backend or "nccl",
    )


def _same(parallel: ParallelConfig) -> None:
    """Raises where the groups that are there are other ones."""
    there = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    asked = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    if there != asked:
        raise ConfigError(
            f"a process's Megatron learners are all divided alike: {there} is there, {asked} is asked for (tensor, "
            "pipeline, context, expert)",
            key="actor.parallel",
            hint="give critic and reference the actor's own degrees",
        )
