"""If these fail, a hint about a model leads nowhere: somebody follows it and gets the same error again."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hint_cases import HintCase, case, name_of, sites_without_case
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.policy import LoraConfig
from quintet.policies import liger, model_loading, reward_model
from quintet.policies.attention import MODELS_HINT, PackedLayout, _attention
from quintet.policies.attention_backends import set_attention_backend
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.lora import add_lora, load_adapters, save_adapters
from quintet.policies.model_loading import (
    build_meta_model,
    enable_activation_checkpointing,
    limit_positions,
    load_model,
    load_tokenizer,
)
from quintet.policies.output_head import LogitTransform, OutputHead
from quintet.policies.parallel.ulysses_parallel import PaddedLayout
from quintet.policies.reward_model import RewardModel
from quintet.policies.routers import freeze_routers
from quintet.policies.tiny_models import get_preset
from quintet.policies.vision.image_processing import ImageProcessor
from support.tiny_families import save_tiny_model


def model() -> Any:
    return load_model("model")


def loaded(directory: str) -> None:
    load_model(directory)


def built_without_weights(directory: str) -> None:
    build_meta_model(Path(directory))


def with_images(directory: str) -> None:
    ImageProcessor.from_directory(Path(directory))


def overridden(overrides: Mapping[str, Any]) -> None:
    load_model("mixture", overrides=overrides)


def attended(options: Mapping[str, Any]) -> None:
    """Attention of a layer with options, and with a layout unless they say so."""
    module: Any = SimpleNamespace(layer_idx=0)
    states = torch.ones(1, 1, 3, 2)
    layout = PackedLayout(torch.tensor([3]))
    _attention(module, states, states, states, None, 1.0, **{"layout": layout, **options})


def without_word(setting: tuple[str, Mapping[str, Any]]) -> None:
    """Load a model whose configuration says nothing of what is not supported."""
    directory, attributes = setting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "unsupported_reason", lambda _: None)
        for name, value in attributes.items():
            patch.setattr(LlamaForCausalLM, name, value)
        load_model(directory)


def mixed(is_distributed: bool) -> None:
    """A model with short convolutions, over tokens that may be distributed over ranks."""
    tokens, layout = torch.arange(6), PackedLayout(torch.tensor([6]))
    body = load_model("convolutions").model
    compute_hidden_states(body, tokens, tokens, PaddedLayout(layout, 6) if is_distributed else layout)


def rotated(tokens: int) -> None:
    """Rotary embeddings that change beyond four tokens."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    small = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8, max_position_embeddings=4, rope_parameters=rope))
    limit_positions(small)
    small(input_ids=torch.ones(1, tokens, dtype=torch.long))


def computed_by(backend: str | None) -> None:
    set_attention_backend(model(), backend)


def with_liger(setting: tuple[bool, bool]) -> None:
    """Liger's kernels, if they are enabled, on a machine that may have the package."""
    is_enabled, is_installed = setting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _: object() if is_installed else None)
        if is_enabled:
            liger.apply_liger_kernels(model(), "actor.memory.liger")


def adapted(settings: Mapping[str, Any]) -> None:
    add_lora(model(), LoraConfig(**settings))


def adapted_scaled(settings: Mapping[str, Any]) -> None:
    """Adapt a model that scales its logits."""
    scaled = load_model("llama")
    scaled.lm_head = OutputHead(scaled.lm_head.weight, transform=LogitTransform(scale=0.5))
    add_lora(scaled, LoraConfig(**settings))


def continued(rank: int) -> None:
    """Load adapters of rank 2 into a model with adapters of this rank."""
    Path("adapters").mkdir(exist_ok=True)
    saved, other = model(), model()
    add_lora(saved, LoraConfig(rank=2))
    save_adapters(saved, Path("adapters"), "model")
    add_lora(other, LoraConfig(rank=rank))
    load_adapters(other, Path("adapters"))


def recomputed(setting: tuple[str, bool]) -> None:
    """Recompute activations of a model, if that is enabled."""
    kind, is_enabled = setting
    if is_enabled:
        network = model()
        network.supports_gradient_checkpointing = kind == "usual"
        type(network).supports_gradient_checkpointing = True
        enable_activation_checkpointing(network)


def frozen(setting: tuple[str, bool]) -> None:
    directory, freezes = setting
    if freezes:
        freeze_routers(load_model(directory))


def scored(directory: str) -> None:
    RewardModel.load(RewardModelConfig(path=directory), Path("model"), 9)


