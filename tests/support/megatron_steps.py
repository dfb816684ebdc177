"""Five optimizer steps of the Megatron learner; as a program, one of the ranks that share it, case by case.

python megatron_steps.py MODELS OUT RANK SIZE MEETING CASES
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loss_grid import ragged_batch
from safetensors.torch import save_file

from quintet.algorithms.objective import PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.records import Batch
from quintet.training.parallel.process_group import RankGroup

RATE = 3e-3
OBJECTIVE = PolicyObjective(AlgorithmConfig(entropy_coefficient=0.01))
TOLD = ("actor/pg_loss", "actor/entropy", "grad_norm", "skipped", "probs_diff_max")
STEPS = 5


def experiment(settings: dict[str, Any]) -> Experiment:
    """The run whose actor those are the settings of."""
    optimizer = {"learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": 0.5, "epsilon": 1e-5} | settings.get(
        "optimizer", {}
    )
    actor = {"backend": "megatron", "optimizer": optimizer, "budget": {"tokens": settings.get("tokens", 60)}}
    actor |= {key: settings[key] for key in ("megatron", "parallel", "gradient_checkpointing") if key in settings}
    same = {key: actor[key] for key in ("backend", "parallel", "megatron", "optimizer", "budget") if key in actor}
    return Experiment.model_validate(
        {"actor": actor, "critic": same, "policy": settings.get("policy", {})}
        | {"training": {"micro_batch_tokens": 60}}
    )


def batch(vocabulary: int) -> Batch:
    """The ragged batch with tokens that a small vocabulary has."""
    given = ragged_batch()
    return replace(given, tokens=given.tokens % vocabulary)


def steps(actor: Any, given: Batch, number: int = STEPS) -> list[dict[str, float]]:
    """What each of the steps tells."""
    return [
        {name: told[name] for name in TOLD}
        for told in (actor.update(given, OBJECTIVE, "token-mean", RATE) for _ in range(number))
    ]


def main(policy: Path, out: Path, ranks: RankGroup, settings: dict[str, Any]) -> None:
    from quintet.training.megatron.core_package import require_megatron

    require_megatron()
    from quintet.training.megatron.build import build_megatron_actor

    torch.set_num_threads(1)
    actor = build_megatron_actor(experiment(settings), policy)
    given = batch(actor.model.config.vocab_size)
    before = actor.scorer.compute_log_probs(given)
    told = steps(actor, given)
    weights = {name: tensor.contiguous().clone() for name, tensor in actor.weights()}
    state = actor.optimizer_state_dict()
    if ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_file(weights | {"logprobs": before}, out / "weights.safetensors")
        save_file(state, out / "state.safetensors")
    (out.parent / f"{out.name}.{ranks.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    from megatron.core import parallel_state

    _, models, out, rank, size, meeting, cases = sys.argv
    ranks = RankGroup.join(int(rank), int(size), Path(meeting), 100.0)
    try:
        for number, (kind, settings) in enumerate(json.loads(cases)):
            main(Path(models) / kind, Path(out) / str(number), ranks, settings)
            parallel_state.destroy_model_parallel()
    finally:
        ranks.destroy()
