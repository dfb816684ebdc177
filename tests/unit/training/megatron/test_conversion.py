"""If these fail, weights change on their way to Megatron or back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_models import KINDS
from megatron_steps import build_batch, experiment
from safetensors.torch import load_file
from transformers import AutoConfig

from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError, MachineError
from quintet.training.megatron import build
from quintet.training.megatron.build import build_megatron_actor
from quintet.training.megatron.conversion import (
    ModelDims,
    from_hugging_face,
    join_shards,
    take_shard,
    tensor_mapping,
    tensor_mappings,
    to_hugging_face,
)
from quintet.training.megatron.hf_weights import HfWeights
from quintet.training.megatron.shard_files import ConversionJob, MegatronWeights, convert, is_complete, shard_path
from quintet.training.parallel.process_group import RankGroup

SHAPE = ModelDims(num_heads=4, num_groups=2, head_dim=1, vocab_size=5)


def test_queries_are_grouped_with_their_key() -> None:
    """Four heads, two groups: q0 q1 k0 v0 | q2 q3 k1 v1."""
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = from_hugging_face([q, k, v], "qkv", SHAPE)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [take_shard(fused, "qkv", rank, 2).tolist() for rank in range(2)] == [[0, 1, 10, 20], [2, 3, 11, 21]]
    assert [part.tolist() for part in to_hugging_face(fused, "qkv", SHAPE)] == [[0, 1, 2, 3], [10, 11], [20, 21]]


def test_gate_and_up_are_sharded_separately() -> None:
    fused = from_hugging_face([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])], "gated", SHAPE)
    parts = [take_shard(fused, "gated", rank, 2) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert torch.equal(join_shards(parts, "gated"), fused)


def test_the_vocabulary_is_padded_with_zeros() -> None:
    parts = [take_shard(torch.arange(1, 6)[:, None], "vocabulary", rank, 2) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[1, 2, 3], [4, 5, 0]]
    assert to_hugging_face(join_shards(parts, "vocabulary"), "vocabulary", SHAPE)[0].flatten().tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_conversion_round_trip_is_exact(models: Path, kind: str, ranks: int) -> None:
    hf, stored = AutoConfig.from_pretrained(models / kind), HfWeights(models / kind)
    shape, back = ModelDims.from_hf_config(hf), {}
    for mapping in tensor_mappings(set(stored), hf.num_hidden_layers):
        whole = from_hugging_face([stored[name] for name in mapping.hugging_face], mapping.layout, shape)
        joined = join_shards([take_shard(whole, mapping.layout, rank, ranks) for rank in range(ranks)], mapping.layout)
        back |= dict(zip(mapping.hugging_face, to_hugging_face(joined, mapping.layout, shape), strict=True))
    assert back.keys() == set(stored)
    assert all(torch.equal(back[name], stored[name]) for name in stored)


def test_an_unknown_tensor_is_named() -> None:
    with pytest.raises(KeyError, match=r"decoder\.layers\.0\.unheard_of"):
        tensor_mapping("decoder.layers.0.unheard_of")


def megatron(**value: Any) -> dict[str, Any]:
    return {"megatron": value}


def scores(policy: Path, settings: dict[str, Any]) -> torch.Tensor:
    return build_megatron_actor(experiment(settings), policy).scorer.compute_log_probs(build_batch(99))


@pytest.mark.proves(
    "rlinf",
    "actor.model.megatron_checkpoint",
    "actor.megatron.use_hf_ckpt",
    "actor.megatron.ckpt.save_path",
    "actor.megatron.ckpt.tensor_model_parallel_size",
    "actor.megatron.ckpt.pipeline_model_parallel_size",
)
@pytest.mark.parametrize("kind", ["qwen2", "deep", "experts"])
def test_a_run_starts_from_weights_converted_before_it(models: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "converted"
    options = {"target": str(target), "tensor_parallel": 2, "pipeline_parallel": 2, "processes": 1, "devices": 0}
    expected = scores(models / kind, {})
    assert torch.equal(scores(models / kind, megatron(conversion=options)), expected)
    assert is_complete(target)
    assert sorted(path.parent.name for path in target.glob("*/model.safetensors")) == [
        f"mp_rank_{rank:02d}_{stage:03d}" for rank in range(2) for stage in range(2)
    ]
    part = load_file(shard_path(target, 1, 1))
    layers = AutoConfig.from_pretrained(models / kind).num_hidden_layers
    assert f"decoder.layers.{layers - 1}.self_attention.linear_qkv.weight" in part
    assert "decoder.layers.0.self_attention.linear_qkv.weight" not in part
    assert torch.equal(scores(models / kind, megatron(checkpoint=str(target))), expected)


def test_existing_converted_weights_are_reused(models: Path, tmp_path: Path) -> None:
    target = tmp_path / "converted"
    convert(ConversionJob(models / "deep", target))
    written = shard_path(target, 0, 0).stat().st_mtime_ns
    options = {"target": str(target), "source": str(models / "llama")}
    scores(models / "deep", megatron(conversion=options))
    assert shard_path(target, 0, 0).stat().st_mtime_ns == written


@pytest.mark.proves("rlinf", "actor.megatron.ckpt.hf_model_path")
def test_the_conversion_source_may_differ_from_the_policy(models: Path, tmp_path: Path) -> None:
    hf = AutoConfig.from_pretrained(models / "llama")
    hf.save_pretrained(tmp_path / "only_config")
    experiment_config = megatron(conversion={"source": str(models / "llama")})
    assert torch.equal(scores(tmp_path / "only_config", experiment_config), scores(models / "llama", {}))


@pytest.mark.proves("rlinf", "actor.megatron.ckpt.process_num")
def test_conversion_by_several_processes_is_equal(models: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    convert(ConversionJob(models / "llama", one, tensor=2))
    convert(ConversionJob(models / "llama", two, tensor=2, processes=2))
    for rank in range(2):
        assert shard_path(one, rank, 0).read_bytes() == shard_path(two, rank, 0).read_bytes()


def test_a_missing_shard_is_named(models: Path, tmp_path: Path) -> None:
    convert(ConversionJob(models / "llama", tmp_path / "it", tensor=2))
    shard_path(tmp_path / "it", 1, 0).unlink()
    with pytest.raises(MachineError, match="mp_rank_01_000"):
        MegatronWeights(tmp_path / "it", AutoConfig.from_pretrained(models / "llama"))
    with pytest.raises(MachineError, match="no converted Megatron weights"):
        scores(models / "llama", megatron(checkpoint=str(tmp_path)))


@pytest.mark.proves("rlinf", "actor.megatron.ckpt.use_gpu_num", "actor.megatron.ckpt.use_gpu_index")
@pytest.mark.parametrize(
    ("conversion", "reason"),
    [
        ({"devices": 1}, "asks for 1 GPUs"),
        ({"devices": 1, "device_ranks": (3,)}, r"GPUs \[3\]"),
        ({"pipeline_parallel": 3}, "cannot be divided"),
        ({"model": "DeepSeek-R1-Distill-Qwen-1.5B"}, "implies model type qwen2, but the model is llama"),
    ],
)
def test_an_impossible_conversion_is_rejected(
    models: Path, tmp_path: Path, conversion: dict[str, Any], reason: str
) -> None:
    experiment_config = megatron(conversion={"target": str(tmp_path / "it"), **conversion})
    with pytest.raises(ConfigError, match=reason):
        scores(models / "llama", experiment_config)
    assert not is_complete(tmp_path / "it")


@pytest.mark.proves("rlinf", "actor.megatron.ckpt.model")
def test_the_converters_model_name_is_checked(models: Path) -> None:
    experiment_config = megatron(conversion={"model": "DeepSeek-R1-Distill-Qwen-1.5B"})
    assert torch.equal(scores(models / "qwen2", experiment_config), scores(models / "qwen2", {}))


def test_weights_are_converted_as_configured(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[ConversionJob] = []
    monkeypatch.setattr(build, "convert", jobs.append)
    monkeypatch.setattr(build, "MegatronWeights", lambda directory, hf_config: directory)
    monkeypatch.setattr(build.dist, "barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    conversion = {"source": "hf", "target": str(tmp_path), "processes": 3, "devices": 2, "device_ranks": [3, 1, 0]}
    options = MegatronConfig.model_validate(
        {"conversion": {**conversion, "tensor_parallel": 2, "pipeline_parallel": 4}}
    )
    spec: Any = SimpleNamespace(
        hf_config=AutoConfig.from_pretrained(models / "llama"),
        parallel=ParallelConfig(),
        ranks=SimpleNamespace(world=RankGroup()),
    )
    assert build._initial_weights(options, spec, models / "llama") == tmp_path
    assert jobs == [ConversionJob(Path("hf"), tmp_path, tensor=2, pipeline=4, processes=3, devices=(3, 1))]
