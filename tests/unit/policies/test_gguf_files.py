"""If these fail, a converted GGUF file is another model than the file describes, and nothing says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from gguf_models import FAMILIES, build_family, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet.config.model_locations import gguf_config
from quintet.config.model_locations.gguf_config import gguf_architectures
from quintet.config.plan.model_shapes import read_shape
from quintet.errors import MachineError
from quintet.policies.gguf_files import check_gguf_file, convert, convert_in_process

TEXT = "ask 1 + 2 = 3 and answer 4<|im_end|>\n 5 é"


def test_a_tiny_file_of_each_architecture_is_converted_here() -> None:
    assert set(gguf_architectures()) == set(FAMILIES)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_converted_file_is_the_model_that_was_written(tmp_path: Path, architecture: str) -> None:
    model, tokenizer = build_family(architecture)
    write_gguf(tmp_path / "model.gguf", architecture, model, tokenizer)
    convert(tmp_path / "model.gguf", tmp_path / "converted")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    tokens = torch.randint(len(tokenizer), (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, converted(tokens).logits, atol=1e-5)
    again = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert again.decode(again(TEXT)["input_ids"]) == TEXT
    assert (again.chat_template, again.eos_token_id) == (tokenizer.chat_template, tokenizer.eos_token_id)
    assert again.model_max_length == 256


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_plan_has_the_sizes_of_the_file(tmp_path: Path, architecture: str) -> None:
    model, tokenizer = build_family(architecture)
    write_gguf(tmp_path / "model.gguf", architecture, model, tokenizer)
    shape = read_shape(check_gguf_file(tmp_path / "model.gguf"))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert dataclasses.replace(shape, dtype="") == dataclasses.replace(read_shape(model.config.to_dict()), dtype="")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("llama") / "model.gguf"
    write_gguf(file, "llama", *build_family("llama"))
    return file


def test_a_setting_that_is_not_converted_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", *build_family("llama"), {"rope.scaling.type": "yarn"})
    with pytest.raises(MachineError, match=r"a.gguf: its setting llama.rope.scaling.type = yarn is not converted"):
        convert_in_process(tmp_path / "a.gguf", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_a_tensor_that_is_not_converted_is_refused(tmp_path: Path) -> None:
    model, tokenizer = build_family("qwen2")
    write_gguf(tmp_path / "a.gguf", "qwen2", model, tokenizer)
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(data.replace(b"blk.1.attn_q.bias", b"blk.1.attn_r.bias"))
    with pytest.raises(MachineError, match=r"its tensor blk.1.attn_r.bias is not converted"):
        check_gguf_file(tmp_path / "a.gguf")


def test_a_tokenizer_that_is_not_converted_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", *build_family("llama"), pre="chatglm-bpe")
    with pytest.raises(MachineError, match=r"its setting tokenizer.ggml.pre = chatglm-bpe is not converted"):
        check_gguf_file(tmp_path / "a.gguf")


def test_a_tokenizer_that_transformers_would_replace_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "qwen2", *build_family("qwen2"), pre="gpt-2")
    with pytest.raises(MachineError, match=r"a.gguf: the tokenizer of its architecture splits texts in another way"):
        convert(tmp_path / "a.gguf", tmp_path / "converted")


def test_a_missing_tensor_is_noticed(tmp_path: Path) -> None:
    model, tokenizer = build_family("qwen2")
    write_gguf(tmp_path / "a.gguf", "qwen2", model, tokenizer)
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(data.replace(b"blk.1.attn_q.bias", b"blk.7.attn_q.bias"))
    with pytest.raises(MachineError, match=r"incomplete: it has no model.layers.1.self_attn.q_proj.bias"):
        convert(tmp_path / "a.gguf", tmp_path / "converted")


def test_a_partial_rotation_is_refused(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = gguf_config.read_gguf_header(llama)
    changed = dataclasses.replace(header, settings={**header.settings, "llama.rope.dimension_count": 8})
    monkeypatch.setattr(gguf_config, "read_gguf_header", lambda file: changed)
    with pytest.raises(MachineError, match=r"llama.rope.dimension_count = 8 differs from the 16 of a key"):
        check_gguf_file(llama)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04 no model", "does not begin with GGUF"),
        (b"GGUF" + (9).to_bytes(4, "little"), "its version is 9; known: 2, 3"),
        (b"GGUF" + (3).to_bytes(4, "little") + (1 << 62).to_bytes(8, "little") * 2, "it is cut off"),
        (b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") * 2 + b"\xff" * 8, "larger than 256 MiB"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(MachineError, match=rf"a.gguf is not a complete GGUF file: .*{message}"):
        check_gguf_file(tmp_path / "a.gguf")


def test_a_file_that_is_cut_off_is_named(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(llama.read_bytes()[:900])
    with pytest.raises(MachineError, match=r"a.gguf is not a complete GGUF file: it is cut off"):
        check_gguf_file(tmp_path / "a.gguf")


def test_another_architecture_is_refused_with_those_that_are_converted(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(llama.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(MachineError, match=r"its architecture is mamba; supported are llama, qwen2, qwen3"):
        check_gguf_file(tmp_path / "a.gguf")
