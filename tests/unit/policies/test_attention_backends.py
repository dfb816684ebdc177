"""If these fail, attention that was named is another one, or isn't attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quintet.errors import ConfigError
from quintet.policies import attention_backends
from quintet.policies.attention import PackedLayout
from quintet.policies.attention_backends import (
    AttentionOptions,
    scaled_dot_product_attention,
    set_attention_backend,
    use_attention_options,
)
from quintet.policies.model_loading import load_model
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.token_statistics import log_probs_and_entropy


def packed() -> PackedBatch:
    """A prompt of three tokens and replies of four and two."""
    layout = PackedLayout(torch.tensor([4, 2]), 3)
    tokens = torch.tensor([5, 9, 11, 3, 8, 14, 2, 7, 6])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 3, 4])
    return PackedBatch(tokens, positions, layout, torch.tensor([2, 3, 4, 7]), torch.tensor([3, 8, 14, 6]))


@pytest.mark.parametrize("masked", [False, True])
def test_the_plain_product_by_hand(masked: bool) -> None:
    """One head of two values: scores ln 1 and ln 3 give weights a quarter and three quarters."""
    query, key = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[0.0], [3.0]]]]).log1p() / torch.tensor(4.0).log()
    value = torch.tensor([[[[4.0], [8.0]]]])
    mask = torch.tensor([[True, False], [True, True]]) if masked else None
    with use_attention_options(AttentionOptions("eager")):
        out = scaled_dot_product_attention(query, key, value, mask, float(torch.tensor(3.0).log()))
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))


@pytest.mark.proves("rlinf", "actor.model.attn_implementation")
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_every_kernel_gives_the_same_log_probs_and_gradients(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    called: list[str] = []
    for name in ("_eager_attention", "_torch_attention"):
        function = getattr(attention_backends, name)

        def counted(*value: Tensor, name: str = name, function: object = function) -> Tensor:
            called.append(name)
            return function(*value)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(attention_backends, name, counted)
    results = []
    for named in (None, kind):
        model = load_model(policy_directory)
        set_attention_backend(model, named)
        called.clear()
        logprobs = log_probs_and_entropy(model, packed())[0]
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    assert set(called) == {"_eager_attention" if kind == "eager" else "_torch_attention"}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_flash_attention_comes_first_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is told is held here; its kernels need CUDA."""

    class Parameter:
        device = torch.device("cuda")

    asked: list[object] = []
    layer = nn.Linear(1, 1)
    layer.layer_idx = 0  # type: ignore[assignment]
    monkeypatch.setattr(layer, "parameters", lambda: iter([Parameter()]))
    set_attention_backend(layer, "flash_attention_2")
    own = attention_backends.sdpa_kernel
    monkeypatch.setattr(
        attention_backends, "sdpa_kernel", lambda *value, **keywords: asked.append(value[0]) or own(*value, **keywords)
    )
    with use_attention_options(AttentionOptions(attention_backends.attention_backend(layer))):
        query = torch.randn(1, 2, 3, 4)
        scaled_dot_product_attention(query, query, query, None, 0.5)
    assert asked == [attention_backends.FLASH_FIRST]
    assert attention_backends.FLASH_FIRST[0] is attention_backends.SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize(
    ("kind", "message"), [("flash_attention_2", "on the CPU"), ("flash_attention_3", "unknown attention backend")]
)
def test_what_isnt_there_is_refused_by_name(policy_directory: Path, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        set_attention_backend(load_model(policy_directory), kind)
    assert error.value.key == "policy.attention"
