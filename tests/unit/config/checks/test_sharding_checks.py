"""If these fail, what can't be laid out on several devices is told after episodes were solved, or by no key."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quintet import hardware
from quintet.cli import main as command
from quintet.cli.configuration import load_config
from quintet.config.checks.sharding import sharding_problems
from quintet.config.compose import load_experiment
from quintet.errors import ConfigError

FULL = "algorithm.kl={estimator: full, coefficient: 0.1}"


def told(*words: str, devices: int = 2) -> dict[str, str]:
    composed = load_experiment(None, [f"placement.devices_per_node={devices}", *words])
    return {fault.key: str(fault) for fault in sharding_problems(composed)}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


SHARDING, PARALLEL = "actor.sharding", "actor.parallel"
FLEX = "actor.megatron={moe_token_dispatcher_type: flex}"


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ([f"{SHARDING}.backward_prefetch=post"], f"{SHARDING}.backward_prefetch", "FSDP2 prefetches weights before"),
        (
            [f"{SHARDING}.policy=no_shard", f"{PARALLEL}.tensor=2"],
            f"{SHARDING}.policy",
            f"layers that are split ({PARALLEL}.tensor = 2 (command line)) are always sharded",
        ),
        ([f"{SHARDING}.policy=no_shard", f"{PARALLEL}.pipeline=2"], f"{SHARDING}.policy", f"({PARALLEL}.pipeline = 2"),
        ([f"{SHARDING}.policy=no_shard", f"{PARALLEL}.expert=2"], f"{SHARDING}.policy", f"({PARALLEL}.expert = 2"),
        ([f"{PARALLEL}.pipeline=2", f"{PARALLEL}.sequence=true"], f"{PARALLEL}.sequence", "stages send unsplit hidden"),
        ([f"{PARALLEL}.pipeline=2", "policy.lora={}"], f"{PARALLEL}.pipeline", "LoRA adapters are not split into"),
        ([f"{PARALLEL}.expert=2", FLEX], "actor.megatron.moe_token_dispatcher_type", "only Megatron supports it"),
        (
            [f"{PARALLEL}.context=2", "policy.attention=eager"],
            "policy.attention",
            f"context parallelism ({PARALLEL}.context = 2 (command line)) needs fused attention",
        ),
        (
            [FULL, f"{PARALLEL}.tensor=2"],
            "reference.parallel.tensor",
            f"= 1 (default): {PARALLEL}.tensor = 2 (command line), and a full KL divergence",
        ),
    ],
)
def test_what_fsdp_cant_lay_out_is_told_by_its_key(words: list[str], key: str, reason: str) -> None:
    found = told(*words)
    assert list(found) == [key]
    assert found[key].startswith(f"{key} = ")
    assert reason in found[key]


def test_one_device_shares_nothing_out() -> None:
    assert not told("actor.sharding.backward_prefetch=post", devices=1)


def test_what_others_can_do_is_left_to_them() -> None:
    assert not told("actor.backend=fsdp", "actor.sharding.backward_prefetch=post")
    assert not told("actor.sharding.policy=no_shard", "actor.parallel.ulysses=2")
    assert not told("actor.backend=megatron", "actor.parallel.pipeline=2", "actor.parallel.sequence=true")
    # without its adapters the policy is the reference, laid out as it is
    assert not told(FULL, "policy.lora={}", "actor.parallel.tensor=2")


def test_shards_in_main_memory_need_shards_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, whole = "actor.memory.sharded_offload=true", "actor.sharding.policy=no_shard"
    assert not told(offload, devices=1)  # weights are there as it is
    monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
    assert "one process has no shards" in told(offload, devices=1)["actor.memory.sharded_offload"]
    assert "with actor.sharding.policy=no_shard" in told(offload, whole)["actor.memory.sharded_offload"]
    assert not told(offload)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not told(offload, devices=1)


@pytest.mark.parametrize(
    ("backend", "devices", "refused"), [("fsdp", 8, True), ("fsdp", 0, False), ("fsdp2", 8, False)]
)
def test_fsdp_isnt_asked_for_sums_of_which_it_keeps_the_last(
    monkeypatch: pytest.MonkeyPatch, backend: str, devices: int, refused: bool
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: devices)
    asked = ["actor.memory.sharded_offload=true", "actor.sharding.sync_every_micro_batch=true"]
    found = told(f"actor.backend={backend}", *asked)
    assert list(found) == ["actor.sharding.sync_every_micro_batch"] * refused
    assert all("only uses the gradient of the last micro-batch" in message for message in found.values())


def test_a_stage_of_fine_tuning_is_laid_out_as_the_actor_is() -> None:
    words = ["sft.devices=2", "sft.episodes={}", "actor.sharding.backward_prefetch=post"]
    composed = load_experiment(None, words)
    assert [fault.key for fault in sharding_problems(composed)] == ["actor.sharding.backward_prefetch"]


def test_plan_and_start_say_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("placement: {devices_per_node: 2}\nactor:\n  sharding:\n    backward_prefetch: post\n")
    monkeypatch.setattr(sys, "argv", ["quintet", "plan", str(file), "--json"])
    with pytest.raises(SystemExit):
        command.main()
    (planned,) = json.loads(capsys.readouterr().out)["not_yet"]
    assert planned["source"] == f"{file}:4"
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError) as refused:
        load_config(str(file), [], None, "refuse")
    assert planned["message"] in str(refused.value)
    assert refused.value.source == f"{file}:4"
