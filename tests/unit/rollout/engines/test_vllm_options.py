"""If these fail, vLLM starts with other options than configured, or accepts incomplete weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.config.native.rollout import EngineConfig
from quintet.errors import ConfigError
from quintet.policies.model_loading import load_model
from quintet.records import Request
from quintet.rollout.engines.engine import ENGINES, EngineError, EngineSetup
from quintet.rollout.engines.stop_strings import StopStringMatcher
from quintet.rollout.engines.vllm import engine as vllm
from quintet.rollout.engines.vllm.llm_engine import gpu_variables
from quintet.rollout.engines.vllm.options import Release, engine_arguments, environment
from quintet.rollout.engines.vllm.weight_sync import WeightPlan

# fmt: off
NAMES = frozenset({
    "model", "dtype", "seed", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "max_num_batched_tokens",
    "enable_chunked_prefill", "block_size", "attention_backend", "load_format", "mm_processor_cache_gb",
    "compilation_config", "enforce_eager", "hf_overrides", "max_cudagraph_capture_size", "kv_cache_memory_bytes",
    "enable_sleep_mode", "async_scheduling", "enable_prefix_caching", "skip_tokenizer_init",
    "distributed_executor_backend", "tensor_parallel_size",
})
# fmt: on
GPU = Release("0.32.0", NAMES, cpu=False)
CPU = Release("0.32.0", NAMES, cpu=True)
OLD = Release("0.6.0", NAMES - {"mm_processor_cache_gb"} | {"swap_space", "disable_mm_preprocessor_cache"}, cpu=False)


def setup(directory: Path, **options: Any) -> EngineSetup:
    return EngineSetup(
        directory, load_model(directory), torch.float32, 8, 256, detokenize=str, options=EngineConfig(**options), seed=5
    )


@pytest.mark.parametrize(
    ("option", "value", "theirs"),
    [
        ("memory_share", 0.4, {"gpu_memory_utilization": 0.4}),
        ("max_batched_tokens", 4096, {"max_num_batched_tokens": 4096}),
        ("chunked_prefill", False, {"enable_chunked_prefill": False}),
        ("block_size", 32, {"block_size": 32}),
        ("attention_backend", "FLASHINFER", {"attention_backend": "FLASHINFER"}),
        ("image_cache", False, {"mm_processor_cache_gb": 0}),
        ("eager", False, {"enforce_eager": False}),
        ("cuda_graph_max_batch", 64, {"max_cudagraph_capture_size": 64}),
        ("torch_compile", True, {"compilation_config": {"mode": 3, "cudagraph_mode": "NONE"}, "enforce_eager": False}),
        ("load_format", "dummy_dtensor", {"load_format": "dummy"}),
        ("load_format", "hf", {"load_format": "auto"}),
        ("load_format", "safetensors", {"load_format": "safetensors"}),
        ("max_model_tokens", 128, {"max_model_len": 128}),
        ("tensor_parallel", 2, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
        ("executor", "ray", {"distributed_executor_backend": "ray"}),
        ("log_statistics", True, {"disable_log_stats": False}),
        ("detokenize", True, {"skip_tokenizer_init": False}),
        ("sleep_between_steps", True, {"enable_sleep_mode": True}),
        ("arguments", {"kv_cache_memory_bytes": 1}, {"kv_cache_memory_bytes": 1}),
        ("pipeline_parallel", 2, {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}),
    ],
)
def test_an_option_reaches_vllm(policy_directory: Path, option: str, value: object, theirs: dict[str, object]) -> None:
    passed = engine_arguments(setup(policy_directory, **{option: value}), GPU)
    assert {name: passed[name] for name in theirs} == theirs
    before = engine_arguments(setup(policy_directory), GPU)
    assert any(before.get(name) != passed[name] for name in theirs)


def test_steps_overlap_only_in_a_separate_process(policy_directory: Path) -> None:
    """In this process, they would hide which weights sampled a token."""
    passed = [engine_arguments(setup(policy_directory, separate_process=separate), GPU) for separate in (False, True)]
    assert [arguments.get("async_scheduling") for arguments in passed] == [False, None]


def test_default_options_are_left_to_vllm(policy_directory: Path) -> None:
    passed = engine_arguments(setup(policy_directory), GPU)
    left = {"gpu_memory_utilization", "block_size", "max_num_batched_tokens", "enable_sleep_mode", "swap_space"}
    assert not left & passed.keys()
    assert (passed["max_num_seqs"], passed["max_model_len"], passed["dtype"]) == (8, 256, "float32")


def test_older_names_are_known(policy_directory: Path) -> None:
    passed = engine_arguments(setup(policy_directory, swap_space_gib=4, image_cache=False), OLD)
    assert (passed["swap_space"], passed["disable_mm_preprocessor_cache"]) == (4, True)


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"swap_space_gib": 4}, "rollout.engine_options.swap_space_gib", "vLLM 0.32.0 has no swap_space"),
        ({"log_every_steps": 4}, "rollout.engine_options.log_every_steps", "no such option"),
        ({"arguments": {"blok_size": 4}}, "rollout.engine_options.arguments.blok_size", "did you mean 'block_size'"),
        ({"arguments": {"max_num_seqs": 4}}, "rollout.engine_options.arguments.max_num_seqs", "max_concurrent"),
        ({"arguments": {"logprobs_mode": "raw"}}, "rollout.engine_options.arguments.logprobs_mode", "exact"),
    ],
)
def test_unsupported_options_are_config_errors(
    policy_directory: Path, options: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_arguments(setup(policy_directory, **options), GPU)
    assert caught.value.key == key
    assert message in str(caught.value)


def test_the_kv_cache_on_a_cpu_fits_the_requests(policy_directory: Path) -> None:
    """Two layers, two heads of 8 numbers, keys and values of 4 bytes; (8 x 1.25 + 2) requests of 2 blocks of 128."""
    passed = engine_arguments(setup(policy_directory), CPU)
    assert passed["kv_cache_memory_bytes"] == 12 * 2 * 128 * (2 * 2 * 2 * 8 * 4)


def test_a_changed_model_configuration_reaches_vllm(policy_directory: Path) -> None:
    expected = setup(policy_directory)
    assert "hf_overrides" not in engine_arguments(expected, GPU)
    expected.model.config.rms_norm_eps = 0.5
    assert engine_arguments(expected, GPU)["hf_overrides"] == {"rms_norm_eps": 0.5}


def test_vllm_logs_are_quiet_by_default() -> None:
    assert environment(EngineConfig())["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert environment(EngineConfig(log_statistics=True))["VLLM_LOGGING_LEVEL"] == "INFO"


def test_a_missing_vllm_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.hardware.is_installed", lambda _: False)
    with pytest.raises(ConfigError, match="'vllm' requires vllm"):
        ENGINES.get("vllm").load()


def test_tied_weights_are_sent_under_both_names(policy_directory: Path) -> None:
    model = load_model(policy_directory)
    plan = WeightPlan.from_model(model)
    assert plan.aliases == (("lm_head.weight", "model.embed_tokens.weight"),)
    sent = dict(plan.with_aliases(plan.collect(model.named_parameters())))
    assert sent["lm_head.weight"] is sent["model.embed_tokens.weight"]
    assert sent.keys() == set(json.loads(json.dumps([n for n, _ in model.named_parameters(remove_duplicate=False)])))


def test_incomplete_weights_are_rejected(policy_directory: Path) -> None:
    model = load_model(policy_directory)
    plan, weights = WeightPlan.from_model(model), dict(model.named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(EngineError, match=f"lacks '{name}'"):
        plan.collect((n, w) for n, w in weights.items() if n != name)
    with pytest.raises(EngineError, match=r"no weight 'model\.extra'"):
        plan.collect({**weights, "model.extra": weights[name]}.items())
    with pytest.raises(EngineError, match=r"has shape \[32, 64\], the engine expects \[64, 32\]"):
        plan.collect({**weights, name: weights[name].T}.items())


def test_lora_adapters_are_merged() -> None:
    names = ("q.base_layer.weight", "q.lora_A.default.weight", "q.lora_B.default.weight", "norm.weight")
    parameters = [(name, torch.nn.Parameter(torch.zeros(2, 3))) for name in names]
    model: Any = SimpleNamespace(named_parameters=lambda remove_duplicate=True: iter(parameters))
    assert WeightPlan.from_model(model).shapes == {"q.weight": (2, 3), "norm.weight": (2, 3)}


class DeadLlmEngine:
    """A vLLM that accepts everything and dies at its first step."""

    max_model_len = 64

    def __init__(self, setup: EngineSetup) -> None:
        self.closed = False

    def seed_arguments(self, seed: int) -> dict[str, Any]:
        return {"seed": seed}

    def add_request(self, *arguments: object) -> None: ...

    def step(self) -> list[Any]:
        raise RuntimeError("Unsupported head_dim=8")

    def describe_error(self, error: Exception) -> str:
        return str(error)

    def close(self) -> None:
        self.closed = True


def test_an_unsupported_model_fails_at_start(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "LlmEngine", DeadLlmEngine)
    with pytest.raises(ConfigError, match=r"does not support Qwen2ForCausalLM.*head_dim=8") as caught:
        vllm.build_vllm_engine(setup(policy_directory))
    assert caught.value.key == "rollout.engine"


def test_a_dead_vllm_is_closed(policy_directory: Path) -> None:
    core: Any = DeadLlmEngine(setup(policy_directory))
    engine = vllm.VllmEngine(setup(policy_directory), core)
    engine.add_request(Request(id=3, prompt=(1, 2), max_tokens=4, seed=0))
    with pytest.raises(EngineError, match="with 1 requests: Unsupported"):
        engine.step()
    assert core.closed
    assert not engine.busy


def characters(tokens: Any) -> str:
    """One token per byte."""
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("answer", "stops", "end"),
    [
        ("one</answer> two", ["</answer>"], 12),
        ("an é and", ["é"], 5),
        ("aab", ["ab", "b"], 3),
        ("nothing here", ["</answer>"], None),
        ("anything", [], None),
    ],
)
def test_stop_strings_match_when_complete(answer: str, stops: list[str], end: int | None) -> None:
    matcher = StopStringMatcher(stops, characters)
    tokens = list(answer.encode())
    ends = [place for place in range(1, len(tokens) + 1) if matcher.matches(tokens[:place])]
    assert ends == ([] if end is None else [end])


def test_vllm_of_each_rank_uses_the_gpus_from_its_rank_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert gpu_variables() == {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert gpu_variables() == {"CUDA_VISIBLE_DEVICES": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-7f,1")
    assert gpu_variables() == {"CUDA_VISIBLE_DEVICES": "GPU-7f"}
    assert gpu_variables(2) == {"CUDA_VISIBLE_DEVICES": "GPU-7f,1"}
