"""If these fail, our losses, divergences or corrections aren't verl's: values and gradients in float64 that its own
functions gave (release 0.9.1, `scripts/make_golden.py`), also for turns with gaps between them, empty replies and
ratios beyond all bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from quintet.algorithms.aggregation import Aggregation, token_weights
from quintet.algorithms.correction import rollout_correction
from quintet.algorithms.kl import KlControl, kl_estimate
from quintet.algorithms.losses.critic import value_clip
from quintet.algorithms.objective import PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig
from quintet.config.native.losses import LossConfig
from quintet.records import Batch

STORED = np.load(Path(__file__).parent / "golden" / "verl_float64.npz")
SETTINGS = json.loads(str(STORED["settings"]))
NUMBERS = json.loads(str(STORED["numbers"]))
KINDS = ("single", "turns", "extreme")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NAMES = {"vanilla": "ppo", "geo_mean": "gmpo"}
FIELDS = {
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "tau_pos": "temperature_positive",
    "tau_neg": "temperature_negative",
    "dro_beta": "beta",
    "clip_cov_ratio": "share",
    "clip_cov_lb": "min_covariance",
    "clip_cov_ub": "max_covariance",
    "kl_cov_ratio": "share",
    "ppo_kl_coef": "coefficient",
}
LOSSES = [
    tuple(key.split("|")[1:]) for key in SETTINGS if key.startswith("loss|") and not key.startswith("loss|bypass_mode")
]
CORRECTIONS = [key.split("|")[2] for key in SETTINGS if key.startswith("corr|")]


def stored_input(kind: str, name: str) -> torch.Tensor:
    return torch.from_numpy(STORED[f"in|{kind}|{name}"])


def stored_output(kind: str, name: str) -> torch.Tensor:
    return torch.from_numpy(STORED[f"out|{kind}|{name}"])


def number(kind: str, name: str) -> float:
    return float(NUMBERS[f"out|{kind}|{name}"])


def own(kind: str, rows: torch.Tensor) -> torch.Tensor:
    return rows[stored_input(kind, "mask").bool()]


def packed(kind: str) -> Batch:
    """verl's padded rows as trajectories of one sequence each, what isn't the policy's own among them."""
    mask = stored_input(kind, "mask").bool()
    rows, width = mask.shape
    flat = lambda name: stored_input(kind, name).flatten()  # noqa: E731
    return Batch(
        tokens=torch.zeros(rows * width, dtype=torch.long),
        positions=torch.arange(width).repeat(rows),
        lengths=torch.full((rows,), width),
        loss_mask=mask.flatten(),
        turn=torch.zeros(rows * width, dtype=torch.long),
        turn_end=torch.zeros(rows * width, dtype=torch.bool),
        trajectory=torch.arange(rows),
        group=stored_input(kind, "group"),
        logprobs=flat("old_log_probs"),
        rollout_logprobs=flat("rollout_log_probs"),
        ref_logprobs=flat("ref_log_probs"),
        advantages=flat("advantages"),
        rewards=flat("rewards"),
    )


def configured(name: str, variant: str) -> dict[str, Any]:
    """verl's options of a loss as ours; its dual clip is the bound of the ratio in `dppo_*`."""
    options = SETTINGS[f"loss|{name}|{variant}"]
    flat = {
        **{k: v for k, v in options.items() if k not in ("policy_loss", "weights")},
        **options.get("policy_loss", {}),
    }
    dual = flat.pop("clip_ratio_c", None)
    fields = {FIELDS[key]: value for key, value in flat.items()}
    if name == "vanilla":
        fields["clip_dual"] = dual
    elif name.startswith("dppo"):
        fields["max_ratio"] = dual
    return {"name": NAMES.get(name, name), **fields}


