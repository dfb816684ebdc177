"""Five optimizer steps of the Megatron learner; as a program, one rank of it, which runs all cases in turn.

python megatron_steps.py RANK NUM_RANKS RENDEZVOUS_FILE MODELS OUT CASES
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loss_grid import ragged_batch
from rank_processes import join_ranks, leave_group
from safetensors.torch import save_file

from quintet.algorithms.objective import PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.records import Batch
from quintet.training.parallel.process_group import RankGroup

RATE = 3e-3
OBJECTIVE = PolicyObjective(AlgorithmConfig(entropy_coefficient=0.01))
METRICS = ("actor/pg_loss", "actor/entropy", "grad_norm", "skipped", "probs_diff_max")
STEPS = 5


def experiment(settings: dict[str, Any]) -> Experiment:
    """Return a run whose actor and critic have these settings."""
    optimizer = {"learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": 0.5, "epsilon": 1e-5} | settings.get(
        "optimizer", {}
    )
    actor = {"backend": "megatron", "optimizer": optimizer, "budget": {"tokens": settings.get("tokens", 60)}}
    actor |= {key: settings[key] for key in ("megatron", "parallel", "gradient_checkpointing") if key in settings}
    shared = {key: actor[key] for key in ("backend", "parallel", "megatron", "optimizer", "budget") if key in actor}
    return Experiment.model_validate(
        {"actor": actor, "critic": shared, "policy": settings.get("policy", {})}
        | {"training": {"micro_batch_tokens": 60}}
    )


def build_batch(vocab_size: int) -> Batch:
    """Return the ragged batch with tokens of a small vocabulary."""
    batch = ragged_batch()
    return replace(batch, tokens=batch.tokens % vocab_size)


def train(actor: Any, batch: Batch, num_steps: int = STEPS) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    steps = [actor.update(batch, OBJECTIVE, "token-mean", RATE) for _ in range(num_steps)]
    return [{name: metrics[name] for name in METRICS} for metrics in steps]


def main(policy: Path, out: Path, ranks: RankGroup, settings: dict[str, Any]) -> None:
    from quintet.training.megatron.core_package import require_megatron

    require_megatron()
    from quintet.training.megatron.build import build_megatron_actor

    torch.set_num_threads(1)
    actor = build_megatron_actor(experiment(settings), policy)
    batch = build_batch(actor.model.config.vocab_size)
    before = actor.scorer.compute_log_probs(batch)
    metrics = train(actor, batch)
    weights = {name: tensor.contiguous().clone() for name, tensor in actor.weights()}
    state = actor.optimizer_state_dict()
    if ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_file(weights | {"logprobs": before}, out / "weights.safetensors")
        save_file(state, out / "state.safetensors")
    (out.parent / f"{out.name}.{ranks.rank}.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    from megatron.core import parallel_state

    ranks, (models, out, cases) = join_ranks()
    try:
        for number, (kind, settings) in enumerate(json.loads(cases)):
            main(Path(models) / kind, Path(out) / str(number), ranks, settings)
            parallel_state.destroy_model_parallel()
    finally:
        leave_group(ranks)
