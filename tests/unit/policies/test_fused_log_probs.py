"""If these fail, tokens are scored wrongly on a CPU, learnt from by a wrong gradient, or a large vocabulary doesn't fit
into memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quintet.kernels.build import find_compiler
from quintet.policies import fused_log_probs as module
from quintet.policies.fused_log_probs import fused_token_statistics

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

TEMPERATURE = 0.7


def plain(head: nn.Linear, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the whole matrix of logits."""
    logprobs = (head(hidden).float() / TEMPERATURE).log_softmax(-1)
    chances = logprobs.exp()
    own = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return own, -(chances * logprobs).sum(-1), chances.square().sum(-1)


def learnt(actual: tuple[Tensor, ...], hidden: Tensor, head: nn.Linear) -> list[Tensor]:
    """Gradients of hidden states and head for a random direction."""
    generator = torch.Generator().manual_seed(5)
    directions = [torch.randn(actual[0].shape, generator=generator) for _ in range(2)]
    loss = sum(((x * d).sum() for x, d in zip(actual[:2], directions, strict=True)), torch.zeros(()))
    return list(torch.autograd.grad(loss, [hidden, head.weight]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [7, 1000])
@pytest.mark.parametrize("vocabulary", [16, 100, 643])
def test_scores_and_gradients_are_those_of_the_whole_matrix(
    dtype: torch.dtype, places: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOGITS_IN_MEMORY", places * vocabulary)
    torch.manual_seed(vocabulary)
    head, targets = nn.Linear(32, vocabulary, bias=False), torch.randint(0, vocabulary, (33,))
    hidden = (3 * torch.randn(33, 32)).requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        actual = fused_token_statistics(head, hidden, targets, TEMPERATURE)
        whole = plain(head, hidden, targets)
    assert actual is not None
    for ours, theirs in zip(actual, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(learnt(actual, hidden, head), learnt(whole, hidden, head), strict=True):
        assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())


def test_passes_share_a_buffer_of_logits_and_keep_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass whose logits wait for its backward pass keeps them while another one runs; a smaller one follows in the
    memory of the larger."""
    monkeypatch.setattr(module, "_free_buffers", {})
    torch.manual_seed(1)
    head = nn.Linear(32, 100, bias=False)
    hidden = [torch.randn(rows, 32, requires_grad=True) for rows in (20, 33)]
    targets = [torch.randint(0, 100, (len(states),)) for states in hidden]
    waiting, later = (fused_token_statistics(head, *each, TEMPERATURE) for each in zip(hidden, targets, strict=True))
    assert waiting is not None
    assert later is not None
    for actual, states, answers in zip((waiting, later), hidden, targets, strict=True):
        expected = learnt(plain(head, states, answers), states, head)
        for ours, theirs in zip(learnt(actual, states, head), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    (buffer,) = module._free_buffers.values()
    assert len(buffer) == 33 * 100
    with torch.no_grad():
        fused_token_statistics(head, hidden[0], targets[0], TEMPERATURE)
    assert [kept.data_ptr() for kept in module._free_buffers.values()] == [buffer.data_ptr()]


def test_a_token_without_a_chance_adds_nothing() -> None:
    """Minus infinity times nothing isn't a number."""
    head = nn.Linear(2, 3, bias=False)
    head.weight.data = torch.tensor([[1e5, 0.0], [0.0, 1.0], [0.0, 1.0]])
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    actual = fused_token_statistics(head, hidden, torch.tensor([0]), 1.0)
    assert actual is not None
    assert [float(x.detach()) for x in actual] == [0.0, 0.0, 1.0]
    assert float(torch.autograd.grad(actual[1].sum(), hidden)[0].abs().max()) == 0.0


@pytest.mark.parametrize(
    "head", [nn.Linear(4, 9), nn.Linear(4, 9, bias=False).double(), nn.Sequential(nn.Linear(4, 9, bias=False))]
)
def test_another_head_is_asked_itself(head: nn.Module) -> None:
    assert fused_token_statistics(head, torch.ones(2, 4), torch.zeros(2, dtype=torch.long), 1.0) is None


def test_a_head_that_somebody_hooked_into_is_asked_itself() -> None:
    head = nn.Linear(4, 9, bias=False)
    head.register_forward_hook(lambda *_: None)
    assert fused_token_statistics(head, torch.ones(2, 4), torch.zeros(2, dtype=torch.long), 1.0) is None


def test_a_second_backward_pass_gives_the_same() -> None:
    head, hidden = nn.Linear(8, 20, bias=False), torch.randn(5, 8, requires_grad=True)
    actual = fused_token_statistics(head, hidden, torch.arange(5), 1.0)
    assert actual is not None
    first, second = (torch.autograd.grad(actual[0].sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
