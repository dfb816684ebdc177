"""Every loss of the actor and the critic, under every aggregation, on one ragged mini-batch; as a program, one rank of
the learners.

python loss_grid.py RANK NUM_RANKS RENDEZVOUS_FILE POLICY; prints the results as JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_processes import join_ranks, leave_group

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.learners import CriticConfig, OptimizerConfig
from quintet.policies.causal_lm import ValueModel
from quintet.policies.model_loading import load_model
from quintet.records import Batch
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.process_group import RankGroup
from quintet.training.scorer import PolicyScorer

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"clip_high": 0.1},
    "decoupled_ppo": {"max_weight": 1.1},
    "gspo": {"clip_low": 0.02, "clip_high": 0.02},
    "gmpo": {"clip_low": 0.1, "clip_high": 0.1},
    "cispo": {},
    "sapo": {},
    "dppo_tv": {"clip_low": 1e-4, "clip_high": 1e-4},
    "dppo_kl": {"clip_low": 1e-4, "clip_high": 1e-4},
    "dro": {},
    "clip_cov": {"share": 0.2, "min_covariance": 0.0, "max_covariance": 3.0},
    "kl_cov": {"share": 0.2},
    "reinforce": {},
    "gpg": {},
    "kimi": {"tau": 0.3},
    "topr": {"negative_weight": 0.5},
    "distillation": {"estimator": "k3", "gradient": "direct", "task": {"name": "ppo"}},
}
METRICS = (
    "actor/pg_loss",
    "actor/entropy",
    "actor/kl_loss",
    "actor/ratio",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "grad_norm",
    "probs_diff_max",
)
CRITIC_OBJECTIVE = CriticObjective(CriticConfig(value_clip=0.3))
CRITIC_METRICS = ("critic/vf_loss", "critic/vf_clipfrac", "grad_norm")


def ragged_batch(seed: int = 0) -> Batch:
    """Nine sequences of five trajectories, a common prompt, masks with gaps."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([12, 17, 9, 30, 21, 9, 14, 26, 11])
    shared = torch.arange(200, 206)
    tokens, masks, ends = [], [], []
    for length in lengths.tolist():
        rest = torch.randint(0, 300, (length - 6,), generator=generator)
        mask = torch.rand(length - 6, generator=generator) < 0.5
        mask[-1] = True
        tokens.append(torch.cat([shared, rest]))
        masks.append(torch.cat([torch.zeros(6, dtype=torch.bool), mask]))
        ends.append(torch.cat([torch.zeros(length - 1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)]))
    mask = torch.cat(masks)
    size = len(mask)
    return Batch(
        tokens=torch.cat(tokens),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        lengths=lengths,
        loss_mask=mask,
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=torch.cat(ends),
        trajectory=torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 4]),
        group=torch.tensor([0, 0, 1, 1, 2]),
        logprobs=(torch.randn(size, generator=generator) * 0.3 - 5.5) * mask,
        rewards=torch.randn(size, generator=generator) * torch.cat(ends),
        advantages=torch.randn(size, generator=generator) * mask,
        values=torch.randn(size, generator=generator) * mask,
        returns=torch.randn(size, generator=generator) * mask,
    )


def near_batch(scorer: PolicyScorer) -> Batch:
    """Return the ragged batch with log-probs of old policy, engine and reference that are near those of the policy."""
    batch, generator = ragged_batch(), torch.Generator().manual_seed(1)
    present = scorer.compute_log_probs(batch)
    near = lambda spread: (  # noqa: E731
        (present + spread * torch.randn(len(present), generator=generator)) * batch.loss_mask
    )
    old = near(0.2)
    return replace(
        batch,
        logprobs=old,
        rollout_logprobs=near(0.2),
        ref_logprobs=near(0.3),
        correction=torch.rand(len(present), generator=generator) + 0.5,
    )


def objective(name: str) -> PolicyObjective:
    loss = {"name": name, **LOSSES[name]}
    kl = {"coefficient": 0.1, "estimator": "full" if name == "ppo" else "k3"}
    return PolicyObjective(
        AlgorithmConfig.model_validate({"loss": loss, "entropy_coefficient": 0.01, "kl": kl, "stop_ratio": 1e9})
    )


