"""If these fail, models that scale or cap their logits are sampled from another distribution than they are trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintet.config.native.policy import LoraConfig
from quintet.errors import ConfigError
from quintet.policies import fused_log_probs
from quintet.policies.fused_log_probs import fused_token_statistics
from quintet.policies.lora import add_lora, merged_head_weight
from quintet.policies.model_loading import load_model
from quintet.policies.output_head import MASKED_LOGIT, LogitTransform, OutputHead, head_logits, install_output_head
from support.tiny_families import save_tiny_model

TEMPERATURE = 0.7


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-3.0, 0.0, 6.0]),
        ({"logit_scale": 0.5}, [-1.5, 0.0, 3.0]),
        ({"logits_scaling": 4.0}, [-0.75, 0.0, 1.5]),
        ({"final_logit_softcapping": 3.0}, [-2.2847825, 0.0, 2.8920828]),
        ({"logits_scaling": 2.0, "final_logit_softcapping": 1.5}, [-1.1423912, 0.0, 1.4460414]),
        ({"final_logit_softcapping": None, "logit_scale": None}, [-3.0, 0.0, 6.0]),
    ],
)
def test_logits_are_scaled_and_capped_as_the_configuration_says(
    settings: dict[str, Any], expected: list[float]
) -> None:
    """3 · tanh(1) = 2.2848 and 3 · tanh(2) = 2.8921."""
    transform = LogitTransform.from_config(SimpleNamespace(**settings))
    torch.testing.assert_close(transform.apply(torch.tensor([-3.0, 0.0, 6.0])), torch.tensor(expected))


def gradients(logprobs: Tensor, entropy: Tensor, hidden: Tensor, head: nn.Linear) -> list[Tensor]:
    return list(torch.autograd.grad((logprobs * torch.arange(1.0, 34.0) + entropy).sum(), [hidden, head.weight]))


@pytest.mark.parametrize("chunk", [7, 1000])
def test_fused_log_probs_of_a_scaled_head_with_masked_tokens_are_those_of_its_logits(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_log_probs, "MAX_LOGITS_IN_MEMORY", chunk * 100)
    torch.manual_seed(3)
    head = OutputHead(nn.Parameter(torch.randn(100, 32)), [5, 99], LogitTransform(scale=0.25))
    hidden, targets = (3 * torch.randn(33, 32)).requires_grad_(), torch.arange(33) + 6
    actual = fused_token_statistics(head, hidden, targets, TEMPERATURE)
    if actual is None:
        pytest.skip("no C++ compiler")
    logprobs = (head(hidden) / TEMPERATURE).log_softmax(-1)
    assert (head(hidden)[:, [5, 99]] == MASKED_LOGIT).all()
    chosen, entropy = logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(actual[0], chosen, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(actual[1], entropy, atol=2e-5, rtol=1e-5)
    for ours, theirs in zip(
        gradients(*actual[:2], hidden, head), gradients(chosen, entropy, hidden, head), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_soft_capped_head_is_not_computed_by_the_fused_kernels() -> None:
    head = OutputHead(nn.Parameter(torch.randn(100, 32)), transform=LogitTransform(softcap=5.0))
    assert fused_token_statistics(head, torch.randn(3, 32), torch.arange(3), TEMPERATURE) is None


def test_a_copied_head_keeps_its_masked_tokens_and_its_adapters() -> None:
    """Otherwise a divergence from a reference would count tokens that are never sampled."""
    model: Any = nn.Module()
    model.lm_head = OutputHead(nn.Parameter(torch.randn(10, 4)), [3])
    model.config = SimpleNamespace(tie_word_embeddings=False, get_text_config=lambda: SimpleNamespace())
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    inject_adapter_in_model(PeftLoraConfig(r=2, target_modules=["lm_head"]), model, "default")
    nn.init.normal_(model.lm_head.lora_B["default"].weight)
    hidden = torch.randn(5, 4)
    logits = head_logits(model.lm_head, merged_head_weight(model.lm_head), hidden)
    others = [token for token in range(10) if token != 3]
    torch.testing.assert_close(logits[:, others], model.lm_head(hidden)[:, others])
    assert (logits[:, 3] == MASKED_LOGIT).all()


def test_adapters_of_a_scaled_head_are_refused(tmp_path: Path) -> None:
    """An adapter's product would be added behind the scale."""
    save_tiny_model("granite", tmp_path, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match="the model scales or caps") as refused:
        add_lora(load_model(tmp_path), LoraConfig(rank=2, target_modules=("q_proj", "lm_head")))
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("policy.lora.target_modules=[q_proj]")
    add_lora(load_model(tmp_path), LoraConfig(rank=2, target_modules=("q_proj",)))


def test_a_model_without_a_transform_keeps_its_head() -> None:
    head = nn.Linear(4, 10, bias=False)
    model = SimpleNamespace(lm_head=head, config=SimpleNamespace(get_text_config=lambda: SimpleNamespace()))
    install_output_head(model)
    assert model.lm_head is head
