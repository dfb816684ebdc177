"""If these fail, an option that an engine doesn't have is taken without a word, or one that it has is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet import hardware
from quintet.config.checks.engines import ENGINE_OPTIONS, runs_by_default, unsupported_options
from quintet.config.checks.unsupported import refuse_unsupported
from quintet.config.compose import load_experiment
from quintet.config.native.rollout import EngineConfig
from quintet.config.plan.placement import place_components
from quintet.errors import ConfigError

OPTIONS = "rollout.engine_options"
OTHERS: dict[str, Any] = {
    "memory_share": 0.5,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "dtype": "float32",
    "eager": False,
    "cuda_graph_max_batch": 8,
    "torch_compile": True,
    "prompts_per_device": 4,
    "torch_compile_max_batch": 8,
    "sleep_between_steps": True,
    "offload": True,
    "load_format": "safetensors",
    "max_batched_tokens": 4096,
    "max_model_tokens": 512,
    "chunked_prefill": True,
    "block_size": 16,
    "swap_space_gib": 4,
    "attention_backend": "triton",
    "image_cache": False,
    "log_statistics": True,
    "log_every_steps": 10,
    "detokenize": True,
    "print_responses": True,
    "validate_weights": True,
    "validate_weights_dir": "checked",
    "arguments": "{seed: 1}",
    "deterministic": True,
    "server_url": "http://there:30000",
    "server_python": "/opt/sglang/bin/python",
    "server_weights_dir": "shared",
    "separate_process": True,
    "executor": "ray",
}
"""A value of each option that asks for something."""


def words(engine: str, option: str) -> list[str]:
    value = OTHERS[option]
    needs = [f"{OPTIONS}.validate_weights=true"] if option == "validate_weights_dir" else []
    return [
        f"rollout.engine={engine}",
        f"{OPTIONS}.{option}={str(value).lower() if value in (True, False) else value}",
        *needs,
    ]


def test_every_option_is_looked_at() -> None:
    assert set(OTHERS) == set(EngineConfig.model_fields)
    assert {option for able in ENGINE_OPTIONS.values() for option in able.names} == set(OTHERS)


@pytest.mark.parametrize("engine", ENGINE_OPTIONS)
@pytest.mark.parametrize("option", OTHERS)
def test_an_option_is_honoured_or_refused_by_name(engine: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "sees_gpu", lambda: True)
    monkeypatch.setattr(hardware, "is_installed", lambda name: True)
    composed = load_experiment(None, words(engine, option))
    if option in ENGINE_OPTIONS[engine].names:
        refuse_unsupported(composed)
        return
    with pytest.raises(ConfigError) as error:
        refuse_unsupported(composed)
    message = str(error.value)
    assert f"{OPTIONS}.{option} = " in message
    assert f"the engine {engine} has no such option" in message
    able = [other for other in ENGINE_OPTIONS if option in ENGINE_OPTIONS[other].names]
    assert all(f", or rollout.engine={other}" in message for other in able)


@pytest.mark.proves("rlinf", "rollout.distributed_executor_backend")
def test_ray_starts_engines_only_where_vllm_can(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = load_experiment(None, words("vllm", "executor"))
    monkeypatch.setattr(hardware, "sees_gpu", lambda: False)
    with pytest.raises(ConfigError, match=rf"{OPTIONS}.executor = 'ray' .*without GPUs, and this machine has none"):
        refuse_unsupported(composed)
    monkeypatch.setattr(hardware, "sees_gpu", lambda: True)
    monkeypatch.setattr(hardware, "is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=rf"{OPTIONS}.executor = 'ray' .*needs the package ray"):
        refuse_unsupported(composed)
    monkeypatch.setattr(hardware, "is_installed", lambda name: True)
    refuse_unsupported(composed)
    several = load_experiment(None, [*words("vllm", "executor"), "placement.devices_per_node=2"])
    with pytest.raises(ConfigError, match="other GPUs than those of its rank"):
        refuse_unsupported(several)


def test_hf_takes_the_types_that_it_computes_in_and_the_learners_weights() -> None:
    for word in (f"{OPTIONS}.dtype=float16", f"{OPTIONS}.load_format=gguf"):
        with pytest.raises(ConfigError, match="not with the engine hf"):
            refuse_unsupported(load_experiment(None, [word]))
    for word in (f"{OPTIONS}.dtype=auto", f"{OPTIONS}.load_format=dummy", f"{OPTIONS}.load_format=safetensors"):
        refuse_unsupported(load_experiment(None, [word]))


def test_an_engine_of_another_package_is_handed_everything() -> None:
    composed = load_experiment(None, ["rollout.engine=mine", f"{OPTIONS}.block_size=8"])
    assert list(unsupported_options(composed.experiment)) == []


def test_an_engine_runs_unasked_where_its_package_and_an_accelerator_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_installed", lambda name: name == "vllm")
    monkeypatch.setattr(hardware, "num_gpus", lambda: 1)
    assert [runs_by_default(engine) for engine in ("hf", "vllm", "sglang")] == [True, True, False]
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    assert [runs_by_default(engine) for engine in ("hf", "vllm", "sglang")] == [True, False, False]


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ((), 0),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), 2),
        (("kfd", "dri/renderD128", "dri/renderD129", "dri/card0"), 2),
        (("dri/renderD128",), 0),
        (("dxg",), 1),
    ],
)
def test_accelerators_are_counted_by_their_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], count: int
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    assert hardware.num_gpus() == count


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["rollout.partial=true"], "async_ratio > 0"),
        (["rollout.max_staleness=1"], "async_ratio > 0"),
        (["rollout.async_ratio=1", f"{OPTIONS}.sleep_between_steps=true"], "episodes continue during updates"),
        (["rollout.do_sample=false", "rollout.temperature=0.7"], "recompute_logprobs=true"),
        (["rollout.min_response_tokens=30", "rollout.max_response_tokens=20"], "max_response_tokens"),
        (["rollout.ignore_end=true", "rollout.end_token=3"], "ignore_end"),
        ([f"{OPTIONS}.validate_weights_dir=x"], "validate_weights=true"),
    ],
)
def test_options_that_contradict_each_other_are_told(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_experiment(None, given)


def test_a_split_engine_takes_devices_of_its_own_where_nothing_is_placed() -> None:
    found = place_components(load_experiment(None, ["rollout.engine=vllm", f"{OPTIONS}.tensor_parallel=2"]).experiment)
    devices = {component.name: component.devices for component in found.components}
    assert (devices["rollout"], devices["actor"]) == (range(2), range(1))
