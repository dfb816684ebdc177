"""Make tests/parity/golden/verl_float64.npz with verl's own functions, in an environment of its own:

    python -m venv peer && peer/bin/pip install torch==2.13.0 numpy packaging ray tensordict omegaconf transformers \
        codetiming orjson && peer/bin/pip install --no-deps verl==0.9.1
    peer/bin/python scripts/make_golden.py

Everything is float64 and drawn from a fixed seed. There are three sets of inputs, rows padded to one width:

- `single`: one turn a row, ragged ends;
- `turns`: several turns a row with holes in the mask, rewards in the middle, values that aren't 0 in the holes;
- `extreme`: as `turns`, log-ratios up to ±30, and a last row without a token of the policy's own; no advantages.

Groups have from one to five rows. Arrays, by name:

- `in|SET|NAME`: [rows, width], or [rows] for `group`, `pairs` (groups of two and more, for pass@k), `baseline` and
  the reward's parts `part_right` and `part_form`. `squared_mass` is the sum of the squared probabilities, `weights`
  are importance weights; `mask` is 1.0 where the policy wrote.
- `out|SET|adv|NAME|VARIANT|advantages` and `…|returns`.
- `out|SET|loss|NAME|VARIANT|MODE` is the loss, `out|SET|lossgrad|NAME|VARIANT|MODE` its gradient with respect to
  `log_probs`, `out|SET|lossmetric|NAME|VARIANT|METRIC` what verl reports of it under token-mean.
  `clip_cov|drawn` draws after torch.manual_seed(0).
- `out|SET|agg|MODE` and `out|SET|agg|MODE|global` (its own sizes given) aggregate `advantages`.
- `out|SET|kl|NAME`, `out|SET|klgrad|NAME`: each token's estimate, and the gradient of their sum.
- `out|SET|value|CLIP|MODE`, `…|valuegrad|…`, `out|SET|value|CLIP|clipfrac`.
- `out|SET|corr|VARIANT|weights`, `…|mask` (what rejection leaves), `…|metric|NAME`.
- `out|SET|whiten`.
- `out|control|adaptive`: the coefficient after each of `in|control|kl`.
- `settings`: JSON, `kind|NAME|VARIANT` to the options given to verl's function.

What is a single number lies in `numbers`, JSON, under the names above (an entry of its own would cost 300 bytes).
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TARGET = Path(__file__).parent.parent / "tests/parity/golden/verl_float64.npz"
WIDTH = 14
GROUPS = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3, 4]
PAIRS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2]
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KLS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")

GAE = {"gamma": 0.97, "lam": 0.9}
ADVANTAGES: dict[str, dict[str, dict[str, Any]]] = {
    "gae": {"default": GAE, "undiscounted": {"gamma": 1.0, "lam": 1.0}},
    "grpo": {"std": {"norm_adv_by_std_in_grpo": True}, "nostd": {"norm_adv_by_std_in_grpo": False}},
    "grpo_vectorized": {"std": {"norm_adv_by_std_in_grpo": True}, "nostd": {"norm_adv_by_std_in_grpo": False}},
    "gdpo": {"std": {"norm_adv_by_std_in_grpo": True}, "nostd": {"norm_adv_by_std_in_grpo": False}},
    "grpo_passk": {"std": {"norm_adv_by_std_in_grpo": True}, "nostd": {"norm_adv_by_std_in_grpo": False}},
    "reinforce_plus_plus": {"default": {"gamma": 0.97}, "undiscounted": {"gamma": 1.0}},
    "reinforce_plus_plus_baseline": {"default": {}},
    "remax": {"default": {}},
    "rloo": {"default": {}},
    "rloo_vectorized": {"default": {}},
    "opo": {"default": {}},
    "gpg": {"default": {}},
    "optimal_token_baseline": {
        "default": {"handle_zero_tail": True},
        "tail": {"handle_zero_tail": False},
        "weighted": {"handle_zero_tail": True, "weighted": True},
    },
    "tir_optimal_token_baseline": {
        "default": {"handle_zero_tail": True},
        "tail": {"handle_zero_tail": False},
        "weighted": {"handle_zero_tail": True, "weighted": True},
    },
}
GDPO_WEIGHTS = {"part_right": 1.0, "part_form": 0.25}

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
LOSSES: dict[str, dict[str, dict[str, Any]]] = {
    "vanilla": {"default": CLIPS, "narrow": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.1}},
    "dppo_tv": {"default": CLIPS, "narrow": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.2}},
    "dppo_kl": {"default": CLIPS, "narrow": {"clip_ratio_low": 0.002, "clip_ratio_high": 0.004, "clip_ratio_c": 1.2}},
    "gspo": {
        "default": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
        "wide": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    },
    "sapo": {"default": {"tau_pos": 1.0, "tau_neg": 1.05}, "steep": {"tau_pos": 2.0, "tau_neg": 3.0}},
    "gpg": {"default": {}},
    "clip_cov": {
        "all": {**CLIPS, "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 3.0}},
        "none": {**CLIPS, "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 1e6, "clip_cov_ub": 1e7}},
        "drawn": {**CLIPS, "policy_loss": {"clip_cov_ratio": 0.05, "clip_cov_lb": 0.1, "clip_cov_ub": 3.0}},
    },
    "kl_cov": {
        "default": {"policy_loss": {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}},
        "many": {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}},
    },
    "geo_mean": {"default": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}},
    "dro": {"default": {"policy_loss": {"dro_beta": 0.1}}, "strong": {"policy_loss": {"dro_beta": 2.0}}},
    "cispo": {"default": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}},
    "bypass_mode": {
        "ppo_clip": {**CLIPS, "policy_loss": {"rollout_correction": {"loss_type": "ppo_clip"}}},
        "reinforce": {
            "policy_loss": {
                "rollout_correction": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
            }
        },
        "reinforce_rs": {
            "policy_loss": {
                "rollout_correction": {
                    "loss_type": "reinforce",
                    "rollout_is": "sequence",
                    "rollout_is_threshold": 3.0,
                    "rollout_rs": "token_k1",
                    "rollout_rs_threshold": "0.5_2.0",
                }
            }
        },
    },
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.2},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    "token_normalized": {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
    "sequence_normalized": {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    "token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"},
    "sequence_icepop": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
    "token_k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"},
    "token_k1_single": {"rollout_rs": "token_k1", "rollout_rs_threshold": "1.1"},
    "token_k2": {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.02"},
    "token_k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.02"},
    "seq_sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.7_1.4"},
    "seq_sum_k2": {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": "0.2"},
    "seq_sum_k3": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": "0.2"},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.05"},
    "seq_mean_k2": {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": "0.012"},
    "seq_mean_k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.012"},
    "seq_max_k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.04"},
    "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": "0.04"},
    "both": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_rs": "token_k1,seq_max_k2",
        "rollout_rs_threshold": "0.7_1.4,0.04",
    },
}

Arrays = dict[str, Tensor]


def masks(kind: str, draw: np.random.Generator) -> Tensor:
    """Rows of one turn with ragged ends, or of several with holes; the first token is always the policy's."""
    mask = np.zeros((len(GROUPS), WIDTH))
    for row in range(len(GROUPS)):
        mask[row, : draw.integers(2, WIDTH + 1)] = 1.0
        if kind != "single":
            start = int(draw.integers(1, 5))
            mask[row, start : start + int(draw.integers(1, 4))] = 0.0
            mask[row, start + 6 : start + 6 + int(draw.integers(0, 3))] = 0.0
    mask[0] = 1.0
    if kind == "extreme":
        mask[-1] = 0.0
    return torch.from_numpy(mask)


