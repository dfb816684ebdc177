"""Divergence of a student's distributions from a teacher's, with gradients for the student, as in ROLL's distillation.

With T = `temperature`, T' = `teacher_temperature` and logits s of the student and t of the teacher, over the tokens K
that the teacher finds likeliest (`top_k`; 0 takes all), p is the softmax of t_K / (T T') and q that of s_K / T:

- `forward_kl` KL(p ‖ q) = Σ p (log p - log q); `reverse_kl` KL(q ‖ p)
- `adaptive_kl` (h KL(p ‖ q) + r KL(q ‖ p)) / (h + r): r sums |p - q| over the unlikeliest tokens, up to a cumulated p
  of `alpha`, and h over the others; Wu et al. 2024 (arXiv:2404.02657)
- `skewed_forward_kl` KL(p ‖ λ p + (1 - λ) q), `skewed_reverse_kl` KL(q ‖ (1 - λ) p + λ q), λ = `skew`; Ko et al. 2024
  (arXiv:2402.03898)
- `js_divergence` (KL(p ‖ m) + KL(q ‖ m)) / 2, m = (p + q) / 2
"""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.config.native.training import DistillationConfig

TINY = 1e-9
"""Added to probabilities in the logarithms of `js_divergence`, as in ROLL."""


def teacher_divergence(student: Tensor, teacher: Tensor, config: DistillationConfig) -> Tensor:
    """Return the divergence per token, float32 [m], from logits [m, vocabulary]; see above.

    If one vocabulary is larger, its further tokens are left out.
    """
    vocabulary = min(student.shape[-1], teacher.shape[-1])
    student = student[:, :vocabulary].float() / config.temperature
    teacher = teacher[:, :vocabulary].float() / (config.temperature * config.teacher_temperature)
    if config.top_k:
        teacher, likeliest = teacher.topk(min(config.top_k, vocabulary), -1)
        student = student.gather(-1, likeliest)
    terms = _terms(student.log_softmax(-1), teacher.log_softmax(-1), config)
    return terms.masked_fill(student.isinf() | teacher.isinf(), 0.0).sum(-1)


def _terms(student: Tensor, teacher: Tensor, config: DistillationConfig) -> Tensor:
    """Return the summands, [m, k], from log-probs."""
    q, p = student.exp(), teacher.exp()
    if config.objective == "forward_kl":
        return p * (teacher - student)
    if config.objective == "reverse_kl":
        return q * (student - teacher)
    if config.objective == "adaptive_kl":
        share = _forward_share(q.detach(), p, config.alpha)[:, None]
        return share * p * (teacher - student) + (1.0 - share) * q * (student - teacher)
    if config.objective == "skewed_forward_kl":
        return p * (teacher - (config.skew * p + (1.0 - config.skew) * q).log())
    if config.objective == "skewed_reverse_kl":
        return q * (student - ((1.0 - config.skew) * p + config.skew * q).log())
    middle = ((p + q) / 2.0 + TINY).log()
    return (p * ((p + TINY).log() - middle) + q * ((q + TINY).log() - middle)) / 2.0


def _forward_share(q: Tensor, p: Tensor, alpha: float) -> Tensor:
    """Return the share of the forward divergence in `adaptive_kl`, [m]."""
    ascending, order = p.sort(-1)
    gap = (ascending - q.gather(-1, order)).abs()
    head = (gap * (ascending.cumsum(-1) > alpha)).sum(-1)
    total = gap.sum(-1)
    return torch.where(total > 0.0, head / total.clamp_min(TINY), torch.ones_like(total))
