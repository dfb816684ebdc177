"""If these fail, a user is told that a model is fast, or supported, that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.cli.main import main
from quintet.errors import MachineError
from quintet.kernels.build import find_compiler
from quintet.policies.attention import PackedLayout
from quintet.policies.inference_decoder import InferenceDecoder
from quintet.policies.model_loading import build_meta_model, load_model
from quintet.policies.training_decoder import training_hidden_states
from support.tiny_families import save_tiny_model


def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["quintet", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("family", "settings", "training", "sampling"),
    [
        ("llama", {}, None, None),
        ("llama", {"hidden_act": "gelu"}, "its activation is not silu", "its activation is not silu"),
        ("llama", {"head_dim": 24}, "its heads have 24 numbers, not a multiple of 16", None),
        ("llama", {"mlp_bias": True}, "it has other biases than those of queries, keys and values", None),
        ("mistral", {"sliding_window": 6}, "its attention has a sliding window", "its attention has a sliding window"),
        ("qwen3", {}, "there are no kernels for Qwen3Model", None),
        ("gemma2", {}, "there are no kernels for Gemma2Model", "there is no decoder for Gemma2DecoderLayer"),
    ],
)
def test_a_model_is_computed_as_the_doctor_says(
    family: str,
    settings: dict[str, Any],
    training: str | None,
    sampling: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny_model(family, tmp_path, **settings)
    said = json.loads(doctor(capsys, monkeypatch, str(tmp_path), "--json"))
    assert (said["training_obstacle"], said["sampling_obstacle"]) == (training, sampling)
    assert (said["is_tested"], said["refused"]) == (True, None)
    model = load_model(tmp_path)
    assert said["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.arange(5)
    states = training_hidden_states(model.model, tokens, tokens, PackedLayout(torch.tensor([5])))
    assert (states is None) == (training is not None)
    assert (InferenceDecoder.from_body(model.model) is None) == (sampling is not None)


def test_a_refused_model_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("diffllama", tmp_path)
    page = doctor(capsys, monkeypatch, str(tmp_path))
    assert page.startswith("DiffLlamaForCausalLM (diffllama), ")
    assert "refused  differential attention (diffllama) are not supported yet" in page


def test_a_configuration_that_cannot_be_built_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0, "head_dim": None}))
    with pytest.raises(MachineError, match=r"cannot (build|load)"):
        build_meta_model(tmp_path)


def test_the_weights_are_not_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    page = doctor(capsys, monkeypatch, str(tmp_path))
    assert "training on a CPU           compiled kernels" in page
