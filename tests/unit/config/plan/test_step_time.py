"""If these fail, proposals are ranked by times that no formula gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from example_models import CONFIGS, PARAMETERS, on

from quintet import hardware
from quintet.config.composed import ComposedConfig
from quintet.config.plan.costs import Cost
from quintet.config.plan.devices import device_of_machine, find_device, known_devices
from quintet.config.plan.memory import plan_memory
from quintet.config.plan.model_shapes import read_shape
from quintet.config.plan.models import find_models
from quintet.config.plan.placement import place_components
from quintet.config.plan.step_time import forward_flops, step_costs, step_seconds, total_seconds
from quintet.errors import ConfigError

P = PARAMETERS["Qwen2.5-7B"]
EMBEDDING = 152064 * 3584
CACHE = 2 * 28 * 4 * 128 * 2
"""Bytes of one token: keys and values of 28 layers with 4 heads of 128, in bfloat16."""
FLOPS = 2 * (P - EMBEDDING) + 2 * 28 * 28 * 128 * 536
"""Of a token in a sequence of 512 + 24: two per weight but those of the embedding, and attention."""
UNSHARED = ("training.groups_per_step=512", "training.samples_per_group=1", "algorithm.advantage.name=raw")
"""Prompts that no other episode has."""
TOKENS = 4 * 512 + 64 * 24
"""Of a mini-batch on one device."""
COMPUTE, LINK, NETWORK, MEMORY, HOST = 0.4 * 989e12, 0.7 * 450e9, 0.7 * 50e9, 0.7 * 3350e9, 0.7 * 64e9
"""What an H100 reaches."""


def seconds(composed: ComposedConfig) -> dict[str, float]:
    config, figures = composed.experiment, find_device("h100")
    placement, models = place_components(config), find_models(config)
    memory = plan_memory(config, placement, models)
    return dict(step_seconds(config, placement, models, memory, figures))


def sent(composed: ComposedConfig) -> dict[tuple[str, str], float]:
    """Bytes that a device sends in a step, by link and purpose."""
    config, figures = composed.experiment, find_device("h100")
    placement, models = place_components(config), find_models(config)
    costs = step_costs(config, placement, models, plan_memory(config, placement, models), figures)
    return dict(sum(costs.values(), Cost()).sent)


def test_a_token_costs_two_flops_a_weight_and_attention_to_what_precedes_it() -> None:
    assert forward_flops(read_shape(CONFIGS["Qwen2.5-7B"]), 536) == FLOPS
    tied = read_shape(CONFIGS["Qwen2.5-0.5B"])
    assert forward_flops(tied, 0) == 2 * PARAMETERS["Qwen2.5-0.5B"]


def test_only_the_experts_of_a_token_count() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of 3 × 2048 × 768 in each of 48 layers."""
    unused = 48 * 120 * 3 * 2048 * 768
    expected = 2 * (PARAMETERS["Qwen3-30B-A3B"] - 151936 * 2048 - unused)
    assert forward_flops(read_shape(CONFIGS["Qwen3-30B-A3B"]), 0) == expected


def test_an_update_is_a_forward_and_a_backward_pass_of_twice_the_work(tmp_path: Path) -> None:
    """512 episodes in 8 mini-batches: 4 prompts of 512 tokens and 64 responses of 24, in one pass."""
    forward = TOKENS * FLOPS / COMPUTE * (1 + 512 / TOKENS)
    plain = seconds(on(tmp_path, "Qwen2.5-7B", 1, 1))["update of actor"]
    assert plain == pytest.approx(8 * 3 * forward)
    again = seconds(on(tmp_path, "Qwen2.5-7B", 1, 1, "actor.gradient_checkpointing=true"))["update of actor"]
    assert again == pytest.approx(8 * 4 * forward)
    adapted = seconds(on(tmp_path, "Qwen2.5-7B", 1, 1, "policy.lora.rank=8"))["update of actor"]
    assert adapted == pytest.approx(8 * 2 * forward)


def test_a_step_of_fine_tuning_is_one_update_on_its_rows(tmp_path: Path) -> None:
    """16 rows of 96 tokens, forward and backward."""
    words = ("sft.batch=16", "sft.max_tokens=96", "data.train_files=[x.jsonl]")
    found = seconds(on(tmp_path, "Qwen2.5-7B", 1, 1, *words))
    tokens, flops = 16 * 96, 2 * (P - EMBEDDING) + 2 * 28 * 28 * 128 * 96
    assert found == {"update of actor": pytest.approx(3 * tokens * flops / COMPUTE * (1 + 512 / tokens))}


