"""If these fail, a hint about parallelism leads nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hint_cases import HintCase, case, name_of, sites_without_case
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from quintet.config.native.policy import LoraConfig
from quintet.policies.attention import PackedLayout
from quintet.policies.attention_backends import AttentionOptions, use_attention_options
from quintet.policies.lora import add_lora
from quintet.policies.model_loading import load_model
from quintet.policies.parallel import pipeline_stages
from quintet.policies.parallel.context_parallel import ContextParallelLayout
from quintet.policies.parallel.expert_parallel import apply_expert_parallel
from quintet.policies.parallel.tensor_parallel import check_tensor_parallel
from quintet.policies.parallel.ulysses_parallel import check_ulysses

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 420, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def family(kind: str, **changes: Any) -> Any:
    """The configuration of a small model."""
    return AutoConfig.for_model(kind, **{**SMALL, **HEADS, **changes})


def expert_parallel(setting: tuple[str, int]) -> None:
    directory, ranks = setting
    mesh: Any = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: ranks, get_group=lambda: None)
    apply_expert_parallel(load_model(directory), mesh)


def pipelined(setting: tuple[int, int, bool]) -> None:
    """Stages, virtual stages, and whether the model has adapters."""
    stages, virtual, has_adapters = setting
    network = load_model("model")
    if has_adapters:
        add_lora(network, LoraConfig())
    if stages * virtual > 1:
        pipeline_stages._check(network, 2, stages, virtual, "actor")


def staged(setting: tuple[str, int]) -> None:
    """The layers of an architecture one after the other."""
    kind, stages = setting
    if stages > 1:
        body = AutoModel.from_config(family(kind, embedding_multiplier=12.0)).eval()
        reference = pipeline_stages._probe(body)
        pipeline_stages._insert_base_class(body, pipeline_stages.PipelineStageBody)
        body.num_stages, body.input_states = 1, None
        pipeline_stages._verify_stages(reference, body, 2, "actor")


def tensor_parallel(setting: tuple[str, Mapping[str, Any], int]) -> None:
    kind, sizes, ranks = setting
    if ranks > 1:
        check_tensor_parallel(
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **HEADS, **sizes})), ranks
        )


def tensor_parallel_adapters(setting: tuple[str, int]) -> None:
    target, ranks = setting
    network = AutoModelForCausalLM.from_config(family("qwen2", tie_word_embeddings=False))
    add_lora(network, LoraConfig(target_modules=(target,)))
    if ranks > 1:
        check_tensor_parallel(network, ranks)


def ulysses(ranks: int) -> None:
    check_ulysses(12, 4, ranks)


def with_soft_cap(ranks: int) -> None:
    """Attention with soft-capped scores, and context parallelism over so many ranks."""
    layout, states = PackedLayout(torch.tensor([3])), torch.ones(3, 1, 2)
    if ranks > 1:
        layout = ContextParallelLayout(layout.structure, SimpleNamespace(rank=lambda: 0, size=lambda: 2))  # type: ignore[arg-type, assignment]
    with use_attention_options(AttentionOptions(softcap=5.0)):
        layout.attend(0, states, states, states, 1.0)


def windowed(setting: tuple[int, int]) -> None:
    """Attention of three tokens with a window, and context parallelism over so many ranks."""
    window, ranks = setting
    layout, states = PackedLayout(torch.tensor([3])), torch.ones(3, 1, 2)
    if ranks > 1:
        layout = ContextParallelLayout(layout.structure, SimpleNamespace(rank=lambda: 0, size=lambda: 2))  # type: ignore[arg-type, assignment]
    if ranks == 1 or window < 3:
        layout.attend(0, states, states, states, 1.0, window if window < 3 else None)


UNEVEN = {"intermediate_size": 54, "num_key_value_heads": 4}
CASES = [
    case(expert_parallel, ("model", 2), "set actor.parallel.expert=1, or use a", ("mixture", 2)),
    case(expert_parallel, ("mixture", 3), "valid values: 1, 2, 4", ("mixture", 1), ("mixture", 2), ("mixture", 4)),
    case(pipelined, (1, 2, False), "set actor.parallel.virtual_pipeline=1, or", (1, 1, False)),
    case(pipelined, (3, 1, False), "reduce either: their product must be at most 2", (2, 1, False)),
    case(pipelined, (2, 2, False), "reduce either: their product must be at most 2", (2, 1, False)),
    case(pipelined, (2, 1, True), "set actor.parallel.pipeline=1; the base model's weights are sharded", (1, 1, True)),
    case(staged, ("granite", 2), "set actor.parallel.pipeline=1, or use", ("granite", 1), ("qwen2", 2)),
    case(tensor_parallel, ("gpt_neox", {}, 2), "supported: ", ("qwen2", {}, 2), ("gpt_neox", {}, 1)),
    case(tensor_parallel, ("qwen2", {}, 3), "nearest valid value: actor.parallel.tensor=2", ("qwen2", {}, 2)),
    case(
        tensor_parallel,
        ("qwen2", UNEVEN, 4),
        "nearest valid value: actor.parallel.tensor=2",
        ("qwen2", UNEVEN, 2),
    ),
    case(
        tensor_parallel_adapters,
        ("lm_head", 2),
        "remove them from policy.lora.target_modules, or set actor.parallel.tensor=1",
        ("q_proj", 2),
        ("lm_head", 1),
    ),
    case(with_soft_cap, 2, "set actor.parallel.context=1", 1),
    case(windowed, (2, 2), "set actor.parallel.context=1, or limit the length of sequences to 2", (2, 1), (3, 2)),
    case(ulysses, 5, "nearest valid value: actor.parallel.ulysses=4", 4),
]


@pytest.fixture(autouse=True)
def _directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path, mixture_directory: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(policy_directory)
    (tmp_path / "mixture").symlink_to(mixture_directory)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_parallelism_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_parallelism_is_followed() -> None:
    assert not sites_without_case("policies/parallel", CASES, ())