def inputs(kind: str, seed: int) -> Arrays:
    """What verl's functions are given."""
    draw = np.random.default_rng(seed)
    mask = masks(kind, draw)
    shape = tuple(mask.shape)
    normal = lambda scale: torch.from_numpy(draw.normal(0.0, scale, shape))  # noqa: E731
    old = -torch.from_numpy(draw.exponential(0.7, shape)) - 1e-3
    gap = normal(0.3)
    if kind == "extreme":
        wild = torch.from_numpy(draw.random(shape) < 0.15)
        gap = torch.where(wild, gap * 100.0, gap)
        gap[0, 0], gap[0, 1] = 30.0, -30.0
    values = normal(1.0)
    return {
        "mask": mask,
        "group": torch.tensor(GROUPS),
        "pairs": torch.tensor(PAIRS),
        "rewards": _rewards(kind, mask, draw),
        "baseline": torch.from_numpy(draw.normal(0.3, 0.5, shape[0])),
        "part_right": torch.from_numpy(draw.integers(0, 9, shape[0]) / 8.0),
        "part_form": torch.from_numpy(draw.integers(0, 5, shape[0]) / 4.0),
        "values": values,
        "vpreds": values + normal(0.6),
        "returns": values + normal(1.0),
        "advantages": normal(1.0),
        "old_log_probs": old,
        "log_probs": old + gap,
        "ref_log_probs": old + normal(0.4),
        "rollout_log_probs": old + normal(0.15),
        "squared_mass": torch.from_numpy(draw.uniform(0.1, 0.9, shape)),
        "weights": torch.from_numpy(draw.uniform(0.3, 2.0, shape)) * mask,
    }