def test_small_micro_batches_are_slower(tmp_path: Path) -> None:
    small = seconds(on(tmp_path, "Qwen2.5-7B", 1, 1, "training.micro_batch_tokens=1024"))["update of actor"]
    assert small == pytest.approx(8 * 3 * TOKENS * FLOPS / COMPUTE * (1 + 512 / 1072))


def test_weights_that_are_gathered_between_nodes_take_longer_than_the_products(tmp_path: Path) -> None:
    """16 nodes of one device: 4 sequences each, 2 passes of 1072 tokens; each gathers 15/16 of the weights twice, and
    gradients in float32 are reduced once. Two nodes of 8 devices have eight network adapters each."""
    words = ("training.micro_batch_tokens=1072", *UNSHARED)
    gathers, gradients = 2 * 2 * 2 * P, 4 * P
    apart = seconds(on(tmp_path, "Qwen2.5-7B", 16, 1, *words))["update of actor"]
    assert apart == pytest.approx(8 * (gathers + gradients) * 15 / 16 / NETWORK)
    products = 4 * 536 * FLOPS * 3 / COMPUTE * (1 + 512 / 1072)
    together = seconds(on(tmp_path, "Qwen2.5-7B", 2, 8, *words))["update of actor"]
    assert together == pytest.approx(8 * (products + gradients * 15 / 16 / (8 * NETWORK)))
    grouped = seconds(on(tmp_path, "Qwen2.5-7B", 2, 8, *words, "actor.sharding.group_size=8"))["update of actor"]
    assert grouped == pytest.approx(8 * (products + gradients * 7 / 8 / LINK + 2 * gradients / 8 / 2 / NETWORK))


def test_the_bytes_of_each_link_are_those_that_its_time_comes_from(tmp_path: Path) -> None:
    """Two nodes of 8 devices, 8 updates of 2 passes: a device passes on 15/16 of the weights in a forward and in a
    backward pass, and of the gradients once; eight adapters share what leaves a node. Groups of 8 gather within a node,
    and two devices exchange an eighth of the gradients over the adapter of each."""
    words = ("training.micro_batch_tokens=1072", "rollout.engine=vllm")
    gathers, gradients, sync = 8 * 2 * 2 * 2 * P, 8 * 4 * P, 2 * P
    purposes = {"gather of weights": gathers, "reduction of gradients": gradients, "weight sync": sync}
    whole = {("link", purpose): count * 15 / 16 for purpose, count in purposes.items()}
    whole |= {("network", purpose): count / 8 for (_, purpose), count in whole.items()}
    assert sent(on(tmp_path, "Qwen2.5-7B", 2, 8, *words)) == pytest.approx(whole)
    grouped = {
        ("link", "gather of weights"): gathers * 7 / 8,
        ("link", "reduction of gradients"): gradients * 7 / 8,
        ("network", "reduction of gradients"): 2 * gradients / 8 / 2,
        ("link", "weight sync"): sync * 15 / 16,
        ("network", "weight sync"): sync * 15 / 16 / 8,
    }
    assert sent(on(tmp_path, "Qwen2.5-7B", 2, 8, *words, "actor.sharding.group_size=8")) == pytest.approx(grouped)


def test_devices_alone_in_their_nodes_send_everything_over_the_network(tmp_path: Path) -> None:
    """16 nodes of one device, and the moments of a sixteenth of the weights in host memory, for 8 updates."""
    words = ("training.micro_batch_tokens=1072", "actor.memory.offload_optimizer=true", "rollout.engine=vllm")
    apart = sent(on(tmp_path, "Qwen2.5-7B", 16, 1, *words))
    assert not any(link == "link" for link, _ in apart)
    assert apart["network", "reduction of gradients"] == pytest.approx(8 * 4 * P * 15 / 16)
    assert apart["host", "offload"] == pytest.approx(2 * 8 * 8 * P / 16)


def test_gradients_that_every_pass_reduces_are_sent_as_often(tmp_path: Path) -> None:
    """Two passes of 4 sequences on each of 8 devices."""
    words = ("training.micro_batch_tokens=2144", *UNSHARED)
    once = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, *words))["update of actor"]
    often = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, *words, "actor.sharding.sync_every_micro_batch=true"))
    assert often["update of actor"] - once == pytest.approx(8 * 4 * P * 7 / 8 / LINK)


