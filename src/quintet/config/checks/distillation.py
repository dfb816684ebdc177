"""Distillation in fine-tuning that cannot be done."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.problems import ConfigProblem

KEY = "sft.distillation"


def distillation_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a missing teacher, and learners whose logits are spread over several devices or in Megatron."""
    config = composed.experiment
    if config.sft is None or config.sft.distillation is None:
        return
    if config.reference.path is None:
        problem = "distillation needs a teacher"
        yield composed.problem("reference.path", problem, f"reference.path=DIRECTORY, or {KEY}=null")
    for name in ("actor", "reference"):
        learner = getattr(config, name)
        if learner.backend == "megatron":
            problem = "Megatron has no divergence from a teacher in fine-tuning"
            yield composed.problem(f"{name}.backend", problem, f"{name}.backend=fsdp2, or {KEY}=null")
        elif learner.parallel.tensor > 1:
            key, problem = (
                f"{name}.parallel.tensor",
                "distillation compares whole logits, which tensor parallelism splits",
            )
            yield composed.problem(key, problem, f"{key}=1, or {KEY}=null")