def _rewards(kind: str, mask: Tensor, draw: np.random.Generator) -> Tensor:
    """A score at the last own token; with several turns, smaller ones before it. Some rows score exactly 0."""
    rewards = torch.zeros_like(mask)
    for row in range(len(mask)):
        own = mask[row].nonzero().flatten().tolist()
        if own and draw.random() < 0.75:
            rewards[row, own[-1]] = float(draw.normal(0.5, 1.0))
        if kind != "single":
            for place in own[:-1]:
                if draw.random() < 0.3:
                    rewards[row, place] = float(draw.normal(0.0, 0.3))
    return rewards


def advantage_options(name: str, given: dict[str, Any], x: Arrays) -> dict[str, Any]:
    """The arguments of one estimator."""
    rest = {"index": (x["pairs"] if name == "grpo_passk" else x["group"]).numpy(), **given}
    if name in ("gae",):
        return {"values": x["values"], **given}
    if name == "remax":
        return {"reward_baselines": x["baseline"]}
    if name.endswith("optimal_token_baseline"):
        weights = x["weights"] if rest.pop("weighted", False) else None
        return {
            **rest,
            "old_log_probs": x["old_log_probs"],
            "sum_pi_squared": x["squared_mass"],
            "rollout_is_weights": weights,
        }
    config = importlib.import_module("verl.trainer.config").AlgoConfig
    if name == "reinforce_plus_plus":
        return {"config": config(gamma=given["gamma"])}
    if name == "grpo_passk":
        return {"index": rest["index"], "config": config(**given)}
    if name == "gdpo":
        return {**rest, **gdpo_options(x, config)}
    return rest


def gdpo_options(x: Arrays, config: Callable[..., Any]) -> dict[str, Any]:
    return {
        "config": config(gdpo_reward_keys=list(GDPO_WEIGHTS), gdpo_reward_weights=list(GDPO_WEIGHTS.values())),
        "non_tensor_batch": {name: x[name].numpy() for name in GDPO_WEIGHTS},
        "batch": {"prompts": torch.zeros(len(x["mask"]), 0), "attention_mask": x["mask"].long()},
    }


def advantages(core: Any, x: Arrays) -> Arrays:
    out = {}
    for name, variants in ADVANTAGES.items():
        for variant, given in variants.items():
            options = advantage_options(name, given, x)
            function = core.get_adv_estimator_fn(name)
            found = function(token_level_rewards=x["rewards"].clone(), response_mask=x["mask"], **options)
            out[f"adv|{name}|{variant}|advantages"], out[f"adv|{name}|{variant}|returns"] = found
    return out


def actor_config(given: dict[str, Any]) -> Any:
    """verl's ActorConfig with the options of one loss."""
    workers = importlib.import_module("verl.workers.config")
    policy_loss = dict(given.get("policy_loss", {}))
    if "rollout_correction" in policy_loss:
        correction = importlib.import_module("verl.trainer.config.algorithm").RolloutCorrectionConfig
        options = {"rollout_is": None, "rollout_rs": None, **policy_loss["rollout_correction"]}
        policy_loss["rollout_correction"] = correction(**options)
    plain = {name: value for name, value in given.items() if name != "policy_loss"}
    loss = importlib.import_module("verl.workers.config.actor").PolicyLossConfig(**policy_loss)
    return workers.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss, **plain)


def losses(core: Any, x: Arrays) -> Arrays:
    out = {}
    for name, variants in LOSSES.items():
        function = core.get_policy_loss_fn(name)
        for variant, given in variants.items():
            config = actor_config(given)
            for mode in MODES:
                loss, grad, metrics = loss_and_gradient(function, x, mode, config, None)
                out[f"loss|{name}|{variant}|{mode}"], out[f"lossgrad|{name}|{variant}|{mode}"] = loss, grad
                if mode == "token-mean":
                    for metric, value in metrics.items():
                        label = metric.replace("actor/", "").replace("rollout_corr/", "")
                        out[f"lossmetric|{name}|{variant}|{label}"] = torch.tensor(float(value), dtype=torch.float64)
        loss, grad, _ = loss_and_gradient(
            function, x, "token-mean", actor_config(next(iter(variants.values()))), x["weights"]
        )
        out[f"loss|{name}|weighted|token-mean"], out[f"lossgrad|{name}|weighted|token-mean"] = loss, grad
    return out