def test_float32_is_as_slow_as_without_tensor_cores(tmp_path: Path) -> None:
    """67 TFLOP/s of an H100, not 989; torch does not use TF32 by default."""
    words = ("policy.dtype=float32",)
    found = seconds(on(tmp_path, "Qwen2.5-7B", 1, 1, *words))["update of actor"]
    assert found == pytest.approx(8 * 3 * TOKENS * FLOPS / (0.4 * 67e12) * (1 + 512 / TOKENS))


def test_tokens_are_sent_to_their_experts_and_back(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 8 experts a token, 48 layers, hidden states of 2048; each of 8 devices sends 7/8 of its
    2 × 512 + 8 × 24 tokens in a forward and in a backward pass, and gathers fewer weights."""
    whole, split = (
        seconds(on(tmp_path, "Qwen3-30B-A3B", 1, 8, f"actor.parallel.expert={size}"))["update of actor"]
        for size in (1, 8)
    )
    elsewhere = 48 * 112 * 3 * 2048 * 768
    tokens = 2 * 512 + 8 * 24
    exchange = 2 * 48 * 2 * tokens * 8 * 2048 * 2 * 7 / 8 / LINK
    flops = forward_flops(read_shape(CONFIGS["Qwen3-30B-A3B"]), 536)
    products = 3 * tokens * flops / COMPUTE * (1 + 512 / tokens)
    parameters = PARAMETERS["Qwen3-30B-A3B"]
    assert whole == pytest.approx(8 * (max(products, 4 * parameters * 7 / 8 / LINK) + 4 * parameters * 7 / 8 / LINK))
    left = parameters - elsewhere
    assert split == pytest.approx(8 * (max(products, 4 * left * 7 / 8 / LINK) + exchange + 4 * left * 7 / 8 / LINK))


def test_tensor_parallel_layers_exchange_hidden_states_and_pipelines_wait(tmp_path: Path) -> None:
    """Megatron, TP 2 × PP 2 on 4 devices: 64 sequences in 3 passes; twice in each pass of each of 14 layers all hidden
    states are reduced and gathered; both passes wait for a third of that time; no gradients are exchanged."""
    split = ("actor.parallel.tensor=2", "actor.parallel.pipeline=2")
    words = ("actor.backend=megatron", *split)
    found = seconds(on(tmp_path, "Qwen2.5-7B", 1, 4, *words))["update of actor"]
    exchanged = sent(on(tmp_path, "Qwen2.5-7B", 1, 4, *words))["link", "tensor parallelism"]
    tokens = TOKENS
    assert exchanged == pytest.approx(8 * 2 * 14 * 4 * tokens * 3584 * 2 / 2)
    products = tokens * FLOPS * 3 / 4 / COMPUTE * (1 + 2 * 512 / TOKENS)
    exchange = 2 * 14 * 4 * tokens * 3584 * 2 / 2 / LINK
    assert found == pytest.approx(8 * (products + exchange) * (1 + 1 / 3))


def test_decoding_reads_weights_and_cache_for_every_token(tmp_path: Path) -> None:
    """8 engines of 64 episodes; 24 steps, in which a sequence has 524 tokens on average."""
    found = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, "rollout.engine=vllm"))
    assert found["decode"] == pytest.approx(24 * (2 * P + 64 * 524 * CACHE) / MEMORY)
    halved = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, "rollout.engine=vllm", "rollout.max_concurrent=32"))
    assert halved["decode"] == pytest.approx(48 * (2 * P + 32 * 524 * CACHE) / MEMORY)


def test_few_requests_read_few_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B, one request at a time: 8 of 128 experts of 3 × 2048 × 768 in each of 48 layers."""
    words = ("rollout.engine=vllm", "rollout.max_concurrent=1")
    read = PARAMETERS["Qwen3-30B-A3B"] - 48 * 120 * 3 * 2048 * 768
    cache = 2 * 48 * 4 * 128 * 2
    decode = seconds(on(tmp_path, "Qwen3-30B-A3B", 1, 8, *words))["decode"]
    assert decode == pytest.approx(64 * 24 * (2 * read + 524 * cache) / MEMORY)


def test_an_engine_on_two_devices_reads_half_and_waits_for_the_other(tmp_path: Path) -> None:
    words = ("rollout.engine=vllm", "rollout.engine_options.tensor_parallel=2")
    found = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, *words))["decode"]
    exchange = 2 * 28 * (1e-5 + 2 * 128 * 3584 * 2 / 2 / LINK)
    assert found == pytest.approx(24 * ((2 * P + 128 * 524 * CACHE) / 2 / MEMORY + exchange))