def other_policy(model: Any) -> Any:
    """Return a reference whose token probabilities differ a little from the policy's."""
    from copy import deepcopy

    other = deepcopy(model).requires_grad_(requires_grad=False)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.05)
    return other


def grid(actor: ActorLearner) -> dict[str, list[float]]:
    """Return `METRICS` of each loss and aggregation, by `<loss> <aggregation>`; the learning rate is 0."""
    batch = near_batch(actor.scorer)
    reference = PolicyScorer(other_policy(actor.model), LearnerSetup(budget=MicroBatchBudget()))
    out: dict[str, list[float]] = {}
    for name in LOSSES:
        for mode in AGGREGATIONS:
            metrics = actor.update(
                batch, objective(name), Aggregation(mode, scale=64.0), 0.0, reference=reference, seed=3
            )
            out[f"{name} {mode}"] = [metrics[key] for key in METRICS]
    return out


def three_steps(actor: ActorLearner) -> float:
    """Update three times on the same mini-batch; return the log-prob of all its response tokens, nats."""
    batch = near_batch(actor.scorer)
    for _ in range(3):
        actor.update(batch, objective("gspo"), "token-mean", 1.0)
    return float(actor.scorer.compute_log_probs(batch).sum())


def critic_grid(critic: CriticLearner) -> dict[str, list[float]]:
    """Return `CRITIC_METRICS` of each aggregation, over all response tokens and over some; the learning rate is 0."""
    batch = ragged_batch()
    some = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(4)) < 0.7
    out: dict[str, list[float]] = {}
    for mode in AGGREGATIONS:
        for selection, mask in {"all": None, "some": some}.items():
            metrics = critic.update(batch, CRITIC_OBJECTIVE, Aggregation(mode, scale=64.0), 0.0, mask)
            out[f"{selection} {mode}"] = [metrics[key] for key in CRITIC_METRICS]
    return out


def three_critic_steps(critic: CriticLearner) -> list[float]:
    """Sum of the values before and after three updates on the same mini-batch."""
    batch = ragged_batch()
    before = float(critic.compute_values(batch).sum())
    for _ in range(3):
        critic.update(batch, CRITIC_OBJECTIVE, "token-mean", 0.01)
    return [before, float(critic.compute_values(batch).sum())]


def critic(directory: Path, budget: MicroBatchBudget, ranks: RankGroup | None = None) -> CriticLearner:
    """Return a critic whose head is not 0, so that its body has gradients."""
    config = OptimizerConfig(kind="sgd", learning_rate=1.0)
    model = ValueModel(load_model(directory))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.head.weight.copy_(0.2 * torch.randn(model.head.weight.shape, generator=generator))
    return CriticLearner(model, config, LearnerSetup(budget=budget, ranks=ranks or RankGroup()))


def learner(directory: Path, budget: MicroBatchBudget, ranks: RankGroup | None = None) -> ActorLearner:
    config = OptimizerConfig(kind="sgd", learning_rate=1.0)
    return ActorLearner(load_model(directory), config, LearnerSetup(budget=budget, ranks=ranks or RankGroup()))


def main() -> None:
    torch.set_num_threads(1)
    ranks, (policy,) = join_ranks()
    directory = Path(policy)
    actor = learner(directory, MicroBatchBudget(max_sequences=2), ranks)
    results: dict[str, Any] = {"grid": grid(actor), "probability": three_steps(actor)}
    # a single pass: the second process has none
    single_pass = learner(directory, MicroBatchBudget(), ranks)
    once = single_pass.update(near_batch(single_pass.scorer), objective("cispo"), "token-mean", 0.0)
    values = critic(directory, MicroBatchBudget(max_sequences=2), ranks)
    results["values"], results["value"] = critic_grid(values), three_critic_steps(values)
    results["once"] = [once[key] for key in METRICS]
    results["weights"] = hashlib.sha256(
        b"".join(value.numpy().tobytes() for each in (actor, values) for _, value in each.weights())
    ).hexdigest()
    leave_group(ranks)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