def loss_and_gradient(
    function: Callable[..., Any], x: Arrays, mode: str, config: Any, weights: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    log_probs = x["log_probs"].clone().requires_grad_()
    loss, metrics = function(
        old_log_prob=x["old_log_probs"],
        log_prob=log_probs,
        advantages=x["advantages"],
        response_mask=x["mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient, metrics


def aggregations(core: Any, x: Arrays) -> Arrays:
    out = {}
    sizes = {"dp_size": 2, "batch_num_tokens": 200, "global_batch_size": 20, "loss_scale_factor": 32}
    for mode in MODES:
        out[f"agg|{mode}"] = core.agg_loss(x["advantages"], x["mask"], mode)
        out[f"agg|{mode}|global"] = core.agg_loss(x["advantages"], x["mask"], mode, **sizes)
    return out


def divergences(core: Any, x: Arrays) -> Arrays:
    out = {}
    for name in KLS:
        log_probs = x["log_probs"].clone().requires_grad_()
        kl = core.kl_penalty(log_probs, x["ref_log_probs"], name)
        out[f"kl|{name}"] = kl.detach()
        (out[f"klgrad|{name}"],) = torch.autograd.grad(kl.sum(), log_probs)
    return out


def value_losses(core: Any, x: Arrays) -> Arrays:
    out = {}
    for clip in (0.5, 0.1):
        for mode in MODES:
            vpreds = x["vpreds"].clone().requires_grad_()
            loss, fraction = core.compute_value_loss(
                vpreds, x["returns"], x["values"], x["mask"], cliprange_value=clip, loss_agg_mode=mode
            )
            out[f"value|{clip}|{mode}"] = loss.detach()
            (out[f"valuegrad|{clip}|{mode}"],) = torch.autograd.grad(loss, vpreds)
            out[f"value|{clip}|clipfrac"] = fraction
    return out


def corrections(x: Arrays) -> Arrays:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    out = {}
    for variant, given in CORRECTIONS.items():
        weights, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
            x["old_log_probs"], x["rollout_log_probs"], x["mask"], **given
        )
        if weights is not None:
            out[f"corr|{variant}|weights"] = weights.batch["rollout_is_weights"]
        out[f"corr|{variant}|mask"] = mask
        for name, value in metrics.items():
            label = name.replace("rollout_corr/", "")
            out[f"corr|{variant}|metric|{label}"] = torch.tensor(float(value), dtype=torch.float64)
    return out


def control(core: Any) -> Arrays:
    """The adaptive coefficient, steered by one divergence after the other."""
    seen = [0.02, 0.1, 0.35, 0.11, 0.09, 5.0]
    controller = core.AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=100)
    found = []
    for kl in seen:
        controller.update(kl, 16)
        found.append(float(controller.value))
    return {"in|control|kl": torch.tensor(seen).double(), "out|control|adaptive": torch.tensor(found).double()}


def golden() -> dict[str, np.ndarray]:
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    functional = importlib.import_module("verl.utils.torch_functional")
    arrays: Arrays = control(core)
    for seed, kind in enumerate(("single", "turns", "extreme")):
        x = inputs(kind, seed)
        arrays |= {f"in|{kind}|{name}": value for name, value in x.items()}
        out = {**losses(core, x), **aggregations(core, x), **divergences(core, x), **value_losses(core, x)}
        out |= {**corrections(x), "whiten": functional.masked_whiten(x["advantages"], x["mask"])}
        if kind != "extreme":
            out |= advantages(core, x)
        arrays |= {f"out|{kind}|{name}": value for name, value in out.items()}
    return {name: np.asarray(value) for name, value in arrays.items()}


def settings() -> str:
    """The options behind each variant, as JSON."""
    told: dict[str, Any] = {f"corr|x|{variant}": given for variant, given in CORRECTIONS.items()}
    for kind, table in (("adv", ADVANTAGES), ("loss", LOSSES)):
        for name, variants in table.items():
            told |= {f"{kind}|{name}|{variant}": given for variant, given in variants.items()}
            if kind == "loss":
                told[f"loss|{name}|weighted"] = {**next(iter(variants.values())), "weights": True}
    told["adv|gdpo|weights"] = GDPO_WEIGHTS
    told["agg|x|global"] = {"dp_size": 2, "batch_num_tokens": 200, "global_batch_size": 20, "loss_scale_factor": 32}
    told["control|x|adaptive"] = {"init_kl_coef": 0.2, "target_kl": 0.1, "horizon": 100, "n_steps": 16}
    told["verl"] = importlib.import_module("verl").__version__
    return json.dumps(told, sort_keys=True)


def main() -> int:
    arrays = golden()
    for name, values in arrays.items():
        if values.dtype == np.float64 and not np.isfinite(values).all():
            print(f"not finite: {name}")
    numbers = {name: float(values) for name, values in arrays.items() if values.ndim == 0}
    arrays = {name: values for name, values in arrays.items() if values.ndim}
    texts = {"settings": np.array(settings()), "numbers": np.array(json.dumps(numbers, sort_keys=True))}
    np.savez_compressed(TARGET, **texts, **arrays)
    print(f"{TARGET}: {len(arrays)} arrays, {len(numbers)} numbers, {math.ceil(TARGET.stat().st_size / 1024)} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
