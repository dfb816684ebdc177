"""If these fail, an export of adapters computes something else than the policy that was trained, or a broken export is
written without an error."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from saved_checkpoints import save_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from vision_models import save_qwen2_5_vl

from quintet.config.compose import load_experiment
from quintet.config.native.policy import LoraConfig as NativeLoraConfig
from quintet.errors import MachineError
from quintet.pipelines.export import export
from quintet.policies.lora import add_lora, iter_merged_weights, save_adapters
from quintet.policies.model_loading import load_model
from quintet.training.checkpoint.checkpoint import _manifest
from quintet.training.checkpoint.hf_directory import HfDirectory

TOKENS = torch.arange(64).view(2, 32) * 7 % 60
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "rank-patterns": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"v_proj": 3},
    },
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding-and-head": {"target_modules": ["embed_tokens", "lm_head"]},
    "tied-adapters": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "saved-embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved-head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved-tied": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved-norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "bias": {"target_modules": ["q_proj"], "bias": "all"},
    "adapter-bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "pissa": {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": "pissa"},
}
FUSED_EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """peft warns of each tied layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def tokenizer_directory(policy_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(policy_directory)


@pytest.fixture
def base(tmp_path: Path, policy_directory: Path) -> Callable[..., Path]:
    """Writes a tiny random model with a tokenizer."""

    def write(kind: str = "qwen2", *, tied: bool, **more: Any) -> Path:
        experts = EXPERTS if "moe" in kind else {}
        config = AutoConfig.for_model(kind, **SIZES | experts, tie_word_embeddings=tied, **more)
        torch.manual_seed(0)
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(tmp_path / "base")
        tokenizer_directory(policy_directory).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return write


def train(base: Path, directory: Path, *, rows: int | None = None, **options: Any) -> torch.Tensor:
    """Write random adapters; gives the logits of the policy with them."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if rows:
        torch.manual_seed(2)
        model.resize_token_embeddings(rows)
    options = {"init_lora_weights": False, **options}
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", **options)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(directory)
    return logits(adapted)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def exported_logits(directory: Path) -> torch.Tensor:
    model, loading = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    return logits(model)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("adapters", ADAPTERS)
def test_the_export_has_the_logits_of_the_trained_policy(
    base: Callable[..., Path], tmp_path: Path, adapters: str, tied: bool
) -> None:
    expected = train(base(tied=tied), tmp_path / "adapters", **ADAPTERS[adapters])
    export(str(tmp_path / "adapters"), tmp_path / "out")
    assert_close(exported_logits(tmp_path / "out"), expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_moe", "gemma", "glm4", "phi3", "olmo2"])
@pytest.mark.parametrize("adapters", ["all-linear", "embedding-and-head"])
def test_no_architecture_is_exported_as_another_model(
    base: Callable[..., Path], tmp_path: Path, kind: str, adapters: str, tied: bool
) -> None:
    expected = train(base(kind, tied=tied), tmp_path / "adapters", **ADAPTERS[adapters])
    export(str(tmp_path / "adapters"), tmp_path / "out")
    assert_close(exported_logits(tmp_path / "out"), expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_adapters_of_fused_experts_are_merged(base: Callable[..., Path], tmp_path: Path, tied: bool) -> None:
    expected = train(base("qwen3_moe", tied=tied), tmp_path / "adapters", **FUSED_EXPERTS)
    export(str(tmp_path / "adapters"), tmp_path / "out")
    assert_close(exported_logits(tmp_path / "out"), expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("adapters", ["attention", "embedding-and-head", "saved-embedding"])
def test_a_resized_vocabulary_is_exported(base: Callable[..., Path], tmp_path: Path, adapters: str, tied: bool) -> None:
    expected = train(base(tied=tied), tmp_path / "adapters", rows=70, **ADAPTERS[adapters])
    export(str(tmp_path / "adapters"), tmp_path / "out")
    assert_close(exported_logits(tmp_path / "out"), expected)
    assert AutoConfig.from_pretrained(tmp_path / "out").vocab_size == 70


def test_adapters_without_the_heads_new_rows_are_refused(base: Callable[..., Path], tmp_path: Path) -> None:
    train(base(tied=False), tmp_path / "adapters", rows=70, **ADAPTERS["embedding"])
    with pytest.raises(MachineError, match=r"resized to 70 rows, but only the rows of model\.embed_tokens"):
        export(str(tmp_path / "adapters"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    expected = train(base(tied=True), tmp_path / "tied", rows=70, **ADAPTERS["embedding"])
    export(str(tmp_path / "tied"), tmp_path / "out")
    assert_close(exported_logits(tmp_path / "out"), expected)


def test_a_tensor_that_peft_skips_is_refused(base: Callable[..., Path], tmp_path: Path) -> None:
    train(base(tied=True), tmp_path / "adapters", **ADAPTERS["attention"])
    path = tmp_path / "adapters/adapter_model.safetensors"
    extra = {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)}
    save_file(load_file(path) | extra, path)
    with pytest.raises(MachineError, match=r"no place for .*layers\.9"):
        export(str(tmp_path / "adapters"), tmp_path / "out")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
@pytest.mark.parametrize("adapters", ["attention", "embedding-and-head"])
def test_a_broken_merge_is_never_written(
    base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: str, dtype: str | None
) -> None:
    """With each dtype, whose rounding is larger than the tolerance of a broken merge in float32."""
    train(base(tied=True), tmp_path / "adapters", **ADAPTERS[adapters])
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
    with pytest.raises(MachineError, match="merging the adapters changes the logits"):
        export(str(tmp_path / "adapters"), tmp_path / "out", dtype)
    assert not list(tmp_path.glob("*out*"))


def test_a_merge_into_both_tied_layers_is_never_written(
    base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(base(tied=True), tmp_path / "adapters", **ADAPTERS["head"])
    monkeypatch.setattr("quintet.pipelines.adapted_model._adapters_of_tied_weights", lambda model: iter(()))
    with pytest.raises(MachineError, match="merging the adapters changes the logits"):
        export(str(tmp_path / "adapters"), tmp_path / "out")


def test_a_directory_that_says_it_is_tied_is_never_written(
    base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers notices that they differ; other programs would use the embedding as head."""
    train(base(tied=True), tmp_path / "adapters", **ADAPTERS["head"])
    write = HfDirectory.write

    def write_tied(self: HfDirectory, parent: Path, name: str, weights: Any) -> Any:
        result = write(self, parent, name, weights)
        path = parent / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
        return result

    monkeypatch.setattr(HfDirectory, "write", write_tied)
    with pytest.raises(MachineError, match="tie_word_embeddings is true, but"):
        export(str(tmp_path / "adapters"), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_model_whose_weights_were_written_wrongly_is_never_given_away(
    base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    source = base("qwen3_moe", tied=False)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    monkeypatch.setattr(
        "quintet.pipelines.export.write_tensors",
        lambda path, tensors: save_file({**tensors, name: tensors[name] * 1.5}, path, metadata={"format": "pt"}),
    )
    with pytest.raises(MachineError, match="the exported model has other"):
        export(str(source), tmp_path / "out", dtype)
    assert not list(tmp_path.glob("*out*"))


@pytest.fixture
def checkpoint(base: Callable[..., Path], tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A checkpoint of a run with adapters and an override of the model's configuration, and the policy's logits."""
    directory, overrides = base(tied=True), {"rms_norm_eps": 0.5}
    model = load_model(directory, overrides=overrides)
    add_lora(model, NativeLoraConfig(rank=2, alpha=6.0))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    experiment = load_experiment(None, [f"policy.path={directory}", "policy.preset=null"]).experiment
    policy = experiment.policy.model_copy(update={"overrides": overrides})
    state = {"experiment": experiment.model_copy(update={"policy": policy}).model_dump(mode="json"), "seconds": 1.0}

    def write(staging: Path) -> None:
        save_adapters(model, staging / "lora_adapter", directory)
        HfDirectory.from_model(model).write(staging, "hf", dict(iter_merged_weights(model)))
        AutoTokenizer.from_pretrained(directory).save_pretrained(staging / "hf")

    written = save_checkpoint(tmp_path / "run/checkpoints", 4, state, write, keep=9)
    model.set_attn_implementation("eager")
    return written, logits(model)


@pytest.mark.parametrize("part", [".", "hf", "lora_adapter"])
def test_overrides_of_the_configuration_are_exported(
    checkpoint: tuple[Path, torch.Tensor], tmp_path: Path, part: str
) -> None:
    directory, expected = checkpoint
    export(str(directory / part), tmp_path / "out")
    assert_close(exported_logits(tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["rms_norm_eps"] == 0.5


def test_a_checkpoint_whose_weights_are_not_those_of_its_adapters_is_not_exported(
    checkpoint: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    directory, _ = checkpoint
    path = directory / "lora_adapter/adapter_model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(path).items()}, path)
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").write_text(json.dumps(_manifest(directory)))
    with pytest.raises(MachineError, match=r"hf is not .*base with the adapters at"):
        export(str(directory), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("part", [".", "lora_adapter"])
def test_adapters_are_not_merged_into_a_model_that_replaced_their_base_model(
    checkpoint: tuple[Path, torch.Tensor], tmp_path: Path, part: str
) -> None:
    directory, _ = checkpoint
    path = tmp_path / "base/model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(MachineError, match=r"(?s)hf is not .*base with the adapters at.*restore it, or export a copy"):
        export(str(directory / part), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_missing_base_model_leaves_the_merged_model_of_the_checkpoint(
    checkpoint: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """Its adapter_config.json must not be edited: the checkpoint would be damaged."""
    directory, expected = checkpoint
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(MachineError, match=r"put it there, or export .*global_step_4/hf, which has them merged"):
        export(str(directory / "lora_adapter"), tmp_path / "out")
    export(str(directory / "hf"), tmp_path / "out")
    assert_close(exported_logits(tmp_path / "out"), expected)


def test_adapters_of_a_model_larger_than_the_memory_are_refused_before_it_is_loaded(
    base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(base(tied=True), tmp_path / "adapters", **ADAPTERS["attention"])
    monkeypatch.setattr("quintet.pipelines.export.memory_bytes", lambda: 1000)
    monkeypatch.setattr("quintet.pipelines.adapted_model.load_plain_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(MachineError, match=r"cannot merge the adapters at .*adapters into .*base: that takes 0 GiB"):
        export(str(tmp_path / "adapters"), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_model_larger_than_the_memory_is_compared_file_by_file(
    base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.pipelines.export.memory_bytes", lambda: 1000)
    source = base(tied=True)
    assert "GiB of memory" in export(str(source), tmp_path / "out", "bfloat16").check.reason
    monkeypatch.setattr("quintet.pipelines.export.cast_tensor", lambda tensor, dtype: tensor)
    with pytest.raises(MachineError, match="do not match those at"):
        export(str(source), tmp_path / "other", "bfloat16")


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], "all-linear"], ids=str)
def test_a_vision_language_model_is_exported_with_its_processor(tmp_path: Path, targets: Any) -> None:
    base = save_qwen2_5_vl(tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(base)
    options = {"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": targets}
    get_peft_model(model, LoraConfig(**options)).save_pretrained(tmp_path / "adapters")
    assert export(str(tmp_path / "adapters"), tmp_path / "out").check.rounding is not None
    config = json.loads((tmp_path / "out/config.json").read_text())
    is_tied = targets == "all-linear"
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is is_tied
    assert (tmp_path / "out/preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()
    export(str(tmp_path / "out"), tmp_path / "narrow", "bfloat16")


@pytest.mark.parametrize("kind", ["untied", "headless"])
def test_a_source_that_programs_read_differently_is_not_exported(
    base: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """Its head is ignored by programs that follow the configuration, or random, because the files have none."""
    source = base(tied=True)
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if kind == "untied":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    else:
        (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MachineError, match=r"tie_word_embeddings is true, but|incomplete: its files have no lm_head"):
        export(str(source), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), r"PromptTuning\) cannot be merged"),
        (LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3]), "cannot be merged"),
        (LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]), "task_type SEQ_CLS"),
    ],
    ids=["prompt-tuning", "alora", "classifier"],
)
def test_adapters_that_cannot_be_merged_are_refused(
    base: Callable[..., Path], tmp_path: Path, config: Any, message: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base(tied=True))
    directory = tmp_path / "adapters"
    adapted = PeftModel(model, config) if config.task_type == "SEQ_CLS" else get_peft_model(model, config)
    adapted.save_pretrained(directory)
    with pytest.raises(MachineError, match=message):
        export(str(directory), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
