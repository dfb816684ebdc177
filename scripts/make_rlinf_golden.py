"""Make tests/parity/golden/rlinf_chunks.npz with RLinf's own functions for robots (release 0.2), from a checkout:

    git clone --branch v0.2 https://github.com/RLinf/RLinf
    python -O scripts/make_rlinf_golden.py RLinf

`-O` because RLinf asserts float32, and everything here is float64. Rollouts have 4 chunks of 3 actions with 2
dimensions of 6 robots, in groups of 3. There are two sets of inputs:

- `masked`: episodes end at any action, and nothing follows; some last until the end of the rollout;
- `auto_reset`: a robot has several episodes, which end with a chunk, and nothing is masked.

Arrays, by name:

- `in|SET|NAME`: `rewards` [T, B, C], `dones` [T + 1, B, C] with a first row of False, `values` [T + 1, B, C] (the first
  action's column is the chunk's), `new_values` [T, B, C], `logprobs`, `new_logprobs`, `proximal_logprobs` and
  `entropies` [T, B, C, D]. `in|rows` are the chunk steps of the mini-batch of losses, of T B.
- `out|masked|loss_mask`, `out|masked|loss_mask_sum`: [T, B, C].
- `out|SET|REWARD_LEVEL|ESTIMATOR|advantages` and `…|returns`: [T, B, V].
- `out|SET|REWARD_LEVEL|ESTIMATOR|LEVEL|LOSS|loss`, `…|grad|logprobs`, `…|grad|values`, `…|metric|NAME`.
- `out|auto_reset|entropy|LEVEL`: mean entropy of the mini-batch.

What is a single number lies in `numbers`, JSON, under the names above.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

TARGET = Path(__file__).parent.parent / "tests/parity/golden/rlinf_chunks.npz"
CHUNKS, ROBOTS, ACTIONS, DIM, GROUP_SIZE = 4, 6, 3, 2, 3
LEVELS = {"action": ("token", "action"), "chunk": ("token", "action", "chunk")}
"""Levels of ratios by level of rewards; a chunk has no ratio of its own where each action has its own advantage."""
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
LOSSES: dict[str, dict[str, Any]] = {
    "actor": {},
    "actor_critic": {"clip_ratio_c": 1.5},
    "decoupled_actor_critic": {"behave_weight_threshold": 1.3},
}


def import_rlinf(checkout: Path) -> SimpleNamespace:
    """Import RLinf's functions without its packages' `__init__`, which need Ray and simulators."""
    for name in ("rlinf", "rlinf.algorithms", "rlinf.utils"):
        package = ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    scheduler = ModuleType("rlinf.scheduler")
    scheduler.Worker = object  # type: ignore[attr-defined]
    sys.modules["rlinf.scheduler"] = scheduler
    for name in ("advantages", "losses"):
        importlib.import_module(f"rlinf.algorithms.{name}")
    from rlinf.algorithms.registry import calculate_adv_and_returns, policy_loss
    from rlinf.utils.metric_utils import compute_loss_mask
    from rlinf.utils.utils import masked_mean, reshape_entropy

    return SimpleNamespace(
        advantages=calculate_adv_and_returns,
        policy_loss=policy_loss,
        loss_mask=compute_loss_mask,
        masked_mean=masked_mean,
        reshape_entropy=reshape_entropy,
    )


def draw_inputs(kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the inputs of a set."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    tokens = (CHUNKS, ROBOTS, ACTIONS, DIM)
    dones = torch.zeros(CHUNKS + 1, ROBOTS, ACTIONS, dtype=torch.bool)
    rewards = normal(CHUNKS, ROBOTS, ACTIONS)
    if kind == "masked":
        for robot, step in enumerate((4, 11, 0, 5, 7, None)):
            if step is not None:
                dones.view(CHUNKS + 1, ROBOTS, ACTIONS)[1 + step // ACTIONS, robot, step % ACTIONS] = True
                order = torch.arange(CHUNKS * ACTIONS).view(CHUNKS, ACTIONS)
                rewards[:, robot][order > step] = 0.0
    else:
        dones[1:, :, -1] = torch.rand(CHUNKS, ROBOTS, generator=generator) < 0.4
    logprobs = normal(*tokens)
    return {
        "rewards": rewards,
        "dones": dones,
        "values": normal(CHUNKS + 1, ROBOTS, ACTIONS),
        "new_values": normal(CHUNKS, ROBOTS, ACTIONS),
        "logprobs": logprobs,
        "new_logprobs": logprobs + normal(*tokens, scale=0.4),
        "proximal_logprobs": logprobs + normal(*tokens, scale=0.3),
        "entropies": normal(*tokens).abs(),
    }


def main(checkout: Path) -> None:
    """Write the arrays."""
    torch.set_default_dtype(torch.float64)
    rlinf = import_rlinf(checkout)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(CHUNKS * ROBOTS, generator=generator)[:17]
    arrays: dict[str, Any] = {"in|rows": rows}
    for kind in ("masked", "auto_reset"):
        inputs = draw_inputs(kind, generator)
        arrays |= {f"in|{kind}|{name}": tensor for name, tensor in inputs.items()}
        mask = rlinf.loss_mask(inputs["dones"]) if kind == "masked" else (None, None)
        if kind == "masked":
            arrays |= {"out|masked|loss_mask": mask[0], "out|masked|loss_mask_sum": mask[1]}
        for reward_level, levels in LEVELS.items():
            for estimator in ("gae", "grpo") if kind == "masked" else ("gae",):
                key = f"out|{kind}|{reward_level}|{estimator}"
                batch = add_advantages(rlinf, inputs, mask, reward_level, estimator)
                arrays |= {f"{key}|{name}": batch[name] for name in ("advantages", "returns") if name in batch}
                for level in levels:
                    for loss in LOSSES if estimator == "gae" else ("actor",):
                        for name, value in losses(rlinf, inputs, batch, rows, (reward_level, level, loss)).items():
                            arrays[f"{key}|{level}|{loss}|{name}"] = value
    entropies = inputs["entropies"].flatten(0, 1)[rows].flatten(1)
    for level in ("token", "action", "chunk"):
        shaped = rlinf.reshape_entropy(entropies, f"{level}_level", DIM, len(rows))
        arrays[f"out|auto_reset|entropy|{level}"] = rlinf.masked_mean(shaped, mask=None)
    numbers = {name: float(value) for name, value in arrays.items() if np.ndim(value) == 0}
    stored = {name: np.asarray(value) for name, value in arrays.items() if name not in numbers}
    np.savez_compressed(TARGET, numbers=json.dumps(numbers), **stored)


def add_advantages(
    rlinf: SimpleNamespace,
    inputs: dict[str, Tensor],
    mask: tuple[Tensor | None, Tensor | None],
    reward_level: str,
    estimator: str,
) -> dict[str, Any]:
    """Return advantages, returns and the masks that the loss gets."""
    loss_mask, mask_sum = mask
    values = inputs["values"]
    if reward_level == "chunk":
        values = values[..., :1]
        if loss_mask is not None and mask_sum is not None:
            loss_mask, mask_sum = loss_mask.any(dim=-1, keepdim=True), mask_sum[..., -1:]
    result: dict[str, Any] = rlinf.advantages(
        task_type="embodied",
        adv_type=estimator,
        rewards=inputs["rewards"],
        dones=inputs["dones"],
        values=values,
        gamma=0.97,
        gae_lambda=0.9,
        group_size=GROUP_SIZE,
        reward_type=f"{reward_level}_level",
        loss_mask=loss_mask,
        loss_mask_sum=mask_sum,
    )
    return {**result, "values": values[:-1], "loss_mask": loss_mask, "loss_mask_sum": mask_sum}


def losses(
    rlinf: SimpleNamespace,
    inputs: dict[str, Tensor],
    batch: dict[str, Any],
    rows: Tensor,
    names: tuple[str, str, str],
) -> dict[str, Any]:
    """Return loss, gradients and metrics of the mini-batch."""
    reward_level, level, loss_type = names
    size = ACTIONS if reward_level == "action" else 1

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.flatten(0, 1)[rows]

    logprobs = inputs["new_logprobs"].flatten(0, 1)[rows].flatten(1).requires_grad_()
    values = inputs["new_values"].flatten(0, 1)[rows][..., :size].clone().requires_grad_()
    loss, metrics = rlinf.policy_loss(
        task_type="embodied",
        loss_type=loss_type,
        logprob_type=f"{level}_level",
        reward_type=f"{reward_level}_level",
        single_action_dim=DIM,
        logprobs=logprobs,
        values=values,
        old_logprobs=inputs["logprobs"].flatten(0, 1)[rows].flatten(1),
        proximal_logprobs=inputs["proximal_logprobs"].flatten(0, 1)[rows].flatten(1),
        advantages=part(batch["advantages"]),
        returns=part(batch.get("returns")),
        prev_values=part(batch["values"]),
        value_clip=0.2,
        huber_delta=0.7,
        loss_mask=part(batch["loss_mask"]),
        loss_mask_sum=part(batch["loss_mask_sum"]),
        max_episode_steps=CHUNKS * ACTIONS,
        **CLIP,
        **LOSSES[loss_type],
    )
    gradients = torch.autograd.grad(loss, [logprobs, values], allow_unused=True)
    result: dict[str, Any] = {"loss": loss.detach(), "grad|logprobs": gradients[0]}
    if gradients[1] is not None:
        result["grad|values"] = gradients[1]
    return result | {f"metric|{name}": value for name, value in metrics.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