def test_moments_go_to_the_host_and_back_for_every_update(tmp_path: Path) -> None:
    """8 bytes of each of an eighth of the weights, two ways, 8 updates; weights also for the weight sync."""
    words = ("rollout.engine=vllm", "actor.memory.offload_optimizer=true")
    found = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, *words))["offload of actor"]
    assert found == pytest.approx(2 * 8 * P / HOST)
    both = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, *words, "actor.memory.offload_parameters=true"))
    assert both["offload of actor"] == pytest.approx(2 * (8 * P + 9 * P / 2) / HOST, rel=1e-6)


def test_log_prob_workers_get_the_weights_and_compute_with_their_devices(tmp_path: Path) -> None:
    """Two of four devices: 256 sequences of up to 17 prompts each; 4 bytes of each weight are copied and sent."""
    words = ["rollout.recompute_logprobs=true", "placement.actor.devices=[0,1]", "placement.rollout.devices=[0,1]"]
    apart = seconds(on(tmp_path, "Qwen2.5-7B", 1, 4, *words, "placement.logprobs.devices=[2,3]"))
    beside = seconds(on(tmp_path, "Qwen2.5-7B", 1, 4, *words))
    assert apart["log-probs"] == beside["log-probs"] == pytest.approx((17 * 512 + 256 * 24 + 512) * FLOPS / COMPUTE)
    assert apart["weight sync of log-prob workers"] == pytest.approx(4 * P / MEMORY + 4 * P * 3 / 4 / LINK)
    assert "weight sync of log-prob workers" not in beside


def test_no_time_for_what_a_run_does_not_do(tmp_path: Path) -> None:
    assert set(seconds(on(tmp_path, "Qwen2.5-7B", 1, 8))) == {"update of actor", "prefill", "decode", "weight sync"}
    gae = seconds(on(tmp_path, "Qwen2.5-7B", 1, 8, "algorithm.advantage.name=gae", "algorithm.kl={coefficient: 0.1}"))
    assert {"values", "update of critic", "reference"} < set(gae)


def test_an_overlapped_rollout_takes_no_time_of_its_own(tmp_path: Path) -> None:
    phases = {"prefill": 1.0, "decode": 5.0, "update of actor": 4.0, "weight sync": 0.5}
    apart = ("placement.actor.devices=[0,1,2,3]", "placement.rollout.devices=[4,5,6,7]")
    synchronous = on(tmp_path, "Qwen2.5-7B", 1, 8, "rollout.engine=vllm", *apart).experiment
    assert total_seconds(synchronous, phases) == 10.5
    overlapped = on(tmp_path, "Qwen2.5-7B", 1, 8, "rollout.engine=vllm", *apart, "rollout.async_ratio=1").experiment
    assert total_seconds(overlapped, phases) == 6.5
    assert total_seconds(overlapped, {**phases, "update of actor": 8.0}) == 8.5


def test_a_device_is_recognised_by_all_parts_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {
        "NVIDIA A100-SXM4-40GB, 40960 MiB, 570.1": ("a100-40gb", 40),
        "NVIDIA A100-SXM4-80GB, 81920 MiB, 570.1": ("a100", 80),
        "NVIDIA A10, 24576 MiB, 570.1": ("a10", 24),
        "NVIDIA GeForce RTX 4090, 24576 MiB, 570.1": ("rtx-4090", 24),
        "Tesla T4, 16384 MiB, 570.1": (None, 16),
    }
    for line, (name, gib) in lines.items():
        monkeypatch.setattr(hardware, "nvidia_smi", lambda line=line: (line,))
        found = device_of_machine()
        assert found == (None if name is None else known_devices()[name], gib << 30)
    monkeypatch.setattr(hardware, "nvidia_smi", lambda: ())
    assert device_of_machine() is None


def test_figures_are_per_second_and_per_direction() -> None:
    found = find_device("H100")
    assert (found.flops, found.memory_bandwidth, found.link, found.host) == (989e12, 3350e9, 450e9, 64e9)
    assert found.memory == 80 * 2**30
    assert all(replace(device, name="").source for device in known_devices().values())


def test_an_unknown_device_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown device") as error:
        find_device("h1000")
    assert "did you mean h100?" in str(error.value)
