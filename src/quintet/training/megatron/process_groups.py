"""Megatron's process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from quintet.config.checks.megatron import has_transformer_engine
from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError
from quintet.training.megatron.core_package import emulate_cuda
from quintet.training.parallel.process_group import RankGroup


@dataclass(frozen=True, slots=True)
class MegatronRanks:
    """This process's position among the ranks of a learner."""

    world: RankGroup
    """All ranks."""
    data: RankGroup
    """Data-parallel ranks, with the same weights and different sequences."""
    reports_results: bool
    """Whether this rank reports results: exactly one of the ranks that process the same sequences does."""


def initialize_process_groups(parallel: ParallelConfig, options: MegatronConfig, seed: int = 0) -> MegatronRanks:
    """Initialise Megatron's process groups over all ranks, and `torch.distributed` if necessary. All learners of a
    process have the same groups.

    Raises:
        ConfigError: the ranks cannot be divided this way, or another learner has other parallel sizes.
    """
    _initialize_torch_distributed(options)
    size = dist.get_world_size()
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    shared = parallel.tensor * parallel.context
    if size % model_ranks or (size // model_ranks * shared) % parallel.expert:
        raise ConfigError(
            f"{size} processes cannot be divided into tensor {parallel.tensor} × pipeline {parallel.pipeline} × "
            f"context {parallel.context} × expert {parallel.expert}",
            key="actor.parallel",
            hint=f"start a multiple of {model_ranks * parallel.expert // gcd(parallel.expert, shared)} processes",
        )
    if parallel_state.model_parallel_is_initialized():
        _check_same_sizes(parallel)
    else:
        _initialize_model_parallel(parallel, options, seed)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    data = RankGroup(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    return MegatronRanks(RankGroup(dist.get_rank(), size), data, reports_results=last and first)


def _initialize_torch_distributed(options: MegatronConfig) -> None:
    if dist.is_initialized():
        return
    backend = options.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    wait = timedelta(minutes=options.distributed_timeout_minutes)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=wait)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=wait)


def _initialize_model_parallel(parallel: ParallelConfig, options: MegatronConfig, seed: int) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1 if parallel.expert > 1 else None,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # only Megatron's own checkpoints need them
    )
    with torch.random.fork_rng(devices=[]), emulate_cuda():
        model_parallel_cuda_manual_seed(seed)


def initialize_tp_comm_overlap(options: MegatronConfig, parallel: ParallelConfig, hidden_size: int) -> None:
    """Create Transformer Engine's buffers for tensor-parallel communication that overlaps with computation, as the
    YAML file `tp_comm_overlap_cfg` says; Megatron-LM does so before it builds a model.

    Raises:
        ConfigError: the file, a fixed sequence length or Transformer Engine is missing.
    """
    path = options.tp_comm_overlap_cfg
    if path is None:
        return
    key = "actor.megatron.tp_comm_overlap_cfg"
    if not has_transformer_engine():
        raise ConfigError(
            f"{key} = {path}: transformer_engine is not installed", key=key, value=path, hint=f"remove {key}"
        )
    if not Path(path).is_file():
        raise ConfigError(f"{key} = {path}: there is no such file", key=key, value=path)
    if options.variable_seq_lengths or options.seq_length is None:
        hint = "set actor.megatron.variable_seq_lengths=false and actor.megatron.seq_length"
        raise ConfigError(f"{key} = {path} requires a fixed sequence length", key=key, value=path, hint=hint)
    import transformer_engine.pytorch as te

    te.module.base.initialize_ub(
        shape=[options.seq_length // parallel.context, hidden_size],
        tp_size=parallel.tensor,
        use_fp8=False,
        ub_cfgs=yaml.safe_load(Path(path).read_text()),
        bootstrap_backend=options.tp_comm_bootstrap_backend or "nccl",
    )


def _check_same_sizes(parallel: ParallelConfig) -> None:
    """Raise if the existing groups have other parallel sizes."""
    existing = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    configured = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    if existing != configured:
        raise ConfigError(
            f"all Megatron learners of a process need the same parallel sizes (tensor, pipeline, context, expert): "
            f"another learner has {existing}, this one {configured}",
            key="actor.parallel",
            hint="set critic.parallel and reference.parallel to the sizes in actor.parallel",
        )
