"""If these fail, a student is trained towards other distributions than the teacher's, or by another divergence than its
name says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quintet.algorithms.distillation import teacher_divergence
from quintet.algorithms.losses.targets import PolicyLossInputs
from quintet.algorithms.objective import DistillationObjective
from quintet.config.native.training import DistillationConfig

P, Q = (0.7, 0.2, 0.1), (0.4, 0.4, 0.2)
"""Probabilities of teacher and student."""


def logits(probabilities: tuple[float, ...]) -> Tensor:
    return torch.tensor([probabilities]).log()


def kl(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(left, right, strict=True))


def mixed(share: float, left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(share * a + (1 - share) * b for a, b in zip(left, right, strict=True))


FORWARD, REVERSE = kl(P, Q), kl(Q, P)
# ascending: 0.1, 0.2, 0.7; the sums 0.1 and 0.3 are at most one half, so 0.7 alone is the head
HEAD, TAIL = abs(0.7 - 0.4), abs(0.2 - 0.4) + abs(0.1 - 0.2)
EXPECTED = {
    "forward_kl": FORWARD,
    "reverse_kl": REVERSE,
    "adaptive_kl": (HEAD * FORWARD + TAIL * REVERSE) / (HEAD + TAIL),
    "skewed_forward_kl": kl(P, mixed(0.1, P, Q)),
    "skewed_reverse_kl": kl(Q, mixed(0.1, Q, P)),
    "js_divergence": (kl(P, mixed(0.5, P, Q)) + kl(Q, mixed(0.5, P, Q))) / 2,
}


@pytest.mark.parametrize("objective", EXPECTED)
def test_each_divergence_is_that_of_its_name(objective: str) -> None:
    config = DistillationConfig(objective=objective)
    assert float(teacher_divergence(logits(Q), logits(P), config)) == pytest.approx(EXPECTED[objective], rel=1e-5)
    assert float(teacher_divergence(logits(P), logits(P), config)) == pytest.approx(0.0, abs=1e-6)


# from ROLL's `VariousDivergence`, release 0.3, for these logits: with the three likeliest tokens, and with all
STUDENT, TEACHER = (0.5, -1.25, 2.0, 0.25, -0.75), (1.5, 0.0, 0.75, -2.0, 0.25)
OF_ROLL = {
    "forward_kl": (0.415914, 0.496576),
    "reverse_kl": (0.420308, 0.564633),
    "adaptive_kl": (0.416336, 0.516413),
    "skewed_forward_kl": (0.256326, 0.31025),
    "skewed_reverse_kl": (0.256779, 0.313077),
    "js_divergence": (0.100703, 0.123022),
}


@pytest.mark.parametrize("objective", OF_ROLL)
def test_each_divergence_has_rolls_values(objective: str) -> None:
    options = {"temperature": 1.25, "teacher_temperature": 0.8, "alpha": 0.4, "skew": 0.2}
    for top_k, expected in zip((3, 0), OF_ROLL[objective], strict=True):
        config = DistillationConfig(objective=objective, top_k=top_k, **options)
        value = teacher_divergence(torch.tensor([STUDENT]), torch.tensor([TEACHER]), config)
        assert float(value) == pytest.approx(expected, abs=2e-6)


def test_only_the_teachers_likeliest_tokens_are_compared_and_fill_the_distribution() -> None:
    """Of two tokens: 7/9 and 2/9 in the teacher, 1/2 each in the student."""
    config = DistillationConfig(top_k=2)
    expected = kl((7 / 9, 2 / 9), (0.5, 0.5))
    assert float(teacher_divergence(logits(Q), logits(P), config)) == pytest.approx(expected, rel=1e-5)
    every = DistillationConfig(top_k=0)
    assert float(teacher_divergence(logits(Q), logits(P), every)) == pytest.approx(FORWARD, rel=1e-5)


def test_temperatures_flatten_both_distributions_or_the_teachers() -> None:
    def flattened(probabilities: tuple[float, ...], temperature: float) -> tuple[float, ...]:
        powers = [p ** (1 / temperature) for p in probabilities]
        return tuple(power / sum(powers) for power in powers)

    config = DistillationConfig(temperature=2.0, teacher_temperature=1.5)
    expected = kl(flattened(P, 3.0), flattened(Q, 2.0))
    assert float(teacher_divergence(logits(Q), logits(P), config)) == pytest.approx(expected, rel=1e-5)


def test_further_tokens_of_a_larger_vocabulary_are_left_out() -> None:
    larger = torch.cat([logits(P), torch.tensor([[5.0, 1.0]])], 1)
    config = DistillationConfig(top_k=0)
    assert float(teacher_divergence(logits(Q), larger, config)) == pytest.approx(FORWARD, rel=1e-5)


def test_excluded_tokens_count_nothing() -> None:
    student, teacher = (torch.cat([each, torch.tensor([[-math.inf]])], 1) for each in (logits(Q), logits(P)))
    assert float(teacher_divergence(student, teacher, DistillationConfig())) == pytest.approx(FORWARD, rel=1e-5)


@pytest.mark.parametrize("objective", EXPECTED)
def test_the_gradient_leads_to_the_teacher(objective: str) -> None:
    config = DistillationConfig(objective=objective)
    student = logits(Q).requires_grad_()
    for _ in range(400):
        (gradient,) = torch.autograd.grad(teacher_divergence(student, logits(P), config).sum(), student)
        student = (student.detach() - gradient).requires_grad_()
    assert student.softmax(-1).tolist()[0] == pytest.approx(P, abs=0.01)


def test_the_loss_mixes_cross_entropy_and_divergence_by_weight() -> None:
    """Two tokens of weight 1/2: cross-entropy (1 + 3) / 2 = 2, divergence (0.5 + 1.5) / 2 = 1."""
    targets = PolicyLossInputs(
        weights=torch.full((2,), 0.5),
        old_logprobs=torch.zeros(2),
        advantages=torch.zeros(2),
        divergence=torch.tensor([0.5, 1.5]),
    )
    objective = DistillationObjective(DistillationConfig(weight=0.25))
    loss, metrics = objective(torch.tensor([-1.0, -3.0]), torch.zeros(2), targets)
    assert float(loss) == pytest.approx(0.75 * 2.0 + 0.25 * 1.0)
    assert (float(metrics["sft/loss"]), float(metrics["sft/distillation_loss"])) == (2.0, 1.0)
