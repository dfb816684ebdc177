"""If these fail, weights change on their way to Megatron or back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from five_steps import batch, experiment
from safetensors.torch import load_file
from transformers import AutoConfig

from conftest import KINDS
from quintet.errors import ConfigError, MachineError
from quintet.training.megatron.conversion import Shape, cut, entries, entry_of, from_hugging_face, join, to_hugging_face
from quintet.training.megatron.opening import open_megatron_actor
from quintet.training.megatron.store import Conversion, Pieces, convert, is_whole, piece_path
from quintet.training.megatron.stored import StoredWeights

SHAPE = Shape(heads=4, groups=2, dim=1, vocabulary=5)


def test_queries_stand_with_the_key_that_they_share() -> None:
    """Four heads, two groups: q0 q1 k0 v0 | q2 q3 k1 v1."""
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = from_hugging_face([q, k, v], "qkv", SHAPE)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [cut(fused, "qkv", rank, 2).tolist() for rank in range(2)] == [[0, 1, 10, 20], [2, 3, 11, 21]]
    assert [part.tolist() for part in to_hugging_face(fused, "qkv", SHAPE)] == [[0, 1, 2, 3], [10, 11], [20, 21]]


def test_a_rank_has_its_part_of_the_gate_above_its_part_of_up() -> None:
    fused = from_hugging_face([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])], "gated", SHAPE)
    parts = [cut(fused, "gated", rank, 2) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert torch.equal(join(parts, "gated"), fused)


def test_the_vocabulary_is_filled_up_with_zeros() -> None:
    parts = [cut(torch.arange(1, 6)[:, None], "vocabulary", rank, 2) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[1, 2, 3], [4, 5, 0]]
    assert to_hugging_face(join(parts, "vocabulary"), "vocabulary", SHAPE)[0].flatten().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_there_and_back_is_exact(models: Path, kind: str, ranks: int) -> None:
    hf, stored = AutoConfig.from_pretrained(models / kind), StoredWeights(models / kind)
    shape, back = Shape.of(hf), {}
    for entry in entries(set(stored), hf.num_hidden_layers):
        whole = from_hugging_face([stored[name] for name in entry.hugging_face], entry.kind, shape)
        joined = join([cut(whole, entry.kind, rank, ranks) for rank in range(ranks)], entry.kind)
        back |= dict(zip(entry.hugging_face, to_hugging_face(joined, entry.kind, shape), strict=True))
    assert back.keys() == set(stored)
    assert all(torch.equal(back[name], stored[name]) for name in stored)


def test_a_tensor_that_has_no_counterpart_is_named() -> None:
    with pytest.raises(KeyError, match=r"decoder\.layers\.0\.unheard_of"):
        entry_of("decoder.layers.0.unheard_of")


def megatron(**given: Any) -> dict[str, Any]:
    return {"megatron": given}


def scores(policy: Path, settings: dict[str, Any]) -> torch.Tensor:
    return open_megatron_actor(experiment(settings), policy).scorer.logprobs(batch(99))


@pytest.mark.parametrize("kind", ["qwen2", "deep", "experts"])
def test_a_run_starts_from_weights_converted_before_it(models: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "converted"
    given = {"target": str(target), "tensor_parallel": 2, "pipeline_parallel": 2, "processes": 1, "devices": 0}
    expected = scores(models / kind, {})
    assert torch.equal(scores(models / kind, megatron(conversion=given)), expected)
    assert is_whole(target)
    assert sorted(path.parent.name for path in target.glob("*/model.safetensors")) == [
        f"mp_rank_{rank:02d}_{stage:03d}" for rank in range(2) for stage in range(2)
    ]
    part = load_file(piece_path(target, 1, 1))
    layers = AutoConfig.from_pretrained(models / kind).num_hidden_layers
    assert f"decoder.layers.{layers - 1}.self_attention.linear_qkv.weight" in part
    assert "decoder.layers.0.self_attention.linear_qkv.weight" not in part
    assert torch.equal(scores(models / kind, megatron(checkpoint=str(target))), expected)


def test_converted_weights_that_are_there_are_used_again(models: Path, tmp_path: Path) -> None:
    target = tmp_path / "converted"
    convert(Conversion(models / "deep", target))
    written = piece_path(target, 0, 0).stat().st_mtime_ns
    given = {"target": str(target), "source": str(models / "llama")}
    scores(models / "deep", megatron(conversion=given))
    assert piece_path(target, 0, 0).stat().st_mtime_ns == written


def test_the_source_may_be_another_directory_than_the_policy(models: Path, tmp_path: Path) -> None:
    hf = AutoConfig.from_pretrained(models / "llama")
    hf.save_pretrained(tmp_path / "only_config")
    given = megatron(conversion={"source": str(models / "llama")})
    assert torch.equal(scores(tmp_path / "only_config", given), scores(models / "llama", {}))


def test_several_processes_convert_the_same(models: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    convert(Conversion(models / "llama", one, tensor=2))
    convert(Conversion(models / "llama", two, tensor=2, processes=2))
    for rank in range(2):
        assert piece_path(one, rank, 0).read_bytes() == piece_path(two, rank, 0).read_bytes()


def test_a_part_that_is_missing_is_named(models: Path, tmp_path: Path) -> None:
    convert(Conversion(models / "llama", tmp_path / "it", tensor=2))
    piece_path(tmp_path / "it", 1, 0).unlink()
    with pytest.raises(MachineError, match="mp_rank_01_000"):
        Pieces(tmp_path / "it", AutoConfig.from_pretrained(models / "llama"))
    with pytest.raises(MachineError, match="no converted Megatron weights"):
        scores(models / "llama", megatron(checkpoint=str(tmp_path)))


@pytest.mark.parametrize(
    ("conversion", "reason"),
    [
        ({"devices": 1}, "1 GPUs"),
        ({"devices": 1, "device_ranks": (3,)}, r"GPUs \[3\]"),
        ({"pipeline_parallel": 3}, "can't be shared out"),
        ({"model": "DeepSeek-R1-Distill-Qwen-1.5B"}, "qwen2, and llama lies there"),
    ],
)
def test_what_cant_be_converted_so_is_refused(
    models: Path, tmp_path: Path, conversion: dict[str, Any], reason: str
) -> None:
    given = megatron(conversion={"target": str(tmp_path / "it"), **conversion})
    with pytest.raises(ConfigError, match=reason):
        scores(models / "llama", given)
    assert not is_whole(tmp_path / "it")


def test_the_model_may_be_named_as_the_converter_names_it(models: Path) -> None:
    given = megatron(conversion={"model": "DeepSeek-R1-Distill-Qwen-1.5B"})
    assert torch.equal(scores(models / "qwen2", given), scores(models / "qwen2", {}))
