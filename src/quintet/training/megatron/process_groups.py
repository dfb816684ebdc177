"""Megatron's process groups.

Megatron Core keeps one set of groups, in variables of its module `parallel_state`. Learners of different parallel sizes
need different groups of the same ranks: every set is stored here, and put into these variables while a model of those
sizes is built, run, read or updated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from inspect import isroutine
from math import gcd
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

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

P = ParamSpec("P")
T = TypeVar("T")
GroupState = Mapping[str, Any]
"""Values of the variables of `parallel_state`: groups, sizes and ranks."""
_states: dict[tuple[dist.ProcessGroup | None, tuple[int, ...]], GroupState] = {}
"""The groups created so far, by the process group of all ranks and the parallel sizes."""


@dataclass(frozen=True, slots=True)
class MegatronRanks:
    """This process's position among the ranks of a learner."""

    world: RankGroup
    """All ranks."""
    data: RankGroup
    """Data-parallel ranks, with the same weights and different sequences."""
    reports_results: bool
    """Whether this rank reports results: exactly one of the ranks that process the same sequences does."""
    groups: GroupState
    """Megatron's process groups."""

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which Megatron's global parallel state is these process groups."""
        return _active(self.groups)

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """Yield items that are computed with these groups; the groups are not active between two items."""
        end = object()
        while True:
            with self.active():
                item = next(items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]


class HasRanks(Protocol):
    """A model or learner on Megatron."""

    @property
    def ranks(self) -> MegatronRanks:
        """Its ranks and their groups."""


S = TypeVar("S", bound=HasRanks)


def with_process_groups(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method of a model or learner to run while the process groups of its `ranks` are active."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.ranks.active():
            return method(self, *args, **kwargs)

    return run


def initialize_process_groups(
    parallel: ParallelConfig, options: MegatronConfig, seed: int = 0, *, learner: str = "actor"
) -> MegatronRanks:
    """Create Megatron's process groups over all ranks, and initialise `torch.distributed` if necessary. All ranks call
    it for the same learners in the same order; learners with the same parallel sizes share the groups.

    Raises:
        ConfigError: the ranks cannot be divided as the section `learner` asks.
    """
    _initialize_torch_distributed(options)
    size = dist.get_world_size()
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    shared = parallel.tensor * parallel.context
    if size % model_ranks or (size // model_ranks * shared) % parallel.expert:
        raise ConfigError(
            f"{size} processes cannot be divided into tensor {parallel.tensor} × pipeline {parallel.pipeline} × "
            f"context {parallel.context} × expert {parallel.expert}",
            key=f"{learner}.parallel",
            hint=f"start a multiple of {model_ranks * parallel.expert // gcd(parallel.expert, shared)} processes",
        )
    world = dist.group.WORLD
    for outdated in [key for key in _states if key[0] is not world]:
        del _states[outdated]
    key = world, (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context, parallel.expert)
    if key not in _states:
        _states[key] = _create_groups(parallel, options, seed)
    return _ranks(_states[key])


def _ranks(groups: GroupState) -> MegatronRanks:
    with _active(groups):
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        data = RankGroup(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    world = RankGroup(dist.get_rank(), dist.get_world_size())
    return MegatronRanks(world, data, reports_results=last and first, groups=groups)


@contextmanager
def _active(groups: GroupState) -> Iterator[None]:
    before = _group_state()
    vars(parallel_state).update(groups)
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def _group_state() -> GroupState:
    """Return the variables of Megatron's module that its functions set."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not isroutine(value)
    }


def _create_groups(parallel: ParallelConfig, options: MegatronConfig, seed: int) -> GroupState:
    """Create groups without touching those of other sizes."""
    before = _group_state()
    parallel_state.destroy_model_parallel()  # resets the variables; it destroys only groups that are never created here
    try:
        _initialize_model_parallel(parallel, options, seed)
        return _group_state()
    finally:
        vars(parallel_state).update(before)


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
        ub_cfgs=yaml.safe_load(Path(path).read_text(encoding="utf-8")),
        bootstrap_backend=options.tp_comm_bootstrap_backend or "nccl",
    )
