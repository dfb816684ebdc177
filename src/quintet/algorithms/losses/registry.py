"""The losses by name, and what each needs besides its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.algorithms.losses.clipping import decoupled_ppo, distillation, gmpo, gspo, learnt_from, ppo
from quintet.algorithms.losses.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from quintet.algorithms.losses.scores import cispo, dppo_kl, dppo_tv, dro, kimi, reinforce, sapo, topr
from quintet.algorithms.losses.targets import PolicyLoss, PolicyTargets
from quintet.config.native import losses as configs
from quintet.errors import ConfigError
from quintet.registry import Registry, load_outside

__all__ = ["LOSSES", "Loss", "loss_of"]

ENTRY_POINTS = "quintet.losses"
"""Group through which other packages add losses."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as it is registered; called like its function, which alone is enough for most.

    >>> from quintet.algorithms.losses import LOSSES
    >>> LOSSES.get("gmpo").load().aggregation
    'seq-mean-token-mean'
    """

    function: Callable[[Tensor, PolicyTargets, Any], PolicyLoss]
    """`(logprobs [M], targets, config) -> PolicyLoss`, on the tokens of one pass."""
    aggregation: str | None = None
    """Of the loss itself, whatever `algorithm.aggregation` says; that holds for entropy and divergence."""
    counted: Callable[[PolicyTargets, Any], Tensor] | None = None
    """`(targets, config) -> bool [M]` over the whole mini-batch: the tokens that count in the loss; None counts all."""
    select: Callable[[Tensor, PolicyTargets, Any, torch.Generator], Tensor] | None = None
    """`(logprobs, targets, config, generator) -> bool [M]` over the whole mini-batch, for `PolicyTargets.selected`:
    costs a pass without gradients."""
    corrects: bool = False
    """The function takes `PolicyTargets.correction` into account by itself; else its loss is multiplied by it."""

    def __call__(self, logprobs: Tensor, targets: PolicyTargets, config: Any) -> PolicyLoss:
        """See `function`."""
        return self.function(logprobs, targets, config)


def loss_of(config: configs.LossConfig) -> tuple[Loss, Any]:
    """The configured loss, and what its functions take as `config`: for one from outside, its `options`.

    Raises:
        ConfigError: there is no such loss, or what stands outside can't be loaded.
    """
    if isinstance(config, configs.OutsideLossConfig):
        found = load_outside(config.function, "algorithm.loss.function", ENTRY_POINTS)
        return (found if isinstance(found, Loss) else Loss(_checked(found, config.function))), config.options
    entry = LOSSES.get(config.name).load()
    return (entry if isinstance(entry, Loss) else Loss(entry)), config


def _checked(function: Callable[..., Any], reference: str) -> Callable[[Tensor, PolicyTargets, Any], PolicyLoss]:
    """A user's function that is told apart from ours where it gives something else than was asked for."""

    def call(logprobs: Tensor, targets: PolicyTargets, options: Any) -> PolicyLoss:
        parts = function(logprobs, targets, options)
        if not isinstance(parts, PolicyLoss) or parts.loss.shape != logprobs.shape:
            told = f"a loss of shape {list(parts.loss.shape)}" if isinstance(parts, PolicyLoss) else repr(type(parts))
            raise ConfigError(
                f"algorithm.loss.function = {reference!r} gave {told} for {len(logprobs)} tokens",
                key="algorithm.loss.function",
                value=reference,
                hint="return a quintet.algorithms.losses.PolicyLoss with one loss for each of the log-probs",
            )
        return parts

    return call


LOSSES: Registry[PolicyLoss] = Registry("loss", entry_points=ENTRY_POINTS)
LOSSES.add("ppo", ppo, help="clipped ratio, with separate bounds and dual clip", config=configs.PpoLossConfig)
LOSSES.add(
    "decoupled_ppo",
    Loss(decoupled_ppo, counted=learnt_from),
    help="PPO around the learner's policy, weighted by its ratio to the engine's",
    config=configs.DecoupledPpoLossConfig,
)
LOSSES.add("gspo", gspo, help="one clipped ratio for each sequence", config=configs.GspoLossConfig)
LOSSES.add(
    "gmpo",
    Loss(gmpo, aggregation="seq-mean-token-mean", corrects=True),
    help="the geometric mean of a sequence's clipped ratios",
    config=configs.GmpoLossConfig,
)
LOSSES.add("cispo", cispo, help="log-probs weighted by the clipped ratio", config=configs.CispoLossConfig)
LOSSES.add(
    "sapo",
    Loss(sapo, aggregation="seq-mean-token-mean"),
    help="a soft gate in place of the clip",
    config=configs.SapoLossConfig,
)
LOSSES.add("dppo_tv", dppo_tv, help="tokens whose probability moved little", config=configs.DppoLossConfig)
LOSSES.add("dppo_kl", dppo_kl, help="tokens whose divergence is small", config=configs.DppoLossConfig)
LOSSES.add("dro", dro, help="policy gradient with a quadratic pull to the old policy", config=configs.DroLossConfig)
LOSSES.add(
    "clip_cov",
    Loss(clip_cov, select=select_clip_cov),
    help="PPO that leaves out a few tokens of high covariance",
    config=configs.ClipCovLossConfig,
)
LOSSES.add(
    "kl_cov",
    Loss(kl_cov, select=select_kl_cov),
    help="policy gradient that holds the tokens of highest covariance",
    config=configs.KlCovLossConfig,
)
LOSSES.add("reinforce", reinforce, help="plain policy gradient", config=configs.PlainLossConfig)
LOSSES.add("gpg", reinforce, help="plain policy gradient, by its name in verl", config=configs.PlainLossConfig)
LOSSES.add("kimi", kimi, help="policy gradient with a quadratic pull, as for Kimi k1.5", config=configs.KimiLossConfig)
LOSSES.add("topr", topr, help="imitates what was good, unlearns the rest within bounds", config=configs.ToprLossConfig)
LOSSES.add("distillation", distillation, help="towards a teacher's log-probs", config=configs.DistillationLossConfig)