def with_template(template: str | None) -> None:
    """A reward model whose directory has this chat template."""
    Path("bare").mkdir(exist_ok=True)
    shutil.copytree("classifier", "bare", dirs_exist_ok=True)
    settings = json.loads(Path("bare/tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    Path("bare/tokenizer_config.json").write_text(json.dumps(settings))
    Path("bare/chat_template.jinja").unlink(missing_ok=True)
    if template:
        Path("bare/chat_template.jinja").write_text(template)
    scored("bare")


def with_library(directory: str) -> None:
    """A library with its directory in PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        reward_model.import_libraries(["my_classifiers"], "reward.model.external_libs")
    sys.modules.pop("my_classifiers", None)


DIRECTORY = "use a directory with config.json and weights"
CLASSIFIER = "set reward.model.path to a sequence or token classifier"
TARGETS = "policy.lora.target_modules"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 420,
    "head_dim": 8,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 1.0}
RANK_2 = {"path": "rank2", "rank": 2, "alpha": 4.0}
ALL = {"target_modules": ("all-linear",)}


def targets(*names: str) -> Mapping[str, Any]:
    return {"target_modules": names}


CASES = [
    # loading
    case(loaded, "nowhere", DIRECTORY, "model"),
    case(loaded, "empty", "use a Hugging Face model directory, as save_pretrained writes it", "model"),
    case(loaded, "truncated", "use a Hugging Face model directory, as save_pretrained writes it", "model"),
    case(
        with_images,
        "model",
        "add its preprocessor_config.json, as save_pretrained of transformers' image processor writes it",
        "images",
    ),
    case(loaded, "broken", "use an earlier checkpoint, or another model", "model"),
    case(loaded, "diffllama", MODELS_HINT, "model"),
    case(built_without_weights, "damaged", "use a directory in Hugging Face format", "model"),
    case(loaded, "llava", MODELS_HINT, "model"),
    case(without_word, ("diffllama", {}), MODELS_HINT, ("model", {})),
    case(without_word, ("llama", {"forward": None}), MODELS_HINT, ("llama", {})),
    case(without_word, ("llama", {"from_pretrained": None}), MODELS_HINT, ("llama", {})),
    case(overridden, {"router_aux_loss_coef": 0.1}, "remove policy.overrides.router_aux_loss_coef", {}),
    case(overridden, {"hiden_act": "gelu"}, "did you mean policy.overrides.hidden_act?", {"hidden_act": "gelu"}),
    case(overridden, {"zzzzzz": 2}, "mixture/config.json has its settings", {"hidden_act": "gelu"}),
    case(get_preset, "grid-1n", "did you mean 'grid-1m'? valid presets: ", "grid-1m"),
    # layers
    case(attended, {"position_bias": 1.0}, MODELS_HINT, {"position_bias": None}),
    case(attended, {"layout": None}, MODELS_HINT, {}),
    case(mixed, True, "set actor.parallel.context=1 and actor.parallel.ulysses=1", False),
    case(rotated, 5, "limit rollout.max_prompt_tokens + rollout.max_response_tokens, and sft.max_tokens, to 4", 4),
    case(computed_by, "sdap", "policy.attention=sdpa, eager or, on a GPU, ", "sdpa", "eager", None),
    case(computed_by, "flash_attention_2", "policy.attention=sdpa, or policy.attention=null for the", "sdpa", None),
    case(with_liger, (True, False), "pip install liger-kernel, or set actor.memory.liger=false", (False, False)),
    case(with_liger, (True, True), "set actor.memory.liger=false", (False, True)),
    case(recomputed, ("other", True), "set actor.gradient_checkpointing=false", ("other", False)),
    case(frozen, ("model", True), "set policy.freeze_router=false", ("model", False)),
    # adapters
    case(
        adapted,
        {"path": "nowhere"},
        "set policy.lora.path to a directory with adapter_config.json and adapter_model.safetensors",
        RANK_2,
    ),
    case(adapted, {**RANK_2, "rank": 3}, "set policy.lora.rank=2", RANK_2),
    case(adapted, targets("zzz"), "it has down_proj, ", targets("down_proj"), ALL),
    case(
        adapted,
        targets("lm_head", "q_proj"),
        f"{TARGETS}=[q_proj], or {TARGETS}=all-linear",
        targets("q_proj"),
        ALL,
    ),
    case(
        adapted_scaled,
        targets("lm_head", "q_proj"),
        f"{TARGETS}=[q_proj], or {TARGETS}=all-linear",
        targets("q_proj"),
        ALL,
    ),
    case(continued, 4, "use adapters of this model", 2),
    # reward models
    case(scored, "nowhere", "set reward.model.path to a directory with config.json and weights", "classifier"),
    case(scored, "empty", CLASSIFIER, "classifier"),
    case(scored, "truncated", CLASSIFIER, "classifier"),
    case(scored, "model", "use a sequence or token classifier with one output (num_labels 1)", "classifier"),
    case(
        with_template, None, "add the chat template of its training as chat_template.jinja", "{{ messages[0].content }}"
    ),
    case(with_library, "elsewhere", "install it, or add its directory to PYTHONPATH", "libraries"),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, policy_directory: Path, mixture_directory: Path) -> Path:
    """Models that can be loaded, and others."""
    root = tmp_path_factory.mktemp("models")
    (root / "model").symlink_to(policy_directory)
    (root / "mixture").symlink_to(mixture_directory)
    (root / "images").mkdir()
    settings = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    (root / "images/preprocessor_config.json").write_text(json.dumps(settings))
    (root / "llava").mkdir()
    (root / "llava/config.json").write_text('{"model_type": "llava"}')
    save_tiny_model("lfm2", root / "convolutions")
    (root / "empty").mkdir()
    (root / "damaged").mkdir()
    (root / "damaged/config.json").write_text('{"model_type": "not one"}')
    (root / "empty/config.json").write_text("{}")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", **SIZES)).save_pretrained(root / "diffllama")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(root / "llama")
    broken = load_model(policy_directory)
    nn.init.constant_(broken.lm_head.weight, float("nan"))
    broken.save_pretrained(root / "broken")
    classifier = AutoModelForSequenceClassification.from_pretrained(policy_directory, num_labels=1)
    for name in ("classifier", "truncated"):
        classifier.save_pretrained(root / name)
        load_tokenizer(policy_directory).save_pretrained(root / name)
    weights = root / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    adapted_model = load_model(policy_directory)
    add_lora(adapted_model, LoraConfig(rank=2, alpha=4.0))
    save_adapters(adapted_model, root / "rank2", "model")
    (root / "libraries").mkdir()
    (root / "libraries/my_classifiers.py").write_text("")
    return root


@pytest.fixture(autouse=True)
def _directory(directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directories)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_a_model_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_a_model_is_followed() -> None:
    elsewhere = {
        "policies/parallel/": "test_parallel_hints.py follows them",
        "policies/vla/": "test_action_hints.py follows them",
        "policies/gguf_files.py": "another file is the remedy",
    }
    assert not sites_without_case("policies", CASES, elsewhere)