def compute(batch: Batch, loss: dict[str, Any], mode: str, logprobs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Loss, gradient [M] and metrics; `logprobs` [N]."""
    config = AlgorithmConfig(loss=TypeAdapter(LossConfig).validate_python(loss))
    objective = PolicyObjective(config)
    aggregation = Aggregation(mode, scale=float(batch.lengths[0]))
    targets = objective.targets(batch, aggregation, logprobs=lambda _: logprobs)
    now = logprobs[batch.loss_mask].clone().requires_grad_()
    value, metrics = objective(now, torch.zeros_like(now), targets)
    (gradient,) = torch.autograd.grad(value, now)
    return value.detach(), gradient, metrics


def same(ours: torch.Tensor | float, theirs: torch.Tensor | float) -> None:
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(("name", "variant"), LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_policy_loss_and_its_gradient(kind: str, name: str, variant: str) -> None:
    batch, metrics = packed(kind), {}
    if variant == "weighted":
        batch = replace(batch, correction=stored_input(kind, "weights").flatten())
    # verl's GMPO takes the mean over all rows, also those without a word of the policy's
    rows = stored_input(kind, "mask").sum(-1)
    factor = float((rows > 0).sum() / len(rows)) if name == "geo_mean" else 1.0
    for mode in MODES if variant != "weighted" else MODES[:1]:
        loss, gradient, metrics = compute(
            batch, configured(name, variant), mode, stored_input(kind, "log_probs").flatten()
        )
        same(loss * factor, number(kind, f"loss|{name}|{variant}|{mode}"))
        same(gradient * factor, own(kind, stored_output(kind, f"lossgrad|{name}|{variant}|{mode}")))
    for metric in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        key = f"out|{kind}|lossmetric|{name}|{variant}|{metric}"
        if key in NUMBERS and not (name == "kl_cov" and metric == "ppo_kl"):
            torch.testing.assert_close(metrics[f"actor/{metric}"].item(), NUMBERS[key], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("variant", ["ppo_clip", "reinforce", "reinforce_rs"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_learners_own_old_logprobs(kind: str, variant: str) -> None:
    """verl's `bypass_mode`: the engine's log-probs are the old ones, and the gap is that of the present policy."""
    batch, now = packed(kind), stored_input(kind, "log_probs").flatten()
    options = SETTINGS[f"loss|bypass_mode|{variant}"]["policy_loss"]["rollout_correction"]
    loss: dict[str, Any] = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0}
    if variant != "ppo_clip":
        loss = {"name": "reinforce"}
        gap = replace(batch, logprobs=now, rollout_logprobs=batch.logprobs)
        weights, keep, _ = rollout_correction(gap, corrected(options))
        batch = replace(batch, correction=weights, loss_mask=batch.loss_mask & keep)
    value, gradient, _ = compute(batch, loss, "token-mean", now)
    same(value, number(kind, f"loss|bypass_mode|{variant}|token-mean"))
    same(gradient, stored_output(kind, f"lossgrad|bypass_mode|{variant}|token-mean").flatten()[batch.loss_mask])


def corrected(options: dict[str, Any]) -> CorrectionConfig:
    """verl's options of a correction as ours."""
    fields: dict[str, Any] = {"level": options.get("rollout_is")}
    if fields["level"]:
        *lower, upper = str(options["rollout_is_threshold"]).split("_")
        fields |= {"upper": float(upper), "lower": float(lower[0]) if lower else None}
        fields["normalize"] = options.get("rollout_is_batch_normalize", False)
    if options.get("rollout_rs"):
        rules = zip(options["rollout_rs"].split(","), str(options["rollout_rs_threshold"]).split(","), strict=True)
        fields["reject"] = tuple(rejection(rule, threshold) for rule, threshold in rules)
    return CorrectionConfig(**fields)


def rejection(rule: str, threshold: str) -> dict[str, Any]:
    over, _, estimator = rule.rpartition("_")
    *lower, upper = threshold.split("_")
    bounds = {"upper": float(upper)} | ({"lower": float(lower[0])} if lower else {})
    return {"over": over.replace("seq_", "sequence_"), "estimator": estimator, **bounds}


@pytest.mark.parametrize("variant", CORRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_correction_of_the_gap_to_the_engine(kind: str, variant: str) -> None:
    config, batch = corrected(SETTINGS[f"corr|x|{variant}"]), packed(kind)
    weights, keep, metrics = rollout_correction(batch, config)
    if config.level is not None:
        same(weights, stored_output(kind, f"corr|{variant}|weights").flatten())
    assert torch.equal(keep & batch.loss_mask, stored_output(kind, f"corr|{variant}|mask").flatten().bool())
    if kind == "extreme":
        return  # verl counts its empty reply in the means over replies
    prefix = f"out|{kind}|corr|{variant}|metric|"
    theirs = {key.removeprefix(prefix): value for key, value in NUMBERS.items() if key.startswith(prefix)}
    assert {f"rollout_corr/{name}" for name in theirs} <= set(metrics)
    for name, value in theirs.items():
        torch.testing.assert_close(metrics[f"rollout_corr/{name}"], value, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"])
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_and_its_gradient(kind: str, estimator: str) -> None:
    logprobs = stored_input(kind, "log_probs").requires_grad_()
    kl = kl_estimate(logprobs, stored_input(kind, "ref_log_probs"), estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    same(own(kind, kl.detach()), own(kind, stored_output(kind, f"kl|{estimator}")))
    same(own(kind, gradient), own(kind, stored_output(kind, f"klgrad|{estimator}")))


@pytest.mark.parametrize("clip", [0.5, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_value_loss_and_its_gradient(kind: str, clip: float) -> None:
    values = stored_input(kind, "vpreds").flatten().requires_grad_()
    parts = value_clip(values, stored_input(kind, "values").flatten(), stored_input(kind, "returns").flatten(), clip)
    for mode in MODES:
        loss = (parts.loss * weights_of(kind, mode)).sum()
        (gradient,) = torch.autograd.grad(loss, values, retain_graph=True)
        same(loss.detach(), number(kind, f"value|{clip}|{mode}"))
        same(gradient, stored_output(kind, f"valuegrad|{clip}|{mode}").flatten())


def weights_of(kind: str, mode: str) -> torch.Tensor:
    batch = packed(kind)
    return token_weights(mode, batch.loss_mask, batch.token_trajectory, float(batch.lengths[0]), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_aggregation(kind: str) -> None:
    advantages = stored_input(kind, "advantages").flatten()
    for mode in MODES:
        same((advantages * weights_of(kind, mode)).sum(), number(kind, f"agg|{mode}"))


def test_a_steered_coefficient() -> None:
    options = SETTINGS["control|x|adaptive"]
    control = KlControl.from_config(
        KlConfig(
            apply_to="reward",
            coefficient=options["init_kl_coef"],
            target=options["target_kl"],
            horizon=options["horizon"],
        )
    )
    results = []
    for kl in STORED["in|control|kl"].tolist():
        control.observe(kl, options["n_steps"])
        results.append(control.coefficient)
    assert results == pytest.approx(STORED["out|control|adaptive"].tolist(), rel=1e-7)


def test_every_loss_of_verl_is_compared() -> None:
    names = {key.split("|")[1] for key in SETTINGS if key.startswith("loss|")}
    assert len(names) == 12
    assert {name for name, _ in LOSSES} == names - {"bypass_mode"}
