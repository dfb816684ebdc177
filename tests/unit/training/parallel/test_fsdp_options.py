"""If these fail, a learner is sharded otherwise than configured: slower, larger, or in another type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from quintet.config.native.learners import MemoryConfig, ShardingConfig
from quintet.training.parallel import fsdp
from quintet.training.parallel.fsdp import Fsdp2Strategy, MixedPrecisionDtypes, _fsdp_options
from quintet.training.parallel.parallelize import ModuleParallelism

MESH: Any = SimpleNamespace(
    size=lambda _: 1, fsdp_mesh=SimpleNamespace(get_group=lambda: None), replicas=SimpleNamespace(size=1)
)
FLOAT32 = MixedPrecisionDtypes(torch.float32, torch.float32, torch.float32)


def module() -> nn.Sequential:
    """Three layers of 6, 20 and 6 weights."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4), nn.Linear(2, 2))


def options(sharding: dict[str, Any], memory: dict[str, Any] | None = None) -> dict[str, Any]:
    config, memory_config = ShardingConfig(**sharding), MemoryConfig(**memory or {})
    return _fsdp_options(module(), MESH, config, memory_config, FLOAT32)


@pytest.mark.parametrize(
    ("name", "value", "option", "expected"),
    [
        ("policy", "shard_grad_op", "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
        ("backward_prefetch", "pre", "backward_prefetch", BackwardPrefetch.BACKWARD_PRE),
        ("backward_prefetch", "post", "backward_prefetch", BackwardPrefetch.BACKWARD_POST),
        ("forward_prefetch", True, "forward_prefetch", True),
        ("limit_all_gathers", True, "limit_all_gathers", True),
        ("keep_original_parameters", True, "use_orig_params", True),
    ],
)
def test_an_option_reaches_fsdp(name: str, value: object, option: str, expected: object) -> None:
    assert options({name: value})[option] == expected
    assert options({})[option] != expected


def test_types_of_the_configuration_reach_both_releases() -> None:
    config = ShardingConfig(parameter_dtype="bfloat16", reduce_dtype=None, buffer_dtype="bfloat16")
    types = MixedPrecisionDtypes.from_config(config, torch.float32)
    assert types == MixedPrecisionDtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def test_modules_of_the_configured_size_are_units_of_fsdp() -> None:
    layers = module()
    config = ShardingConfig(min_parameters=10)
    policy = _fsdp_options(layers, MESH, config, MemoryConfig(), FLOAT32)["auto_wrap_policy"]
    wrapped = [policy(module=layer, recurse=False, nonwrapped_numel=0) for layer in layers]
    assert wrapped == [False, True, False]


class Unit(nn.Linear):
    """A unit that records what it prefetches and whether it reduces gradients."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda value: self.calls.update({name: value})
        return super().__getattr__(name)


def sharded(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any] | None = None, **sharding: Any
) -> tuple[Any, list[Unit], list[dict[str, Any]]]:
    """The strategy of FSDP2 for two units, the units, and the arguments of `fully_shard` for them and the whole."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(fsdp, "fully_shard", lambda part, **arguments: calls.append(arguments))
    units = [Unit(), Unit()]
    whole: Any = nn.Sequential(*units)
    monkeypatch.setattr(fsdp, "fsdp_units", lambda *_: units)
    config = ShardingConfig(**sharding)
    types = MixedPrecisionDtypes.from_config(config, torch.float32)
    strategy = Fsdp2Strategy(whole, MESH, config, MemoryConfig(**memory or {}), types, ModuleParallelism())
    return strategy, units, calls


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [True, True, None]),
        ({"reshard_after_forward": False}, [False] * 3),
        ({"policy": "shard_grad_op"}, [False] * 3),
    ],
)
def test_weights_are_sharded_again_after_a_forward_pass_as_configured(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], expected: list[bool | None]
) -> None:
    _, _, calls = sharded(monkeypatch, **config)
    assert [call["reshard_after_forward"] for call in calls] == expected


def test_units_prefetch_each_other_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first, second), _ = sharded(monkeypatch, forward_prefetch=True, backward_prefetch="pre")
    assert first.calls == {"set_modules_to_forward_prefetch": [second]}
    assert second.calls == {"set_modules_to_backward_prefetch": [first]}
    _, units, _ = sharded(monkeypatch)
    assert [unit.calls for unit in units] == [{}, {}]


def test_shards_are_held_in_host_memory_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    policies = [
        sharded(monkeypatch, memory)[2][0]["offload_policy"]
        for memory in ({}, {"sharded_offload": True}, {"sharded_offload": True, "pin": True})
    ]
    assert [getattr(policy, "pin_memory", None) for policy in policies] == [None, False, True]


@pytest.mark.parametrize("every", [False, True])
def test_gradients_are_reduced_in_the_configured_passes(monkeypatch: pytest.MonkeyPatch, *, every: bool) -> None:
    strategy, _, _ = sharded(monkeypatch, sync_every_micro_batch=every)
    calls: list[bool] = []
    strategy.module = SimpleNamespace(set_is_last_backward=bool, set_requires_gradient_sync=calls.append)
    for last in (False, True):
        strategy.accumulate_gradients(last=last)
    assert calls == [every, True]
