"""If these fail, LoRA trains what it shouldn't, or a merged model isn't the one that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.attention import PackedLayout
from quintet.policies.lora import (
    add_lora,
    has_lora,
    iter_merged_weights,
    load_adapters,
    merge_adapters,
    save_adapters,
)
from quintet.policies.model_loading import enable_activation_checkpointing, load_model
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.token_statistics import log_probs_and_entropy

SMALL = LoraConfig(rank=2, alpha=8.0)


def adapted(directory: Path, config: LoraConfig = SMALL) -> torch.nn.Module:
    """A model whose adapters do something: both matrices are random."""
    model = load_model(directory)
    add_lora(model, config, seed=1)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def packed() -> PackedBatch:
    tokens = torch.tensor([5, 9, 11, 3, 8, 14, 2])
    return PackedBatch(tokens, torch.arange(7), PackedLayout(torch.tensor([7])), torch.arange(6), tokens[1:])


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return log_probs_and_entropy(model, packed())[0]


def test_new_adapters_change_nothing_and_alone_get_gradients(policy_directory: Path) -> None:
    model = load_model(policy_directory)
    before, kind = logprobs(model), type(model)
    add_lora(model, SMALL)
    assert type(model) is kind
    assert torch.equal(logprobs(model), before)
    enable_activation_checkpointing(model)
    log_probs_and_entropy(model, packed())[0].sum().backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {name for name, _ in model.named_parameters() if ".lora_" in name}
    # seven linear layers in each of two blocks, two matrices each; neither embedding nor head
    assert len(touched) == 7 * 2 * 2


def test_first_values_follow_from_the_seed_alone(policy_directory: Path) -> None:
    models = []
    for seed in (1, 1, 2):
        torch.rand(3)
        models.append(load_model(policy_directory))
        add_lora(models[-1], SMALL, seed=seed)
    first, again, other = ({n: p for n, p in m.named_parameters() if "lora_A" in n} for m in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_product_is_scaled_by_alpha_over_rank(policy_directory: Path) -> None:
    """By hand: rank 1, B = 1 in its first row, A = 1 in its first column: W[0, 0] grows by alpha / rank."""
    model = load_model(policy_directory)
    name = "model.layers.0.self_attn.q_proj"
    before = model.get_submodule(name).weight.detach().clone()
    add_lora(model, LoraConfig(rank=1, alpha=0.5, target_modules=("q_proj",)))
    layer = model.get_submodule(name)
    with torch.no_grad():
        for matrix in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            matrix.zero_()[0, 0] = 1.0
    difference = dict(iter_merged_weights(model))[f"{name}.weight"] - before
    assert difference[0, 0] == pytest.approx(0.5)
    assert int((difference.abs() > 1e-6).sum()) == 1


def test_merged_weights_say_what_the_adapted_model_says(policy_directory: Path, tmp_path: Path) -> None:
    model = adapted(policy_directory)
    result, base = logprobs(model), logprobs(load_model(policy_directory))
    assert (result - base).abs().max() > 0.1
    model.save_pretrained(tmp_path / "merged", state_dict=dict(iter_merged_weights(model)))
    assert has_lora(model)
    assert torch.equal(logprobs(model), result)
    plain, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert plain.state_dict().keys() == load_model(policy_directory).state_dict().keys()
    torch.testing.assert_close(logprobs(load_model(tmp_path / "merged")), result, atol=1e-5, rtol=1e-5)


def test_merging_in_place_leaves_a_plain_model(policy_directory: Path) -> None:
    model = adapted(policy_directory)
    actual, whole = logprobs(model), dict(iter_merged_weights(model))
    merge_adapters(model)
    assert not has_lora(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert dict(model.named_parameters()).keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.named_parameters())
    torch.testing.assert_close(logprobs(model), actual, atol=1e-5, rtol=1e-5)


def test_stored_adapters_are_pefts_and_come_back_bit_by_bit(policy_directory: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted(policy_directory)
    save_adapters(model, tmp_path / "a", policy_directory)
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        policy_directory
    )
    theirs = PeftModel.from_pretrained(load_model(policy_directory), tmp_path / "a")
    assert torch.equal(logprobs(theirs.base_model.model), logprobs(model))
    ours = load_model(policy_directory)
    add_lora(ours, SMALL.model_copy(update={"path": str(tmp_path / "a")}))
    assert torch.equal(logprobs(ours), logprobs(model))
    assert ours.get_submodule("model.layers.0.mlp.up_proj").lora_A["default"].weight.requires_grad


@pytest.mark.parametrize(
    ("targets", "adapted_layers"),
    [(("q_proj", "v_proj"), 4), ((r".*layers\.1\.mlp\..*_proj",), 3), (("all-linear",), 14), (("o_proj",), 2)],
)
def test_layers_are_chosen_by_name_or_pattern(
    policy_directory: Path, targets: tuple[str, ...], adapted_layers: int
) -> None:
    model = load_model(policy_directory)
    add_lora(model, LoraConfig(rank=1, target_modules=targets))
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == adapted_layers


@pytest.mark.parametrize(
    ("targets", "message"), [(("qq_proj",), "no such layers"), (("lm_head",), "embedding and head"), (("q",), "q_proj")]
)
def test_layers_that_arent_there_are_refused(policy_directory: Path, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        add_lora(load_model(policy_directory), LoraConfig(target_modules=targets), key="sft.lora")
    assert message in str(error.value)
    assert error.value.key == "sft.lora.target_modules"


def test_adapters_that_dont_fit_are_refused(policy_directory: Path, tmp_path: Path) -> None:
    model = adapted(policy_directory)
    save_adapters(model, tmp_path / "a", policy_directory)
    adapter_path = str(tmp_path / "a")
    with pytest.raises(ConfigError, match="rank = 4") as refused:
        add_lora(load_model(policy_directory), LoraConfig(rank=4, alpha=8.0, path=adapter_path), key="sft.lora")
    assert refused.value.hint == "set sft.lora.rank=2"
    with pytest.raises(MachineError, match="no adapters at"):
        add_lora(load_model(policy_directory), LoraConfig(path=str(tmp_path)))
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, tmp_path / "a/adapter_model.safetensors")
    with pytest.raises(MachineError, match="is missing"):
        load_adapters(model, tmp_path / "a")
    (tmp_path / "a/adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(MachineError, match="cannot read adapters"):
        load_adapters(model, tmp_path / "a")


def peft_adapters(base: Path, directory: Path, **options: Any) -> torch.nn.Module:
    """Random adapters written by peft, and the model with them."""
    options = {"init_lora_weights": False, "r": 2, "lora_alpha": 8, **options}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), PeftLoraConfig(task_type="CAUSAL_LM", **options))
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [3]},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
    ],
    ids=str,
)
def test_adapters_that_would_train_another_model_are_refused(
    policy_directory: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    peft_adapters(policy_directory, tmp_path / "a", **{"target_modules": ["q_proj"], **options})
    config = SMALL.model_copy(update={"path": str(tmp_path / "a")})
    with pytest.raises(ConfigError, match=r"policy\.lora\.path = .*quintet export"):
        add_lora(load_model(policy_directory), config)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 3}},
        {"exclude_modules": ["q_proj"]},
    ],
    ids=str,
)
def test_adapters_of_peft_are_merged_with_their_own_scales(
    policy_directory: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    theirs = peft_adapters(policy_directory, tmp_path / "a", target_modules="all-linear", **options)
    model = load_model(policy_directory)
    add_lora(model, SMALL.model_copy(update={"path": str(tmp_path / "a")}))
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in iter_merged_weights(model):
        torch.testing.assert_close(tensor, merged[name], atol=1e-5, rtol=1e-5)


def test_all_linear_layers_of_a_mixture_are_those_outside_its_experts(mixture_directory: Path, tmp_path: Path) -> None:
    """peft adapts the stacked experts, too, which nothing here can merge."""
    model = adapted(mixture_directory)
    names = {name.rpartition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    result = logprobs(model)
    save_adapters(model, tmp_path / "a", mixture_directory)
    again = load_model(mixture_directory)
    add_lora(again, SMALL.model_copy(update={"path": str(tmp_path / "a")}))
    assert torch.equal(logprobs(again), result)
    merge_adapters(model)
    torch.testing.assert_close(logprobs(model), result, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("targets", [("gate_proj", "up_proj"), ("q_proj", "down_proj"), ("gate",), ("gate_proj",)])
def test_adapters_of_experts_are_refused(mixture_directory: Path, tmp_path: Path, targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="adapters of experts and routers are not supported"):
        add_lora(load_model(mixture_directory), LoraConfig(rank=2, target_modules=targets))
    if targets != ("gate_proj",):
        peft_adapters(mixture_directory, tmp_path / "a", target_modules=list(targets))
        with pytest.raises(ConfigError, match="not supported"):
            add_lora(load_model(mixture_directory), SMALL.model_copy(update={"path": str(tmp_path / "a")}))
