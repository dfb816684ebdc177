"""If these fail, attention that was named is another one, or isn't attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quintet.errors import ConfigError
from quintet.policies import attention_kernels
from quintet.policies.attention import PackedLayout
from quintet.policies.attention_kernels import computed_by, product, use_attention
from quintet.policies.causal_lm import Packed, load_model, token_statistics


def packed() -> Packed:
    """A prompt of three tokens and replies of four and two."""
    layout = PackedLayout(torch.tensor([4, 2]), 3)
    tokens = torch.tensor([5, 9, 11, 3, 8, 14, 2, 7, 6])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 3, 4])
    return Packed(tokens, positions, layout, torch.tensor([2, 3, 4, 7]), torch.tensor([3, 8, 14, 6]))


@pytest.mark.parametrize("masked", [False, True])
def test_the_plain_product_by_hand(masked: bool) -> None:
    """One head of two values: scores ln 1 and ln 3 give weights a quarter and three quarters."""
    query, key = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[0.0], [3.0]]]]).log1p() / torch.tensor(4.0).log()
    value = torch.tensor([[[[4.0], [8.0]]]])
    mask = torch.tensor([[True, False], [True, True]]) if masked else None
    with computed_by("eager"):
        out = product(query, key, value, mask, float(torch.tensor(3.0).log()))
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_every_kernel_gives_the_same_log_probs_and_gradients(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    called: list[str] = []
    for name in ("_plain", "_torchs"):
        function = getattr(attention_kernels, name)

        def counted(*given: Tensor, name: str = name, function: object = function) -> Tensor:
            called.append(name)
            return function(*given)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(attention_kernels, name, counted)
    told = []
    for named in (None, kind):
        model = load_model(policy_directory)
        use_attention(model, named)
        called.clear()
        logprobs = token_statistics(model, packed())[0]
        logprobs.sum().backward()
        told.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    assert set(called) == {"_plain" if kind == "eager" else "_torchs"}
    for one, other in zip(*told, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_flash_attention_comes_first_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is told is held here; its kernels need CUDA."""

    class Parameter:
        device = torch.device("cuda")

    asked: list[object] = []
    layer = nn.Linear(1, 1)
    layer.layer_idx = 0  # type: ignore[assignment]
    monkeypatch.setattr(layer, "parameters", lambda: iter([Parameter()]))
    use_attention(layer, "flash_attention_2")
    own = attention_kernels.sdpa_kernel
    monkeypatch.setattr(
        attention_kernels, "sdpa_kernel", lambda *given, **words: asked.append(given[0]) or own(*given, **words)
    )
    with computed_by(attention_kernels.attention_kernel(layer)):
        query = torch.randn(1, 2, 3, 4)
        product(query, query, query, None, 0.5)
    assert asked == [attention_kernels.FLASH_FIRST]
    assert attention_kernels.FLASH_FIRST[0] is attention_kernels.SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize(("kind", "told"), [("flash_attention_2", "on the CPU"), ("flash_attention_3", "no such")])
def test_what_isnt_there_is_refused_by_name(policy_directory: Path, kind: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        use_attention(load_model(policy_directory), kind)
    assert error.value.key == "policy.attention"
