"""Every loss, the critic's too, under every aggregation on one ragged mini-batch; as a program, one of several ranks
that share it.

python loss_grid.py POLICY RANK SIZE MEETING
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
TOLD = (
    "actor/pg_loss",
    "actor/entropy",
    "actor/kl_loss",
    "actor/ratio",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "grad_norm",
    "probs_diff_max",
)
VALUES = CriticObjective(CriticConfig(value_clip=0.3))
TOLD_OF_VALUES = ("critic/vf_loss", "critic/vf_clipfrac", "grad_norm")


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
    """The same with log-probs of old policy, engine and reference that lie around the policy's own."""
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
    """A reference whose words are a little different."""
    from copy import deepcopy

    other = deepcopy(model).requires_grad_(requires_grad=False)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.05)
    return other


def grid(actor: ActorLearner) -> dict[str, list[float]]:
    """What each combination measures, by `<loss> <aggregation>`; the weights stay as they are."""
    batch = near_batch(actor.scorer)
    reference = PolicyScorer(other_policy(actor.model), LearnerSetup(budget=MicroBatchBudget()))
    out: dict[str, list[float]] = {}
    for name in LOSSES:
        for mode in AGGREGATIONS:
            told = actor.update(batch, objective(name), Aggregation(mode, scale=64.0), 0.0, reference=reference, seed=3)
            out[f"{name} {mode}"] = [told[key] for key in TOLD]
    return out


def three_steps(actor: ActorLearner) -> float:
    """After three updates on the same mini-batch, the probability of all its words, nats."""
    batch = near_batch(actor.scorer)
    for _ in range(3):
        actor.update(batch, objective("gspo"), "token-mean", 1.0)
    return float(actor.scorer.compute_log_probs(batch).sum())


def critic_grid(critic: CriticLearner) -> dict[str, list[float]]:
    """What the value loss measures under each aggregation, over all own tokens and over some; the weights stay as
    they are."""
    batch = ragged_batch()
    some = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(4)) < 0.7
    out: dict[str, list[float]] = {}
    for mode in AGGREGATIONS:
        for where, mask in {"all": None, "some": some}.items():
            told = critic.update(batch, VALUES, Aggregation(mode, scale=64.0), 0.0, mask)
            out[f"{where} {mode}"] = [told[key] for key in TOLD_OF_VALUES]
    return out


def three_steps_of_values(critic: CriticLearner) -> list[float]:
    """Sum of the values before and after three updates on the same mini-batch."""
    batch = ragged_batch()
    before = float(critic.compute_values(batch).sum())
    for _ in range(3):
        critic.update(batch, VALUES, "token-mean", 0.01)
    return [before, float(critic.compute_values(batch).sum())]


def critic(directory: Path, budget: MicroBatchBudget, ranks: RankGroup | None = None) -> CriticLearner:
    """With a head that isn't 0 everywhere: else the body would learn nothing."""
    config = OptimizerConfig(kind="sgd", learning_rate=1.0)
    model = ValueModel(load_model(directory))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.head.weight.copy_(0.2 * torch.randn(model.head.weight.shape, generator=generator))
    return CriticLearner(model, config, LearnerSetup(budget=budget, ranks=ranks or RankGroup()))


def learner(directory: Path, budget: MicroBatchBudget, ranks: RankGroup | None = None) -> ActorLearner:
    config = OptimizerConfig(kind="sgd", learning_rate=1.0)
    return ActorLearner(load_model(directory), config, LearnerSetup(budget=budget, ranks=ranks or RankGroup()))


def main(directory: Path, rank: int, size: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, size, meeting, timeout_seconds=60.0)
    actor = learner(directory, MicroBatchBudget(max_sequences=2), ranks)
    told: dict[str, Any] = {"grid": grid(actor), "probability": three_steps(actor)}
    # a single pass: the second process has none
    whole = learner(directory, MicroBatchBudget(), ranks)
    once = whole.update(near_batch(whole.scorer), objective("cispo"), "token-mean", 0.0)
    values = critic(directory, MicroBatchBudget(max_sequences=2), ranks)
    told["values"], told["value"] = critic_grid(values), three_steps_of_values(values)
    told["once"] = [once[key] for key in TOLD]
    told["weights"] = hashlib.sha256(
        b"".join(value.numpy().tobytes() for one in (actor, values) for _, value in one.weights())
    ).hexdigest()
    ranks.destroy()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
