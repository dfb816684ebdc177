"""If these fail, a policy with tensor parallelism learns something else than one on a single device."""

from __future__ import annotations

from typing import Any

import pytest
from model_parallel_ranks import Case, assert_agrees, build_model, run_cases

from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError
from quintet.policies.lora import add_lora
from quintet.policies.parallel.tensor_parallel import check_tensor_parallel

CASES = {
    "qwen2": Case("qwen2", tensor=2),
    "qwen2 by tokens": Case("qwen2", tensor=2, sequence=True),
    "qwen3": Case("qwen3", tensor=2, tied=False),
    "qwen3 by tokens": Case("qwen3", tensor=2, sequence=True),
    "llama by tokens": Case("llama", tensor=2, kv_heads=4, sequence=True, tied=False),
    "mistral": Case("mistral", tensor=2),
    "recomputed, logits in pieces": Case(tensor=2, sequence=True, recompute=True, chunked_logits=True),
    "mixture": Case("qwen3_moe", tensor=2, tied=False),
    "mixture by tokens": Case("qwen3_moe", tensor=2, sequence=True),
    "adapters": Case("llama", tensor=2, tied=False, lora=True),
    "adapters by tokens": Case("qwen3", tensor=2, tied=False, lora=True, sequence=True),
    "critic": Case(tensor=2, critic=True),
    "critic by tokens": Case("qwen3", tensor=2, critic=True, sequence=True),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(2, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_those_of_the_whole_model(results: dict[str, dict[str, Any]], name: str) -> None:
    """Also with tied embeddings, and a vocabulary of 97 tokens that does not divide."""
    assert_agrees(results[name])


@pytest.mark.parametrize("name", [name for name in CASES if "mixture" not in name])
def test_a_rank_keeps_half_of_the_weights(results: dict[str, dict[str, Any]], name: str) -> None:
    """Except norms, and one of the two matrices of adapters."""
    assert results[name]["parameter_share"] < (0.55 if CASES[name].lora else 0.51)


@pytest.mark.parametrize(
    ("model", "ranks", "messages"),
    [
        (
            Case(kv_heads=2),
            4,
            ["does not divide the 2 key-value heads", "nearest valid value: actor.parallel.tensor=2"],
        ),
        (
            Case(kv_heads=4),
            3,
            ["does not divide the 4 key-value heads", "nearest valid value: actor.parallel.tensor=2"],
        ),
        (Case("gpt_neox"), 2, ["does not support", "llama, mistral, qwen2, qwen3, qwen3_moe"]),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(model: Case, ranks: int, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_tensor_parallel(build_model(model), ranks)
    assert all(message in str(error.value) for message in messages)
    assert error.value.key == "actor.parallel.tensor"


def test_a_head_with_adapters_is_refused() -> None:
    model = build_model(Case(tied=False))
    add_lora(model, LoraConfig(rank=2, target_modules=("lm_head",)))
    with pytest.raises(ConfigError, match=r"remove them from policy\.lora\.target_modules"):
        check_tensor_parallel(model, 2)
